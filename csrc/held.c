/* A batch of held experts and views of their bytes, as types of Python's: the module smoe_mp._held.
 *
 * Everything else goes through cffi.  But a token asks for experts once a layer, some fifty times, and what a
 * hit costs from Python was nearly all in making objects: an object with six attributes, an array of holds, an
 * array of numbers, a record for errors.  Here they are one object with the holds in it, made and let go in C:
 *
 *     demand(type, function, ring, handle, facts, layer, experts, timeout_ms)
 *
 * calls `function`, the address of smoe_fetch or smoe_acquire, and returns the batch, an instance of `type`; or
 * (batch, code, error) where it returned an error, so that the caller goes on after a signal and raises; or None
 * where layer or experts are no plain numbers, and nothing was asked for.
 *
 *     batch(type, ring, handle, facts, layer, experts)
 *
 * makes one that holds nothing yet, and
 *
 *     view(batch, index, offset, bytes, writable)
 *
 * bytes of the slot of its expert `index` as a buffer that has a hold of its own, for as long as anybody uses it;
 * None where the batch does not hold that expert; an error's number.  `writable` is what the buffer says of itself: the
 * memory is mapped read-only either way, but some that only read ask for one that can be written to.
 *
 * Addresses come as numbers: this module is linked with nothing of the core's,
 * whose functions are those of the cffi module.
 *
 * Who keeps what alive: a batch owns a reference to `handle`, whose end detaches from the ring, so the ring is
 * mapped for as long as the batch is there.  The type takes no part in garbage collection: what it refers to
 * never refers back, and so the collector cannot end the handle first.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>

#include "smoe.h"

#define FEW 16 /* experts that need no memory beside the batch */

typedef int (*demand_fn)(smoe_ring *, int64_t, const int64_t *, uint32_t, smoe_hold *, int64_t, smoe_error *);
typedef int (*release_fn)(smoe_ring *, smoe_hold *, uint32_t);

typedef struct {
    PyObject_VAR_HEAD PyObject *handle;
    PyObject *facts;
    PyObject *layer;
    PyObject *experts; /* a list of our own */
    smoe_ring *ring;
    Py_ssize_t n;
    smoe_hold holds[];
} held;

typedef int (*again_fn)(smoe_ring *, const smoe_hold *, smoe_hold *);
typedef const void *(*data_fn)(const smoe_ring *, uint32_t);

typedef struct {
    PyObject_HEAD PyObject *handle;
    smoe_ring *ring;
    smoe_hold hold;
    const char *at;
    Py_ssize_t bytes;
    int writable;
} view;

/* Of the cffi module, by `install`. */
static release_fn release_holds;
static again_fn hold_again;
static data_fn slot_data;
static PyTypeObject *view_type;

static void let_go(held *b) {
    if (b->n > 0)
        (void)release_holds(b->ring, b->holds, (uint32_t)b->n);
}

static void held_dealloc(PyObject *self) {
    held *b = (held *)self;
    PyTypeObject *type = Py_TYPE(self);
    freefunc tp_free = (freefunc)PyType_GetSlot(type, Py_tp_free);

    if (b->ring)
        let_go(b);
    Py_XDECREF(b->handle);
    Py_XDECREF(b->facts);
    Py_XDECREF(b->layer);
    Py_XDECREF(b->experts);
    tp_free(self);
    Py_DECREF(type);
}

static PyObject *held_enter(PyObject *self, PyObject *unused) {
    (void)unused;
    return Py_NewRef(self);
}

static PyObject *held_release(PyObject *self, PyObject *unused) {
    (void)unused;
    let_go((held *)self);
    Py_RETURN_NONE;
}

static PyObject *held_exit(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)args;
    (void)n;
    let_go((held *)self);
    Py_RETURN_NONE;
}

static Py_ssize_t held_length(PyObject *self) {
    return ((held *)self)->n;
}

static PyObject *held_address(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromVoidPtr(((held *)self)->holds);
}

