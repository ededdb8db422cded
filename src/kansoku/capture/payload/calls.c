// The wrappers of hooks.py in C, for what nearly every step does; whatever is seldom goes the Python
// way. Here an inner module's call costs no more than torch's own, and a phase no Python frame. hooks.py
// puts these in once training has settled, and takes them out where dynamo is to look through them.
//
// One thread of a process is observed, by one recorder: there is one object of this kind.
#include "phases.h"

#include <structmember.h>

enum { kOnStack = 8 };

typedef struct {
  PyObject_HEAD
  // What hooks.py keeps in its _State, under the same names.
  int depth, updates;
  char eval_trains;
  unsigned long long last_eval;
  PyObject* counting;
  PyObject* phases;  // NULL where nothing is recorded: everything goes the Python way
  PyObject *is_grad_enabled, *fake_mode, *tracing, *failed, *broken;
  PyObject *module, *call_slowly, *next, *next_slowly, *begins_slowly, *ends_slowly;
  void* model;              // of the forward before; census.py says when it is gone
  PyObject* shape;
  double flops, tokens;
} Calls;

typedef struct {
  PyObject_HEAD
  PyObject *engine, *run, *run_slowly;
} Engine;

static Calls calls;
static PyObject *s_compiled, *s_call, *s_training, *s_shape, *s_is_meta, *s_name, *s_ids;
static PyObject *s_backward, *s_loader, *s_empty;

static Phases* recorded(void) {
  Phases* phases = (Phases*)calls.phases;
  return phases != NULL && is_observed(phases) ? phases : NULL;
}

// Count the exception that is set; it costs data only. What is no Exception, such as a SystemExit from
// a handler of the job's signals, is the job's: it stays set, and -1 is returned.
static int swallow(void) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  if (!PyErr_GivenExceptionMatches(type, PyExc_Exception)) {
    PyErr_Restore(type, value, trace);
    return -1;
  }
  PyErr_NormalizeException(&type, &value, &trace);
  PyObject* done = PyObject_CallOneArg(calls.failed, value);
  int failed = done == NULL && !PyErr_ExceptionMatches(PyExc_Exception) ? -1 : 0;
  if (done == NULL && !failed) PyErr_Clear();
  Py_XDECREF(done);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return failed;
}

// Close a phase after the wrapped call returned a result, or NULL with the job's exception.
static PyObject* ended(uint64_t span, PyObject* result) {
  if (span == 0 || calls.phases == NULL) return result;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  if (close_phase((Phases*)calls.phases, span, 0) && swallow()) {
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    Py_CLEAR(result);
    return NULL;
  }
  PyErr_Restore(type, value, trace);
  return result;
}

// Return 1 or 0, -1 with an exception.
static int is_true(PyObject* owned) {
  int truth = owned == NULL ? -1 : PyObject_IsTrue(owned);
  Py_XDECREF(owned);
  return truth;
}

// Whether what passes are no tensors of a training, but fake ones, or those of a tracer.
static int is_faked(void) {
  for (int i = 0; i < 2; ++i) {
    PyObject* mode = PyObject_CallNoArgs(i ? calls.tracing : calls.fake_mode);
    if (mode == NULL) return -1;
    Py_DECREF(mode);
    if (mode != Py_None) return 1;
  }
  return 0;
}

static PyObject* call_with(PyObject* callable, PyObject* first, PyObject* const* args, Py_ssize_t count,
                           PyObject* names) {
  size_t more = (size_t)count + (names == NULL ? 0 : (size_t)PyTuple_GET_SIZE(names));
  PyObject* few[kOnStack];
  PyObject** all = more < kOnStack ? few : PyMem_Malloc((more + 1) * sizeof(PyObject*));
  if (all == NULL) return PyErr_NoMemory();
  all[0] = first;
  for (size_t i = 0; i < more; ++i) all[i + 1] = args[i];
  PyObject* result = PyObject_Vectorcall(callable, all, (size_t)count + 1, names);
  if (all != few) PyMem_Free(all);
  return result;
}

// -- modules --------------------------------------------------------------------------------------

// torch's own two lines of Module.__call__.
static PyObject* call_through(PyObject* module, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  PyObject* callable = PyObject_GetAttr(module, s_compiled);
  if (callable == Py_None) {
    Py_DECREF(callable);
    callable = PyObject_GetAttr(module, s_call);
  }
  if (callable == NULL) return NULL;
  PyObject* result = PyObject_Vectorcall(callable, args, (size_t)count, names);
  Py_DECREF(callable);
  return result;
}

