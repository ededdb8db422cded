// Phases and steps of the observed thread: phases.py word for word, and the writing of lane 0 of the
// ring (ring.py, RingWriter) with it. Between the kernels of a step, which have emptied the caches, a
// phase costs several times less here. Whatever is seldom (a new name, an overwritten slot, the clocks'
// anchor) calls back into Python. Byte layout: docs/formats/ring.md.
//
// Everything runs under the interpreter lock; no other thread than the observed one changes phases.
#include "phases.h"

#include <stddef.h>
#include <structmember.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { kIncomplete = 1, kFailed = 8 };
enum { kNow = 144, kHead = 256 + 16, kCounters = 384, kKinds = 16 };
enum { kTemplate = 76, kKnown = 64, kStarts = 4096 };
enum { kSureNs = 20000 };
#define kAnchorEveryNs 10000000000LL

typedef struct {
  uint64_t id;
  int64_t start, cpu, duration;
  uint64_t parent;
  int32_t step;
  uint16_t kind, flags;
  unsigned char middle[32];
  int64_t rss, device_ns;
  double value_a, value_b;
  uint64_t origin, id_again;
} Record;
_Static_assert(sizeof(Record) == 128 && offsetof(Record, kind) == 44 && offsetof(Record, rss) == 80,
               "the record of docs/formats/ring.md");

typedef struct {
  PyObject *name, *attributes, *template;  // name and attributes are known by identity
  int kind, flags;
} Known;

typedef struct {
  uint64_t span, parent;
  int64_t start, cpu;
  PyObject* template;
} Open;

typedef struct {
  uint64_t a, b;
} Pair;

typedef struct {
  Pair* items;
  size_t count, room;
} Pairs;

struct Phases {
  PyObject_HEAD
  Py_buffer view;
  char* base;
  uint64_t offset, capacity, newest;
  unsigned long thread;
  int queue;
  PyObject *make_template, *optimizers, *anchor, *late, *close_late, *step_name, *type_name, *empty;
  Known known[kKnown];
  Open* stack;
  size_t depth, room;
  int64_t step, step_start, step_cpu, next_start, anchored;
  uint64_t step_span;
  double tokens, flops;
  int64_t looked, cpu, told_cpu, queued, peak;  // see look
  long slept, pushed;                           // voluntary and other context switches at the last look
  int64_t ended, ended_cpu, updated, updated_cpu;
  Pairs late_spans, expected, stepped, nesting;  // (span, parent); ids; ids; (id, span)
  int keeps_late, ending;
  uint64_t starts_made;
  Pair starts[kStarts];
};

static int64_t clock_ns(clockid_t clock) {
  struct timespec stamp;
  clock_gettime(clock, &stamp);
  return stamp.tv_sec * 1000000000LL + stamp.tv_nsec;
}

// -- small sets of a few numbers ------------------------------------------------------------------

static int add(Pairs* pairs, uint64_t a, uint64_t b) {
  if (pairs->count == pairs->room) {
    size_t room = pairs->room ? 2 * pairs->room : 8;
    Pair* items = PyMem_Realloc(pairs->items, room * sizeof(Pair));
    if (items == NULL) {
      PyErr_NoMemory();
      return -1;
    }
    pairs->items = items;
    pairs->room = room;
  }
  pairs->items[pairs->count++] = (Pair){a, b};
  return 0;
}

static int has(const Pairs* pairs, uint64_t a) {
  for (size_t i = 0; i < pairs->count; ++i)
    if (pairs->items[i].a == a) return 1;
  return 0;
}

static int is_less(const Pairs* some, const Pairs* all) {  // a proper subset
  if (some->count >= all->count) return 0;
  for (size_t i = 0; i < some->count; ++i)
    if (!has(all, some->items[i].a)) return 0;
  return 1;
}

static void take(Pairs* to, Pairs* from) {  // to = from, from = nothing
  Pair* items = to->items;
  size_t room = to->room;
  *to = *from;
  *from = (Pairs){items, 0, room};
}

// -- records --------------------------------------------------------------------------------------

static volatile int64_t* word(Phases* self, size_t at) { return (volatile int64_t*)(self->base + at); }

static Record* slot(Phases* self, uint64_t span) {
  return (Record*)(self->base + self->offset + (span - 1) % self->capacity * sizeof(Record));
}

static int holds(Phases* self, uint64_t span) { return slot(self, span)->id == span; }

