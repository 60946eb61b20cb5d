/* The Python type of a sketch of reuse: construction, copies, destruction, and what was counted. */
#include "reuse.h"

#include <stdlib.h>
#include <string.h>

static PyObject *counts(Sketch *sketch, PyObject *nothing) {
    (void)nothing;
    PyObject *bins = PyList_New(NUM_BINS);
    for (int i = 0; bins && i < NUM_BINS; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(sketch->bins[i]);
        if (!number || PyList_SetItem(bins, i, number)) Py_CLEAR(bins);
    }
    return bins ? Py_BuildValue("(KdN)", (unsigned long long)sketch->num_queries, sketch->num_new, bins) : NULL;
}

static PyObject *take(Sketch *sketch, PyObject *nothing) {
    PyObject *counted = counts(sketch, nothing);
    if (!counted) return NULL;
    sketch->num_queries = 0;
    sketch->num_new = 0;
    memset(sketch->bins, 0, sizeof sketch->bins);
    return counted;
}

static Sketch *allocate(PyTypeObject *type, uint32_t max_keys, uint32_t register_bits) {
    allocfunc allocate_memory = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Sketch *sketch = (Sketch *)allocate_memory(type, 0);
    if (sketch && !sketch_make(sketch, max_keys, register_bits)) {
        Py_DECREF(sketch);
        return (Sketch *)PyErr_NoMemory();
    }
    return sketch;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"max_keys", "register_bits", NULL};
    Py_ssize_t max_keys, register_bits;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "nn", names, &max_keys, &register_bits)) return NULL;
    if (max_keys < 2 * MAX_SAMPLED_IN_CALL || max_keys > 1 << 24 || register_bits < 4 || register_bits > 20)
        return PyErr_Format(PyExc_ValueError, "max_keys=%zd, register_bits=%zd", max_keys, register_bits);
    return (PyObject *)allocate(type, (uint32_t)max_keys, (uint32_t)register_bits);
}

static PyObject *copy(Sketch *sketch, PyObject *nothing) {
    (void)nothing;
    Sketch *twin = allocate(Py_TYPE((PyObject *)sketch), sketch->max_keys, sketch->register_bits);
    if (!twin) return NULL;
    twin->num_keys = sketch->num_keys, twin->shift = sketch->shift, twin->next_place = sketch->next_place;
    twin->sum = sketch->sum, twin->num_queries = sketch->num_queries, twin->num_new = sketch->num_new;
    memcpy(twin->table, sketch->table, ((size_t)sketch->mask + 1) * sizeof *sketch->table);
    memcpy(twin->timeline, sketch->timeline, sketch->num_places * sizeof *sketch->timeline);
    memcpy(twin->tree, sketch->tree, ((size_t)sketch->num_places + 1) * sizeof *sketch->tree);
    memcpy(twin->registers, sketch->registers, (size_t)1 << sketch->register_bits);
    memcpy(twin->bins, sketch->bins, sizeof sketch->bins);
    return (PyObject *)twin;
}

static void destroy(Sketch *sketch) {
    PyTypeObject *type = Py_TYPE((PyObject *)sketch);
    sketch_free(sketch);
    freefunc release_memory = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release_memory(sketch);
    Py_DECREF(type);
}

static PyObject *get_num_keys(Sketch *sketch, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLong(sketch->num_keys);
}

static PyObject *get_shift(Sketch *sketch, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLong(sketch->shift);
}

static PyObject *get_num_bytes(Sketch *sketch, void *unused) {
    (void)unused;
    size_t table = ((size_t)sketch->mask + 1) * sizeof *sketch->table;
    size_t places = (size_t)sketch->num_places * (sizeof *sketch->timeline + sizeof *sketch->tree);
    return PyLong_FromSize_t(sizeof *sketch + table + places + ((size_t)1 << sketch->register_bits));
}

#define METHOD(name, function, flags) \
    {name, (PyCFunction)(void (*)(void))function, flags, "See reuse_sketch.py."}
static PyMethodDef methods[] = {
    METHOD("access", sketch_access, METH_FASTCALL), METHOD("touch", sketch_touch, METH_FASTCALL),
    METHOD("idle", sketch_idle, METH_FASTCALL),     METHOD("counts", counts, METH_NOARGS),
    METHOD("take", take, METH_NOARGS),              METHOD("copy", copy, METH_NOARGS),
    {0},
};
static PyGetSetDef members[] = {
    {"num_keys", (getter)get_num_keys, NULL, NULL, NULL},
    {"shift", (getter)get_shift, NULL, NULL, NULL},
    {"num_bytes", (getter)get_num_bytes, NULL, NULL, NULL},
    {0},
};
static PyType_Slot slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, destroy}, {Py_tp_methods, methods}, {Py_tp_getset, members}, {0},
};
static PyType_Spec spec = {
    .name = "quipu.actors.shared.native._native.ReuseSketch",
    .basicsize = sizeof(Sketch),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

PyObject *make_reuse_sketch_type(PyObject *module) { return PyType_FromModuleAndSpec(module, &spec, NULL); }
