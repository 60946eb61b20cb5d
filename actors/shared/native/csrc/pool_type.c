/* The Python type of a block pool: construction, destruction, counts, and the state for checks.
 *
 * `block_manager/pools.py` has the class that the engine uses, which adds the checks of pool_checks.py. */
#include "pool.h"

/* ---------------------------------------------------------------- the state, for checks */

static int put_number(PyObject *dict, long long key, PyObject *value) {
    PyObject *number = PyLong_FromLongLong(key);
    int failed = !number || !value || PyDict_SetItem(dict, number, value);
    Py_XDECREF(number);
    Py_XDECREF(value);
    return failed;
}

/* (references, keys, pending, pin_counts, blank, queue, num_entries), as in the Python class. */
static PyObject *pool_parts(Pool *pool, PyObject *nothing) {
    (void)nothing;
    PyObject *references = PyList_New(0), *keys = PyList_New(0), *num_entries = PyList_New(0), *queue = PyList_New(0);
    PyObject *pending = PyDict_New(), *pin_counts = PyDict_New(), *blank = block_list(pool->blank, pool->num_blank);
    if (!references || !keys || !num_entries || !queue || !pending || !pin_counts || !blank) goto failed;
    for (uint32_t block = 0; block < pool->num_blocks; block++) {
        PyObject *held = PyLong_FromLong(pool->references[block]);
        PyObject *place = PyLong_FromUnsignedLong(pool->num_entries[block]);
        PyObject *key = pool->has_key[block] ? key_object(pool, block) : Py_NewRef(Py_None);
        int bad = !held || !place || !key || PyList_Append(references, held) || PyList_Append(num_entries, place) ||
                  PyList_Append(keys, key);
        Py_XDECREF(held), Py_XDECREF(place), Py_XDECREF(key);
        if (bad || (pool->pending[block] && put_number(pending, block, PyLong_FromLongLong(pool->pending[block]))) ||
            (pool->pin_counts[block] && put_number(pin_counts, block, PyLong_FromLong(pool->pin_counts[block]))))
            goto failed;
    }
    for (uint32_t i = 0; i < pool->queue_length; i++) {
        PyObject *number = PyLong_FromUnsignedLong(*queue_at(pool, i));
        int bad = !number || PyList_Append(queue, number);
        Py_XDECREF(number);
        if (bad) goto failed;
    }
    return Py_BuildValue("(NNNNNNN)", references, keys, pending, pin_counts, blank, queue, num_entries);
failed:
    Py_XDECREF(references), Py_XDECREF(keys), Py_XDECREF(num_entries), Py_XDECREF(queue), Py_XDECREF(pending);
    Py_XDECREF(pin_counts), Py_XDECREF(blank);
    return NULL;
}

/* ---------------------------------------------------------------- the type */

static PyObject *get_num_free(Pool *pool, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLong((unsigned long)pool->num_blank + pool->num_cached);
}

#define COUNT(name, field)                                     \
    static PyObject *get_##name(Pool *pool, void *unused) {    \
        (void)unused;                                          \
        return PyLong_FromUnsignedLongLong(pool->field);       \
    }
COUNT(num_blocks, num_blocks)
COUNT(num_cached, num_cached)
COUNT(num_pinned, num_owned)
COUNT(num_pinned_only, num_pinned_only)
COUNT(num_evicted, num_evicted)

static PyObject *get_observers(Pool *pool, void *unused) {
    (void)unused;
    return Py_NewRef(pool->observers);
}