// The input that tells the tokens, as census.begin looks for it; borrowed.
static PyObject* find_input(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  if (names == NULL || PyTuple_GET_SIZE(names) == 0) return count ? args[0] : NULL;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i)
    if (PyUnicode_Compare(PyTuple_GET_ITEM(names, i), s_ids) == 0) return args[count + i];
  return NULL;
}

// Whether this is the forward of the step before once more: 1 or 0, -1 with an exception.
static int is_as_before(PyObject* module, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  if (module != calls.model || calls.shape == NULL) return 0;
  PyObject* input = find_input(args, count, names);
  if (input == NULL) return 0;
  int is = is_true(PyObject_CallNoArgs(calls.is_grad_enabled));
  if (is == 1 && !calls.eval_trains) is = is_true(PyObject_GetAttr(module, s_training));
  if (is != 1) return is;
  PyObject* shape = PyObject_GetAttr(input, s_shape);
  if (shape == NULL) {  // a dictionary, say
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
    PyErr_Clear();
    return 0;
  }
  PyObject* before = Py_NewRef(calls.shape);  // comparing may run the job's code
  is = PyObject_RichCompareBool(shape, before, Py_EQ);
  Py_DECREF(before);
  Py_DECREF(shape);
  return is;
}

// Open the phase of a usual forward: 1; 0 where it is none, -1 with an exception.
static int begin_forward(Phases* phases, PyObject* module, PyObject* const* args, Py_ssize_t count,
                         PyObject* names, uint64_t* span) {
  int faked = is_faked();  // first: a tracer sees who reads a shape
  if (faked) return faked < 0 ? -1 : 0;
  int repeats = is_inside(phases, kBackward);
  if (!repeats) {
    int is = is_as_before(module, args, count, names);
    if (is != 1) return is;
  }
  if (count) {  // only finds out shapes?
    PyObject* is_meta = PyObject_GetAttr(args[0], s_is_meta);
    if (is_meta == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
    if (is_meta == NULL) PyErr_Clear();
    Py_XDECREF(is_meta);
    if (is_meta == Py_True) return 0;
  }
  PyObject* name = PyObject_GetAttr((PyObject*)Py_TYPE(module), s_name);
  if (name == NULL) return -1;
  *span = open_phase(phases, kForward, name, repeats ? kRecompute : 0, s_empty);
  Py_DECREF(name);
  if (*span == 0) return PyErr_Occurred() ? -1 : 1;
  if (!repeats) add_work(phases, calls.flops, calls.tokens);
  return 1;
}

// A profiler or a debugger tells module calls by their Python frames.
static int is_watched(void) {
  PyThreadState* state = PyThreadState_Get();
  return state->c_profilefunc != NULL || state->c_tracefunc != NULL;
}

static PyObject* call_module(PyObject* module, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Phases* phases = NULL;
  if (!is_watched()) {
    if (calls.depth == 1) return call_through(module, args, count, names);
    if (calls.depth == 0) phases = recorded();
  }
  uint64_t span = 0;
  int is_usual = phases == NULL ? 0 : begin_forward(phases, module, args, count, names, &span);
  if (is_usual == 0) return call_with(calls.call_slowly, module, args, count, names);
  if (is_usual < 0 && swallow()) return NULL;
  calls.depth = 1;
  PyObject* result = call_through(module, args, count, names);
  calls.depth = 0;
  return ended(span, result);
}

// Stands in Module.__dict__ for the wrapper in Python. A call of a module finds it by its type and comes
// in here; who reads the attribute, to save, wrap, inspect or compile it, gets the one in Python.
typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
} Call;

static PyObject* call_vector(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  (void)self;
  Py_ssize_t count = PyVectorcall_NARGS(flags);
  if (count < 1) return PyObject_Vectorcall(calls.call_slowly, args, flags, names);
  if (!PyObject_TypeCheck(args[0], (PyTypeObject*)calls.module))
    return PyObject_Vectorcall(calls.call_slowly, args, flags, names);
  return call_module(args[0], args + 1, count - 1, names);
}

static PyObject* call_get(PyObject* self, PyObject* owner, PyObject* type) {
  (void)self, (void)type;
  if (owner == NULL || owner == Py_None) return Py_NewRef(calls.call_slowly);
  return PyMethod_New(calls.call_slowly, owner);
}

static PyTypeObject CallType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "_kansoku_phases.Call",
    .tp_basicsize = sizeof(Call),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_vectorcall_offset = offsetof(Call, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_descr_get = call_get,
};

// -- backwards ------------------------------------------------------------------------------------