static uint64_t record(Phases* self, PyObject* template, int64_t start, int64_t step, uint64_t parent) {
  uint64_t n = ++self->newest;
  Record* place = slot(self, n);
  ((volatile Record*)place)->id_again = 0;  // a reader must not take a mixture for a record
  __atomic_thread_fence(__ATOMIC_RELEASE);
  place->id = n;
  place->start = start;
  place->cpu = place->duration = -1;
  place->parent = parent;
  place->step = (int32_t)step;
  memcpy((char*)place + offsetof(Record, kind), PyBytes_AS_STRING(template), kTemplate);
  __atomic_thread_fence(__ATOMIC_RELEASE);
  ((volatile Record*)place)->id_again = n;
  return n;
}

static void complete(Phases* self, uint64_t span, int64_t cpu, int64_t duration) {
  Record* place = slot(self, span);
  place->cpu = cpu;
  __atomic_thread_fence(__ATOMIC_RELEASE);  // who sees the duration sees everything
  ((volatile Record*)place)->duration = duration;
}

static void mark(Phases* self, uint64_t span, int flags) {
  if (holds(self, span)) slot(self, span)->flags |= (uint16_t)flags;
}

static int call_late(Phases* self, uint64_t span, PyObject* template, uint64_t parent, int64_t start,
                     int64_t end, int64_t cpu, int64_t peak, double a, double b) {
  PyObject* done = PyObject_CallFunction(self->late, "KOLKLLLLdd", (unsigned long long)span, template,
                                         (long long)self->step, (unsigned long long)parent,
                                         (long long)start, (long long)end, (long long)cpu,
                                         (long long)peak, a, b);
  Py_XDECREF(done);
  return done == NULL ? -1 : 0;
}

// Complete and count (kind 0: not) a span and note the innermost phase.
static int end(Phases* self, uint64_t span, int kind, PyObject* template, uint64_t parent, int64_t start,
               int64_t now, int64_t cpu, int64_t peak, double a, double b, uint64_t phase) {
  *word(self, kNow + 8) = (int64_t)phase;
  if (kind > 0 && kind < kKinds)
    __atomic_fetch_add((uint64_t*)(self->base + kCounters + 16 * kind), 1, __ATOMIC_RELAXED);
  if (self->newest - span >= self->capacity)
    return call_late(self, span, template, parent, start, now, cpu, peak, a, b);
  Record* place = slot(self, span);
  place->rss = peak;
  place->value_a = a;
  place->value_b = b;
  complete(self, span, cpu, now - start);
  return 0;
}

static void turn(Phases* self, int64_t step, uint64_t phase, int64_t now) {
  *word(self, kHead) = (int64_t)self->newest;
  *word(self, kNow + 24) = now;
  *word(self, kNow) = step;
  *word(self, kNow + 8) = (int64_t)phase;
}

// Return a new reference to the known bytes of a record.
static PyObject* find_template(Phases* self, int kind, PyObject* name, int flags, PyObject* attributes) {
  size_t at = ((uintptr_t)name >> 4 ^ (uintptr_t)attributes >> 5 ^ kind * 7u ^ flags * 3u) % kKnown;
  Known* known = &self->known[at];
  if (known->name != name || known->attributes != attributes || known->kind != kind ||
      known->flags != flags) {
    PyObject* made = PyObject_CallFunction(self->make_template, "iOiO", kind, name, flags, attributes);
    if (made == NULL) return NULL;
    if (!PyBytes_Check(made) || PyBytes_GET_SIZE(made) != kTemplate) {
      Py_DECREF(made);
      PyErr_SetString(PyExc_ValueError, "a template has 76 bytes");
      return NULL;
    }
    Known old = *known;
    *known = (Known){Py_NewRef(name), Py_NewRef(attributes), made, kind, flags};
    Py_XDECREF(old.name);
    Py_XDECREF(old.attributes);
    Py_XDECREF(old.template);
  }
  return Py_NewRef(known->template);
}

// Read how long the thread has waited for a CPU so far; where the kernel does not count it, the file
// is missing or has three zeros; it is not asked for again then.
static void read_queue(Phases* self, int64_t* queued) {
  char text[80];
  ssize_t length = self->queue < 0 ? -1 : pread(self->queue, text, sizeof text - 1, 0);
  int64_t slices = 0;
  if (length > 0) {
    char* at = text;
    text[length] = 0;
    strtoll(text, &at, 10);
    *queued = strtoll(at, &at, 10);
    slices = strtoll(at, &at, 10);
  }
  if (slices < 1) self->queue = -1;
}