static int set_observers(Pool *pool, PyObject *value, void *unused) {
    (void)unused;
    if (!value || !PyList_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "observers are a list");
        return -1;
    }
    PyObject *before = pool->observers;
    pool->observers = Py_NewRef(value);
    Py_DECREF(before);
    return 0;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"num_blocks", "seed", NULL};
    Py_ssize_t num_blocks;
    unsigned long long seed;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "nK", names, &num_blocks, &seed)) return NULL;
    if (num_blocks < 2 || num_blocks > 1 << 29)
        return PyErr_Format(PyExc_ValueError, "a pool needs the null block and at least one more, got num_blocks=%zd",
                            num_blocks);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Pool *pool = (Pool *)allocate(type, 0);
    if (!pool) return NULL;
    uint32_t count = pool->num_blocks = (uint32_t)num_blocks;
    pool->queue_room = 1;
    while (pool->queue_room <= (MAX_QUEUE_ENTRIES + 1) * count) pool->queue_room *= 2;
    pool->observers = PyList_New(0);
    pool->references = calloc(count, sizeof *pool->references);
    pool->pending = calloc(count, sizeof *pool->pending);
    pool->pin_counts = calloc(count, sizeof *pool->pin_counts);
    pool->num_entries = calloc(count, sizeof *pool->num_entries);
    pool->has_key = calloc(count, 1);
    pool->blank = calloc(count, sizeof *pool->blank);
    pool->scratch = calloc(count, sizeof *pool->scratch);
    pool->tags = calloc(count, sizeof *pool->tags);
    pool->queue = calloc(pool->queue_room, sizeof *pool->queue);
    int has_index = index_make(&pool->index, count, seed);
    if (!pool->observers || !pool->references || !pool->pending || !pool->pin_counts || !pool->num_entries ||
        !pool->has_key || !pool->blank || !pool->scratch || !pool->tags || !pool->queue || !has_index) {
        Py_DECREF(pool);
        return PyErr_NoMemory();
    }
    for (uint32_t block = count - 1; block; block--) pool->blank[pool->num_blank++] = block;
    return (PyObject *)pool;
}

static int traverse(Pool *pool, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)pool));
    Py_VISIT(pool->observers);
    return 0;
}

static int clear(Pool *pool) {
    Py_CLEAR(pool->observers);
    return 0;
}

static void destroy(Pool *pool) {
    PyTypeObject *type = Py_TYPE((PyObject *)pool);
    PyObject_GC_UnTrack((PyObject *)pool);
    clear(pool);
    free(pool->references), free(pool->pending), free(pool->pin_counts), free(pool->num_entries), free(pool->has_key);
    free(pool->blank), free(pool->scratch), free(pool->tags), free(pool->queue);
    index_free(&pool->index);
    freefunc release_memory = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release_memory(pool);
    Py_DECREF(type);
}

#define METHOD(name, flags) {#name, (PyCFunction)(void (*)(void))pool_##name, flags, "See block_pool.py."}
static PyMethodDef methods[] = {
    METHOD(match, METH_FASTCALL),   METHOD(share, METH_O),           METHOD(unshare, METH_O),
    METHOD(take, METH_O),           METHOD(release, METH_O),         METHOD(pin, METH_O),
    METHOD(unpin, METH_O),          METHOD(is_freed_by, METH_O),     METHOD(is_written, METH_O),
    METHOD(publish, METH_FASTCALL), METHOD(commit, METH_FASTCALL),   METHOD(unpublish, METH_FASTCALL),
    METHOD(holds, METH_O),          METHOD(reset, METH_NOARGS),      METHOD(parts, METH_NOARGS),
    METHOD(next_evicted, METH_O),   {0},
};
#define GETTER(name) {#name, (getter)get_##name, NULL, NULL, NULL}
static PyGetSetDef members[] = {
    GETTER(num_blocks), GETTER(num_free), GETTER(num_cached), GETTER(num_pinned), GETTER(num_pinned_only),
    GETTER(num_evicted), {"observers", (getter)get_observers, (setter)set_observers, NULL, NULL}, {0},
};
static PyType_Slot slots[] = {
    {Py_tp_new, make},           {Py_tp_dealloc, destroy}, {Py_tp_traverse, traverse}, {Py_tp_clear, clear},
    {Py_tp_methods, methods},    {Py_tp_getset, members},  {0},
};
static PyType_Spec spec = {
    .name = "quipu.actors.shared.native._native.BlockPool",
    .basicsize = sizeof(Pool),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};

PyObject *make_block_pool_type(PyObject *module) { return PyType_FromModuleAndSpec(module, &spec, NULL); }