static PyObject* run_backward(Engine* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Phases* phases = calls.last_eval ? NULL : recorded();
  if (phases == NULL) return PyObject_Vectorcall(self->run_slowly, args, (size_t)count, names);
  int faked = is_faked();
  if (faked == 1) return PyObject_Vectorcall(self->run, args, (size_t)count, names);
  uint64_t span = faked < 0 ? 0 : open_phase(phases, kBackward, s_backward, 0, s_empty);
  if (PyErr_Occurred() && swallow()) return NULL;
  int depth = calls.depth;
  calls.depth = 0;  // a forward repeated inside is seen as recomputation
  PyObject* result = PyObject_Vectorcall(self->run, args, (size_t)count, names);
  if (result == NULL) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject* done = PyObject_CallNoArgs(calls.broken);
    if (done == NULL) PyErr_Clear();  // the job's own exception is what it hears of
    Py_XDECREF(done);
    PyErr_Restore(type, value, trace);
  }
  calls.depth = depth;
  return ended(span, result);
}

static PyObject* engine_attribute(Engine* self, PyObject* name) {
  PyObject* found = PyObject_GenericGetAttr((PyObject*)self, name);
  if (found != NULL || !PyErr_ExceptionMatches(PyExc_AttributeError)) return found;
  PyErr_Clear();
  return PyObject_GetAttr(self->engine, name);
}

static void engine_dealloc(Engine* self) {
  Py_XDECREF(self->engine);
  Py_XDECREF(self->run);
  Py_XDECREF(self->run_slowly);
  Py_TYPE(self)->tp_free((PyObject*)self);
}