// Return the CPU time of the thread so far; note how long it has waited for a CPU, and peak memory.
//
// The kernel, asked for the CPU time, first brings the books of the running thread up to date, and
// may end its time slice on the way. So it is asked only where the thread has slept. Where it was
// not off its CPU since the last look, all the time is its own; where others were let in, what it
// did not wait for. Where the kernel does not count waiting, it is asked each time.
static int64_t look(Phases* self, int64_t now) {
  int64_t own = now - self->looked;
  if (own < kSureNs) return self->told_cpu = self->cpu + own;
  struct rusage usage;
  int unknown = getrusage(RUSAGE_THREAD, &usage), slept = unknown || usage.ru_nvcsw != self->slept;
  int64_t queued = self->queued;
  if (slept || usage.ru_nivcsw != self->pushed) read_queue(self, &queued);
  if (self->queue < 0) {
    slept = 1;
    queued = 0;
  }
  own -= queued - self->queued;
  self->queued = queued;
  int64_t cpu = slept ? clock_ns(CLOCK_THREAD_CPUTIME_ID) : self->cpu + own;
  // Within kSureNs it may have lost its CPU all the same: no phase costs less than nothing.
  self->cpu = self->told_cpu = cpu > self->told_cpu ? cpu : self->told_cpu;
  self->looked = now;
  if (!unknown) {
    // Of the process, though it asks for the thread: that spares the kernel a walk over all threads.
    self->peak = (int64_t)usage.ru_maxrss << 10;
    self->slept = usage.ru_nvcsw;
    self->pushed = usage.ru_nivcsw;
  }
  return self->cpu;
}

// -- steps ----------------------------------------------------------------------------------------

static int open_step(Phases* self, int64_t now, int64_t cpu) {
  PyObject* template = find_template(self, kStep, self->step_name, 0, self->empty);
  if (template == NULL) return -1;
  self->step += 1;
  self->step_start = self->next_start ? self->next_start : now;
  self->step_cpu = cpu;
  self->starts[self->starts_made++ % kStarts] = (Pair){(uint64_t)self->step, (uint64_t)self->step_start};
  self->step_span = record(self, template, self->step_start, self->step, 0);
  Py_DECREF(template);
  self->tokens = self->flops = 0;
  turn(self, self->step, self->step_span, now);
  return 0;
}

static int close_step(Phases* self, int64_t at, int64_t cpu, int is_complete) {
  int flags = is_complete ? 0 : kIncomplete;
  uint64_t span = self->step_span;
  PyObject* template = find_template(self, kStep, self->step_name, flags, self->empty);
  if (template == NULL) return -1;
  if (flags) mark(self, span, flags);
  self->step_span = 0;
  self->next_start = at;
  int failed = end(self, span, is_complete ? kStep : 0, template, 0, self->step_start, at,
                   cpu - self->step_cpu, self->peak, self->tokens, self->flops, 0);
  Py_DECREF(template);
  // Between two steps the next step's number stands: what comes now belongs to it.
  turn(self, self->step + 1, 0, at);
  if (!failed && at - self->anchored > kAnchorEveryNs) {
    self->anchored = at;
    PyObject* done = PyObject_CallNoArgs(self->anchor);
    Py_XDECREF(done);
    failed = done == NULL;
  }
  return failed ? -1 : 0;
}

static int end_step(Phases* self, int64_t at, int64_t cpu) {
  take(&self->expected, &self->stepped);
  self->keeps_late = self->ending = 0;
  return close_step(self, at, cpu, 1);
}

static int split_step(Phases* self) {
  if (!self->step_span || self->depth) return 0;
  uint64_t before = self->step_span;
  if (close_step(self, self->updated, self->updated_cpu, 1)) return -1;
  if (open_step(self, self->updated, self->updated_cpu)) return -1;
  take(&self->expected, &self->stepped);
  for (size_t i = 0; self->keeps_late && i < self->late_spans.count; ++i) {
    Pair late = self->late_spans.items[i];
    if (!holds(self, late.a)) continue;
    Record* place = slot(self, late.a);
    place->parent = late.b == before ? self->step_span : late.b;
    place->step = (int32_t)self->step;
  }
  self->keeps_late = 0;
  return 0;
}