static PyMethodDef held_methods[] = {
    {"__enter__", held_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))held_exit, METH_FASTCALL, NULL},
    {"release", held_release, METH_NOARGS,
     "Give up the batch's holds; views keep theirs.  A second call does nothing."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef held_members[] = {
    {"_handle", T_OBJECT, offsetof(held, handle), READONLY, NULL},
    {"_facts", T_OBJECT, offsetof(held, facts), READONLY, NULL},
    {"_layer", T_OBJECT, offsetof(held, layer), READONLY, NULL},
    {"_experts", T_OBJECT, offsetof(held, experts), READONLY, NULL},
    {"_n", T_PYSSIZET, offsetof(held, n), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef held_getset[] = {
    {"_address", held_address, NULL, "Where its holds lie, smoe_hold[n].", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot held_slots[] = {
    {Py_tp_dealloc, held_dealloc}, {Py_tp_methods, held_methods}, {Py_tp_members, held_members},
    {Py_tp_getset, held_getset},   {Py_sq_length, held_length},   {0, NULL},
};

static PyType_Spec held_spec = {
    .name = "smoe_mp._held.Held",
    .basicsize = (int)offsetof(held, holds),
    .itemsize = (int)sizeof(smoe_hold),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = held_slots,
};

/* A plain int from 0 to 2^31 - 1; -1 for all else, and then no error is set. */
static int64_t plain(PyObject *o) {
    if (!PyLong_CheckExact(o))
        return -1;
    int overflow = 0;
    long long v = PyLong_AsLongLongAndOverflow(o, &overflow);
    return overflow || v < 0 || v > INT32_MAX ? -1 : (int64_t)v;
}

static held *make(PyObject *type, PyObject *ring, PyObject *handle, PyObject *facts, PyObject *layer,
                  PyObject *experts) {
    PyTypeObject *t = (PyTypeObject *)type;
    void *address = PyLong_AsVoidPtr(ring);

    if (!address) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "no ring");
        return NULL;
    }
    Py_ssize_t n = PyList_Size(experts);
    if (n < 0)
        return NULL;
    held *b = (held *)PyType_GenericAlloc(t, n); /* zeroed */
    if (!b)
        return NULL;
    b->experts = PyList_GetSlice(experts, 0, n); /* the caller may change his */
    b->handle = Py_NewRef(handle);
    b->facts = Py_NewRef(facts);
    b->layer = Py_NewRef(layer);
    b->ring = (smoe_ring *)address;
    b->n = n;
    if (!b->experts) {
        Py_DECREF((PyObject *)b);
        return NULL;
    }
    return b;
}

static PyObject *held_batch(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (nargs != 6 || !PyType_Check(args[0]) || !PyList_CheckExact(args[5])) {
        PyErr_SetString(PyExc_TypeError, "batch(type, ring, handle, facts, layer, experts)");
        return NULL;
    }
    return (PyObject *)make(args[0], args[1], args[2], args[3], args[4], args[5]);
}

static PyObject *held_demand(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (nargs != 8 || !PyType_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "demand(type, function, ring, handle, facts, layer, experts, timeout_ms)");
        return NULL;
    }
    PyObject *experts = args[6];
    int64_t layer = plain(args[5]);
    long long timeout_ms = PyLong_AsLongLong(args[7]);
    demand_fn function = (demand_fn)(uintptr_t)PyLong_AsVoidPtr(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (layer < 0 || !function || !PyList_CheckExact(experts))
        Py_RETURN_NONE;

    Py_ssize_t n = PyList_Size(experts);
    int64_t few[FEW], *ids = few;
    if (n > FEW && !(ids = PyMem_Malloc((size_t)n * sizeof *ids)))
        return PyErr_NoMemory();
    held *b = NULL;
    PyObject *result = NULL;
    for (Py_ssize_t i = 0; i < n; i++)
        if ((ids[i] = plain(PyList_GetItem(experts, i))) < 0) {
            result = Py_NewRef(Py_None);
            goto out;
        }
    if (!(b = make(args[0], args[2], args[3], args[4], args[5], experts)))
        goto out;

    smoe_error error;
    memset(&error, 0, sizeof error);
    PyThreadState *state = PyEval_SaveThread(); /* it may wait */
    int code = function(b->ring, layer, ids, (uint32_t)n, b->holds, timeout_ms, &error);
    PyEval_RestoreThread(state);
    if (code < 0)
        result = Py_BuildValue("(Oiy#)", (PyObject *)b, code, (const char *)&error, (Py_ssize_t)sizeof error);
    else
        result = Py_NewRef((PyObject *)b);
out:
    Py_XDECREF((PyObject *)b);
    if (ids != few)
        PyMem_Free(ids);
    return result;
}

/* --- views --- */

static PyObject *held_view(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (nargs != 5) {
        PyErr_SetString(PyExc_TypeError, "view(batch, index, offset, bytes, writable)");
        return NULL;
    }
    held *b = (held *)args[0]; /* the caller's word for it: this module is for ring.py alone */
    Py_ssize_t index = PyLong_AsSsize_t(args[1]), offset = PyLong_AsSsize_t(args[2]), bytes = PyLong_AsSsize_t(args[3]);
    int writable = PyObject_IsTrue(args[4]);
    if (PyErr_Occurred())
        return NULL;
    if (index < 0 || index >= b->n || offset < 0 || bytes < 0) {
        PyErr_SetString(PyExc_IndexError, "view: no such part of the batch");
        return NULL;
    }
    if (b->holds[index].status != SMOE_HOLD_RESIDENT)
        Py_RETURN_NONE;
    view *v = (view *)PyType_GenericAlloc(view_type, 0); /* zeroed */
    if (!v)
        return NULL;
    int code = hold_again(b->ring, &b->holds[index], &v->hold);
    if (code < 0) {
        Py_DECREF((PyObject *)v);
        return PyLong_FromLong(code);
    }
    v->handle = Py_NewRef(b->handle);
    v->ring = b->ring;
    v->at = (const char *)slot_data(b->ring, v->hold.slot) + offset;
    v->bytes = bytes;
    v->writable = writable;
    return (PyObject *)v;
}

static void view_dealloc(PyObject *self) {
    view *v = (view *)self;
    PyTypeObject *type = Py_TYPE(self);
    freefunc tp_free = (freefunc)PyType_GetSlot(type, Py_tp_free);

    if (v->ring)
        (void)release_holds(v->ring, &v->hold, 1);
    Py_XDECREF(v->handle);
    tp_free(self);
    Py_DECREF(type);
}

static int view_buffer(PyObject *self, Py_buffer *out, int flags) {
    view *v = (view *)self;
    return PyBuffer_FillInfo(out, self, (void *)(uintptr_t)v->at, v->bytes, !v->writable, flags);
}

static PyObject *view_address(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromVoidPtr((void *)(uintptr_t)((view *)self)->at);
}

static PyGetSetDef view_getset[] = {
    {"address", view_address, NULL, "Where its first byte lies.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot view_slots[] = {
    {Py_tp_dealloc, view_dealloc},
    {Py_tp_getset, view_getset},
    {Py_bf_getbuffer, view_buffer},
    {0, NULL},
};

static PyType_Spec view_spec = {
    .name = "smoe_mp._held.View",
    .basicsize = (int)sizeof(view),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = view_slots,
};

/* --- the module --- */

static PyObject *held_install(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "install(smoe_release, smoe_hold_again, smoe_slot_data)");
        return NULL;
    }
    release_holds = (release_fn)(uintptr_t)PyLong_AsVoidPtr(args[0]);
    hold_again = (again_fn)(uintptr_t)PyLong_AsVoidPtr(args[1]);
    slot_data = (data_fn)(uintptr_t)PyLong_AsVoidPtr(args[2]);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"install", (PyCFunction)(void (*)(void))held_install, METH_FASTCALL,
     "The addresses of smoe_release, smoe_hold_again and smoe_slot_data; before all else."},
    {"batch", (PyCFunction)(void (*)(void))held_batch, METH_FASTCALL, "A batch that holds nothing yet."},
    {"demand", (PyCFunction)(void (*)(void))held_demand, METH_FASTCALL, "Demand experts; the batch that holds them."},
    {"view", (PyCFunction)(void (*)(void))held_view, METH_FASTCALL, "Bytes of an expert, with a hold of their own."},
    {NULL, NULL, 0, NULL},
};

static int executed(PyObject *module) {
    PyObject *type = PyType_FromSpec(&held_spec);
    if (!type)
        return -1;
    int rc = PyModule_AddObjectRef(module, "Held", type);
    Py_DECREF(type);
    if (rc == 0 && !view_type && !(view_type = (PyTypeObject *)PyType_FromSpec(&view_spec)))
        rc = -1;
    return rc ? rc : PyModule_AddObjectRef(module, "View", (PyObject *)view_type);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, executed}, {0, NULL}};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, .m_name = "smoe_mp._held", .m_size = 0, .m_methods = functions, .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__held(void);
PyMODINIT_FUNC PyInit__held(void) {
    return PyModuleDef_Init(&module_def);
}