#define FAST(function, more) (PyCFunction)(void (*)(void))function, METH_FASTCALL | more
static PyMethodDef engine_methods[] = {
    {"run_backward", FAST(run_backward, METH_KEYWORDS), "Run the engine inside a backward phase."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject EngineType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "_kansoku_phases.Engine",
    .tp_basicsize = sizeof(Engine),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = (destructor)engine_dealloc,
    .tp_getattro = (getattrofunc)engine_attribute,
    .tp_methods = engine_methods,
};

// -- data and updates -----------------------------------------------------------------------------

static PyObject* next_batch(PyObject* loader, PyObject* ignored) {
  (void)ignored;
  Phases* phases = recorded();
  if (phases == NULL) return PyObject_CallOneArg(calls.next_slowly, loader);
  int trains = is_true(PyObject_CallNoArgs(calls.is_grad_enabled));
  uint64_t span = trains < 0 ? 0 : open_phase(phases, kDataWait, s_loader, trains ? 0 : kEvaluates, s_empty);
  if (PyErr_Occurred() && swallow()) return NULL;
  return ended(span, PyObject_CallOneArg(calls.next, loader));
}

static PyObject* calls_update_begins(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  (void)self;
  if (calls.phases == NULL) return PyObject_Vectorcall(calls.begins_slowly, args, (size_t)count, NULL);
  if (count && update_begins((Phases*)calls.phases, args[0]) && swallow()) return NULL;
  Py_RETURN_NONE;
}

static PyObject* calls_update_ends(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  (void)self;
  if (calls.phases == NULL) return PyObject_Vectorcall(calls.ends_slowly, args, (size_t)count, NULL);
  if (count && update_ends((Phases*)calls.phases, args[0]) && swallow()) return NULL;
  Py_RETURN_NONE;
}

// -- what hooks.py calls --------------------------------------------------------------------------

static void put(PyObject** place, PyObject* value) {
  PyObject* old = *place;
  *place = Py_NewRef(value);
  Py_XDECREF(old);
}

static PyObject* calls_begin(PyObject* self, PyObject* args) {
  (void)self;
  PyObject *phases, *is_grad_enabled, *fake_mode, *tracing, *failed, *broken, *begins, *ends;
  if (!PyArg_ParseTuple(args, "O!OOOOOOO", &PhasesType, &phases, &is_grad_enabled, &fake_mode, &tracing,
                        &failed, &broken, &begins, &ends))
    return NULL;
  put(&calls.is_grad_enabled, is_grad_enabled);
  put(&calls.fake_mode, fake_mode);
  put(&calls.tracing, tracing);
  put(&calls.failed, failed);
  put(&calls.broken, broken);
  put(&calls.begins_slowly, begins);
  put(&calls.ends_slowly, ends);
  put(&calls.phases, phases);
  Py_RETURN_NONE;
}

static PyObject* calls_stop(PyObject* self, PyObject* ignored) {
  (void)self, (void)ignored;
  Py_CLEAR(calls.phases);
  Py_CLEAR(calls.shape);
  calls.model = NULL;
  calls.depth = 0;
  Py_RETURN_NONE;
}

static PyObject* calls_remember(PyObject* self, PyObject* args) {
  (void)self;
  unsigned long long model;
  PyObject* shape;
  double flops, tokens;
  if (!PyArg_ParseTuple(args, "KOdd", &model, &shape, &flops, &tokens)) return NULL;
  calls.model = (void*)(uintptr_t)model;
  put(&calls.shape, shape);
  if (shape == Py_None) Py_CLEAR(calls.shape);
  calls.flops = flops;
  calls.tokens = tokens;
  Py_RETURN_NONE;
}

static PyMethodDef next_method = {"__next__", (PyCFunction)next_batch, METH_NOARGS, "__next__($self, /)\n--\n\n"};

static PyObject* calls_call(PyObject* self, PyObject* args) {
  (void)self;
  PyObject *type, *slowly;
  if (!PyArg_ParseTuple(args, "O!O", &PyType_Type, &type, &slowly)) return NULL;
  Call* made = (Call*)CallType.tp_alloc(&CallType, 0);
  if (made == NULL) return NULL;
  made->vectorcall = call_vector;
  put(&calls.module, type);
  put(&calls.call_slowly, slowly);
  return (PyObject*)made;
}

static PyObject* calls_next(PyObject* self, PyObject* args) {
  (void)self;
  PyTypeObject* type;
  PyObject *next, *slowly;
  if (!PyArg_ParseTuple(args, "O!OO", &PyType_Type, &type, &next, &slowly)) return NULL;
  put(&calls.next, next);
  put(&calls.next_slowly, slowly);
  return PyDescr_NewMethod(type, &next_method);
}

static PyObject* calls_engine(PyObject* self, PyObject* args) {
  (void)self;
  PyObject *engine, *slowly;
  if (!PyArg_ParseTuple(args, "OO", &engine, &slowly)) return NULL;
  Engine* made = (Engine*)EngineType.tp_alloc(&EngineType, 0);
  if (made == NULL) return NULL;
  made->engine = Py_NewRef(engine);
  made->run_slowly = Py_NewRef(slowly);
  made->run = PyObject_GetAttrString(engine, "run_backward");
  if (made->run == NULL) Py_CLEAR(made);
  return (PyObject*)made;
}

static PyMethodDef calls_methods[] = {
    {"begin", calls_begin, METH_VARARGS, NULL},
    {"stop", calls_stop, METH_NOARGS, NULL},
    {"remember", calls_remember, METH_VARARGS, NULL},
    {"call", calls_call, METH_VARARGS, NULL},
    {"next", calls_next, METH_VARARGS, NULL},
    {"engine", calls_engine, METH_VARARGS, NULL},
    {"update_begins", FAST(calls_update_begins, 0), NULL},
    {"update_ends", FAST(calls_update_ends, 0), NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef calls_members[] = {
    {"depth", T_INT, offsetof(Calls, depth), 0, NULL},
    {"updates", T_INT, offsetof(Calls, updates), 0, NULL},
    {"eval_trains", T_BOOL, offsetof(Calls, eval_trains), 0, NULL},
    {"last_eval", T_ULONGLONG, offsetof(Calls, last_eval), 0, NULL},
    {"counting", T_OBJECT, offsetof(Calls, counting), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject CallsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "_kansoku_phases.Calls",
    .tp_basicsize = sizeof(Calls),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = calls_methods,
    .tp_members = calls_members,
};

PyObject* the_calls = (PyObject*)&calls;

int ready_calls(void) {
  struct {
    PyObject** place;
    const char* text;
  } texts[] = {
      {&s_compiled, "_compiled_call_impl"}, {&s_call, "_call_impl"}, {&s_training, "training"},
      {&s_shape, "shape"}, {&s_is_meta, "is_meta"}, {&s_name, "__name__"}, {&s_ids, "input_ids"},
      {&s_backward, "backward"}, {&s_loader, "DataLoader"}, {&s_empty, ""},
  };
  for (size_t i = 0; i < sizeof texts / sizeof *texts; ++i)
    if ((*texts[i].place = PyUnicode_InternFromString(texts[i].text)) == NULL) return -1;
  if (PyType_Ready(&EngineType) || PyType_Ready(&CallType) || PyType_Ready(&CallsType)) return -1;
  PyObject_Init(the_calls, &CallsType);
  return 0;
}