// -- phases ---------------------------------------------------------------------------------------

int is_observed(Phases* self) { return PyThread_get_thread_ident() == self->thread; }

int is_inside(Phases* self, int kind) {
  for (size_t i = 0; i < self->depth; ++i)
    if ((unsigned char)PyBytes_AS_STRING(self->stack[i].template)[0] == kind) return 1;
  return 0;
}

void add_work(Phases* self, double flops, double tokens) {
  self->flops += flops;
  self->tokens += tokens;
}

uint64_t open_phase(Phases* self, int kind, PyObject* name, int flags, PyObject* attributes) {
  if (!is_observed(self)) return 0;
  PyObject* template = find_template(self, kind, name, flags, attributes);
  if (template == NULL) return 0;
  if (self->depth == self->room) {
    size_t room = self->room ? 2 * self->room : 16;
    Open* stack = PyMem_Realloc(self->stack, room * sizeof(Open));
    if (stack == NULL) {
      Py_DECREF(template);
      PyErr_NoMemory();
      return 0;
    }
    self->stack = stack;
    self->room = room;
  }
  int64_t now = clock_ns(CLOCK_MONOTONIC);
  int64_t cpu = look(self, now);
  if (!self->step_span && open_step(self, now, cpu)) {
    Py_DECREF(template);
    return 0;
  }
  uint64_t parent = self->depth ? self->stack[self->depth - 1].span : self->step_span;
  uint64_t span = record(self, template, now, self->step, parent);
  *word(self, kNow + 8) = (int64_t)span;
  self->stack[self->depth++] = (Open){span, parent, now, cpu, template};
  if (self->keeps_late && add(&self->late_spans, span, parent)) return 0;
  return span;
}

int close_phase(Phases* self, uint64_t span, int flags) {
  int64_t now = clock_ns(CLOCK_MONOTONIC);
  int64_t cpu = look(self, now);
  double queued = (double)self->queued;
  while (self->depth) {
    Open top = self->stack[--self->depth];
    const unsigned char* head = (const unsigned char*)PyBytes_AS_STRING(top.template);
    int more = top.span == span ? flags : flags | kFailed;
    if (more) mark(self, top.span, more);
    uint64_t phase = self->depth ? self->stack[self->depth - 1].span : self->step_span;
    int failed = end(self, top.span, head[0], top.template, top.parent, top.start, now, cpu - top.cpu,
                     self->peak, queued, 0.0, phase);
    Py_DECREF(top.template);
    if (failed) return -1;
    if (top.span == span) break;
  }
  self->ended = now;
  self->ended_cpu = cpu;
  if (self->ending && !self->depth) return end_step(self, now, cpu);
  return 0;
}

// -- updates --------------------------------------------------------------------------------------

// Close the update of this optimizer that ended by an exception, where there is one.
static int close_broken(Phases* self, uint64_t key) {
  uint64_t span = 0;
  for (size_t i = 0; i < self->nesting.count; ++i)
    if (self->nesting.items[i].a == key) span = self->nesting.items[i].b;
  if (!span) return 0;
  self->nesting.count = 0;
  for (size_t i = 0; i < self->depth; ++i)
    if (self->stack[i].span == span) return close_phase(self, span, kFailed);
  return 0;
}

int update_begins(Phases* self, PyObject* optimizer) {
  if (!is_observed(self)) return 0;
  uint64_t key = (uintptr_t)optimizer;
  if (close_broken(self, key)) return -1;
  // Again before all the others: the step was over after the update before.
  if (!self->nesting.count && has(&self->stepped, key) && split_step(self)) return -1;
  PyObject* name = PyObject_GetAttr((PyObject*)Py_TYPE(optimizer), self->type_name);
  if (name == NULL) return -1;
  uint64_t span = open_phase(self, kOptimizer, name, 0, self->empty);
  Py_DECREF(name);
  if (!span && PyErr_Occurred()) return -1;
  return span ? add(&self->nesting, key, span) : 0;
}

static int ask_expected(Phases* self) {
  PyObject* ids = PyObject_CallNoArgs(self->optimizers);
  if (ids == NULL) return -1;
  PyObject* listed = PySequence_Fast(ids, "a list of ids");
  Py_DECREF(ids);
  if (listed == NULL) return -1;
  int failed = 0;
  for (Py_ssize_t i = 0; !failed && i < PySequence_Fast_GET_SIZE(listed); ++i) {
    uint64_t key = PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(listed, i));
    failed = PyErr_Occurred() != NULL || (!has(&self->expected, key) && add(&self->expected, key, 0));
  }
  Py_DECREF(listed);
  return failed ? -1 : 0;
}

