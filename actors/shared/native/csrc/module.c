/* The module `quipu.actors.shared.native._native`: the parts of the engine that are worth compiling.
 *
 * Everything in it also exists in Python (`shared/block_keys.py`, `shared/key_table.py`,
 * `engine/block_manager/block_pool.py`, `cache_insight/reuse_sketch.py`), behaves the same there, and is tested against
 * it. */
#include "native.h"

const uint8_t *key_bytes(PyObject *key) {
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(key, &bytes, &length)) return NULL;
    if (length != KEY_BYTES) {
        PyErr_Format(PyExc_ValueError, "a key has %d bytes, got %zd", KEY_BYTES, length);
        return NULL;
    }
    return (const uint8_t *)bytes;
}

static PyMethodDef functions[] = {
    {"chain_keys", (PyCFunction)(void (*)(void))chain_keys, METH_FASTCALL, "See block_keys.py."},
    {"pack_tokens", (PyCFunction)(void (*)(void))pack_tokens, METH_FASTCALL, "See block_keys.py."},
    {"key_prefixes", key_prefixes, METH_O, "See block_keys.py."},
    {0},
};

static int add_type(PyObject *module, const char *name, PyObject *type) {
    if (!type) return -1;
    int failed = PyModule_AddObjectRef(module, name, type);
    Py_DECREF(type);
    return failed;
}

static int add_types(PyObject *module) {
    return add_type(module, "BlockPool", make_block_pool_type(module)) ||
                   add_type(module, "KeyTable", make_key_table_type(module)) ||
                   add_type(module, "ReuseSketch", make_reuse_sketch_type(module))
               ? -1
               : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_types}, {0}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_methods = functions, .m_slots = slots};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
