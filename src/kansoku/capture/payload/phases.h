// What calls.c uses of phases.c. Everything runs under the interpreter lock.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef struct Phases Phases;

enum { kStep = 1, kDataWait = 2, kForward = 3, kBackward = 4, kOptimizer = 5 };
enum { kRecompute = 2, kEvaluates = 64 };

#if PY_VERSION_HEX < 0x030A0000
static inline PyObject* Py_NewRef(PyObject* object) {
  Py_INCREF(object);
  return object;
}
#endif

extern PyTypeObject PhasesType;
// Whether the calling thread is the observed one.
int is_observed(Phases* self);
int is_inside(Phases* self, int kind);
// Return the id of a new phase, 0 on another thread, and (0 with an exception set) where that failed.
uint64_t open_phase(Phases* self, int kind, PyObject* name, int flags, PyObject* attributes);
// Close a phase and whatever an exception left open above it; -1 with an exception where that failed.
int close_phase(Phases* self, uint64_t span, int flags);
void add_work(Phases* self, double flops, double tokens);
int update_begins(Phases* self, PyObject* optimizer);
int update_ends(Phases* self, PyObject* optimizer);
extern PyObject* the_calls;  // the one object of calls.c
int ready_calls(void);       // before it is used; -1 with an exception