int update_ends(Phases* self, PyObject* optimizer) {
  if (!is_observed(self)) return 0;
  uint64_t key = (uintptr_t)optimizer;
  int found = 0;
  while (!found && self->nesting.count) {
    Pair known = self->nesting.items[--self->nesting.count];
    if (known.a != key) continue;
    found = 1;
    if (close_phase(self, known.b, 0)) return -1;
  }
  if (!found) return 0;
  if (!has(&self->stepped, key) && add(&self->stepped, key, 0)) return -1;
  self->updated = self->ended;
  self->updated_cpu = self->ended_cpu;
  if (self->nesting.count) return 0;
  if (!self->expected.count && ask_expected(self)) return -1;
  if (is_less(&self->stepped, &self->expected) || !self->step_span) {
    self->keeps_late = 1;
    self->late_spans.count = 0;
    return 0;
  }
  if (!self->depth) return end_step(self, self->updated, self->updated_cpu);
  self->ending = 1;  // an update inside a backward ends the step with the backward
  return 0;
}

// -- what Python calls ----------------------------------------------------------------------------

static int get_int(PyObject* value, int* out) {
  long number = PyLong_AsLong(value);
  if (number == -1 && PyErr_Occurred()) return -1;
  if (number < 0 || number > 65535) {
    PyErr_SetString(PyExc_ValueError, "kinds and flags have 16 bits");
    return -1;
  }
  *out = (int)number;
  return 0;
}

static PyObject* phases_open(Phases* self, PyObject* const* args, Py_ssize_t count) {
  int kind = 0, flags = 0;
  if (count < 2 || count > 4 || !PyUnicode_Check(args[1]) || (count > 3 && !PyUnicode_Check(args[3]))) {
    PyErr_SetString(PyExc_TypeError, "open(kind, name, flags=0, attributes='')");
    return NULL;
  }
  if (get_int(args[0], &kind) || (count > 2 && get_int(args[2], &flags))) return NULL;
  uint64_t span = open_phase(self, kind, args[1], flags, count > 3 ? args[3] : self->empty);
  if (!span && PyErr_Occurred()) return NULL;
  return PyLong_FromUnsignedLongLong(span);
}

static PyObject* phases_close(Phases* self, PyObject* const* args, Py_ssize_t count) {
  int flags = 0;
  if (count < 1 || count > 2) {
    PyErr_SetString(PyExc_TypeError, "close(span, flags=0)");
    return NULL;
  }
  uint64_t span = PyLong_AsUnsignedLongLong(args[0]);
  if (PyErr_Occurred() || (count > 1 && get_int(args[1], &flags))) return NULL;
  if (span && close_phase(self, span, flags)) return NULL;
  Py_RETURN_NONE;
}

static PyObject* phases_leave(Phases* self, PyObject* ignored) {
  (void)ignored;
  while (self->depth)
    if (close_phase(self, self->stack[self->depth - 1].span, kIncomplete)) return NULL;
  int64_t now = clock_ns(CLOCK_MONOTONIC);
  if (self->step_span && close_step(self, now, look(self, now), 0)) return NULL;
  self->next_start = 0;
  self->nesting.count = self->stepped.count = 0;
  Py_RETURN_NONE;
}

static PyObject* phases_inside(Phases* self, PyObject* value) {
  int kind = 0;
  if (get_int(value, &kind)) return NULL;
  return PyBool_FromLong(is_inside(self, kind));
}

static PyObject* phases_update_begins(Phases* self, PyObject* const* args, Py_ssize_t count) {
  if (count < 1) {
    PyErr_SetString(PyExc_TypeError, "update_begins(optimizer)");
    return NULL;
  }
  if (update_begins(self, args[0])) return NULL;
  Py_RETURN_NONE;
}

static PyObject* phases_update_ends(Phases* self, PyObject* const* args, Py_ssize_t count) {
  if (count < 1) {
    PyErr_SetString(PyExc_TypeError, "update_ends(optimizer)");
    return NULL;
  }
  if (update_ends(self, args[0])) return NULL;
  Py_RETURN_NONE;
}

static PyObject* phases_work(Phases* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "work(flops, tokens)");
    return NULL;
  }
  double flops = PyFloat_AsDouble(args[0]), tokens = PyFloat_AsDouble(args[1]);
  if (PyErr_Occurred()) return NULL;
  add_work(self, flops, tokens);
  Py_RETURN_NONE;
}

static PyObject* phases_starts(Phases* self, PyObject* ignored) {
  (void)ignored;
  uint64_t made = self->starts_made, first = made > kStarts ? made - kStarts : 0;
  PyObject* list = PyList_New(0);
  for (uint64_t i = first; list != NULL && i < made; ++i) {
    Pair start = self->starts[i % kStarts];
    PyObject* pair = Py_BuildValue("LL", (long long)start.a, (long long)start.b);
    if (pair == NULL || PyList_Append(list, pair)) Py_CLEAR(list);
    Py_XDECREF(pair);
  }
  return list;
}

// What a RingWriter delegates: the same functions as its own closures.

static PyObject* phases_record(Phases* self, PyObject* args) {
  PyObject* template;
  long long start, step;
  unsigned long long parent;
  if (!PyArg_ParseTuple(args, "SLLK", &template, &start, &step, &parent)) return NULL;
  if (PyBytes_GET_SIZE(template) != kTemplate) {
    PyErr_SetString(PyExc_ValueError, "a template has 76 bytes");
    return NULL;
  }
  return PyLong_FromUnsignedLongLong(record(self, template, start, step, parent));
}

static PyObject* phases_complete(Phases* self, PyObject* args) {
  unsigned long long span;
  long long start, until, cpu;
  if (!PyArg_ParseTuple(args, "KLLL", &span, &start, &until, &cpu)) return NULL;
  if (span == 0 || span > self->newest) {
    PyErr_SetString(PyExc_ValueError, "no such record");
    return NULL;
  }
  if (self->newest - span >= self->capacity) return PyObject_CallObject(self->close_late, args);
  complete(self, span, cpu, until - start);
  Py_RETURN_NONE;
}

static PyObject* phases_slot(Phases* self, PyObject* value) {
  unsigned long long span = PyLong_AsUnsignedLongLong(value);
  if (PyErr_Occurred()) return NULL;
  return PyLong_FromUnsignedLongLong(self->offset + (span - 1) % self->capacity * sizeof(Record));
}

static PyObject* phases_newest(Phases* self, PyObject* ignored) {
  (void)ignored;
  return PyLong_FromUnsignedLongLong(self->newest);
}

static PyObject* get_calls(PyObject* self, void* ignored) {
  (void)self, (void)ignored;
  return Py_NewRef(the_calls);
}

static PyObject* get_parent(Phases* self, void* ignored) {
  (void)ignored;
  uint64_t parent = self->depth ? self->stack[self->depth - 1].span : self->step_span;
  return PyLong_FromUnsignedLongLong(parent);
}

// -- the type -------------------------------------------------------------------------------------

static int phases_traverse(Phases* self, visitproc visit, void* arg) {
  Py_VISIT(self->make_template);
  Py_VISIT(self->optimizers);
  Py_VISIT(self->anchor);
  Py_VISIT(self->late);
  Py_VISIT(self->close_late);
  return 0;
}

static int phases_clear(Phases* self) {
  Py_CLEAR(self->make_template);
  Py_CLEAR(self->optimizers);
  Py_CLEAR(self->anchor);
  Py_CLEAR(self->late);
  Py_CLEAR(self->close_late);
  return 0;
}

static void phases_dealloc(Phases* self) {
  PyObject_GC_UnTrack(self);
  phases_clear(self);
  for (size_t i = 0; i < kKnown; ++i) {
    Py_XDECREF(self->known[i].name);
    Py_XDECREF(self->known[i].attributes);
    Py_XDECREF(self->known[i].template);
  }
  for (size_t i = 0; i < self->depth; ++i) Py_DECREF(self->stack[i].template);
  Py_XDECREF(self->step_name);
  Py_XDECREF(self->type_name);
  Py_XDECREF(self->empty);
  PyMem_Free(self->stack);
  PyMem_Free(self->late_spans.items);
  PyMem_Free(self->expected.items);
  PyMem_Free(self->stepped.items);
  PyMem_Free(self->nesting.items);
  if (self->base != NULL) PyBuffer_Release(&self->view);
  Py_TYPE(self)->tp_free((PyObject*)self);
}

// Phases(buffer, lane offset, lane capacity, thread identity, queue file, template, optimizers, anchor,
// late, close_late)
static PyObject* phases_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  (void)keywords;
  PyObject *buffer, *make_template, *optimizers, *anchor, *late, *close_late;
  unsigned long long offset, capacity;
  unsigned long thread;
  int queue;
  if (!PyArg_ParseTuple(args, "OKKkiOOOOO", &buffer, &offset, &capacity, &thread, &queue, &make_template,
                        &optimizers, &anchor, &late, &close_late))
    return NULL;
  Phases* self = (Phases*)type->tp_alloc(type, 0);
  if (self == NULL) return NULL;
  if (PyObject_GetBuffer(buffer, &self->view, PyBUF_WRITABLE)) goto failed;
  self->base = self->view.buf;
  uint64_t size = (uint64_t)self->view.len;
  if (capacity < 1 || offset % 8 || (uintptr_t)self->base % 8 || offset < 4096 || offset > size ||
      capacity > (size - offset) / sizeof(Record)) {
    PyErr_SetString(PyExc_ValueError, "the lane lies outside the ring");
    goto failed;
  }
  self->offset = offset;
  self->capacity = capacity;
  self->thread = thread;
  self->queue = queue;
  self->make_template = Py_NewRef(make_template);
  self->optimizers = Py_NewRef(optimizers);
  self->anchor = Py_NewRef(anchor);
  self->late = Py_NewRef(late);
  self->close_late = Py_NewRef(close_late);
  self->step_name = PyUnicode_InternFromString("step");
  self->type_name = PyUnicode_InternFromString("__name__");
  self->empty = PyUnicode_InternFromString("");
  if (self->step_name == NULL || self->type_name == NULL || self->empty == NULL) goto failed;
  self->step = self->step_cpu = self->slept = self->peak = -1;
  self->anchored = clock_ns(CLOCK_MONOTONIC);
  return (PyObject*)self;
failed:
  Py_DECREF(self);
  return NULL;
}

#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL
static PyMethodDef phases_methods[] = {
    {"open", FAST(phases_open), NULL},
    {"close", FAST(phases_close), NULL},
    {"leave", (PyCFunction)phases_leave, METH_NOARGS, NULL},
    {"inside", (PyCFunction)phases_inside, METH_O, NULL},
    {"update_begins", FAST(phases_update_begins), NULL},
    {"update_ends", FAST(phases_update_ends), NULL},
    {"work", FAST(phases_work), NULL},
    {"starts", (PyCFunction)phases_starts, METH_NOARGS, NULL},
    {"record", (PyCFunction)phases_record, METH_VARARGS, NULL},
    {"complete", (PyCFunction)phases_complete, METH_VARARGS, NULL},
    {"slot", (PyCFunction)phases_slot, METH_O, NULL},
    {"newest", (PyCFunction)phases_newest, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef phases_members[] = {
    {"step", T_LONGLONG, offsetof(Phases, step), READONLY, NULL},
    {"step_span", T_ULONGLONG, offsetof(Phases, step_span), READONLY, NULL},
    {"tokens", T_DOUBLE, offsetof(Phases, tokens), 0, NULL},
    {"flops", T_DOUBLE, offsetof(Phases, flops), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef phases_getset[] = {
    {"parent", (getter)get_parent, NULL, NULL, NULL},
    {"calls", get_calls, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject PhasesType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "_kansoku_phases.Phases",
    .tp_basicsize = sizeof(Phases),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = phases_new,
    .tp_dealloc = (destructor)phases_dealloc,
    .tp_traverse = (traverseproc)phases_traverse,
    .tp_clear = (inquiry)phases_clear,
    .tp_methods = phases_methods,
    .tp_members = phases_members,
    .tp_getset = phases_getset,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_kansoku_phases", .m_size = -1,
};

PyMODINIT_FUNC PyInit__kansoku_phases(void) {
  if (PyType_Ready(&PhasesType)) return NULL;
  PyObject* made = PyModule_Create(&module);
  if (made == NULL) return NULL;
  Py_INCREF(&PhasesType);
  if (PyModule_AddObject(made, "Phases", (PyObject*)&PhasesType)) {
    Py_DECREF(&PhasesType);
    Py_CLEAR(made);
  }
  if (made != NULL && ready_calls()) Py_CLEAR(made);
  return made;
}
