/* What the parts of the module share. Uses Python's limited API, so that one library works with every version. */
#ifndef QUIPU_NATIVE_H
#define QUIPU_NATIVE_H

#define Py_LIMITED_API 0x030B0000 /* 3.11 and later */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define KEY_BYTES 32

/* keys.c */
PyObject *chain_keys(PyObject *module, PyObject *const *args, Py_ssize_t num_args);
PyObject *pack_tokens(PyObject *module, PyObject *const *args, Py_ssize_t num_args);
PyObject *key_prefixes(PyObject *module, PyObject *keys);

/* key_table.c */
PyObject *make_key_table_type(PyObject *module);

/* pool_type.c */
PyObject *make_block_pool_type(PyObject *module);

/* reuse_type.c */
PyObject *make_reuse_sketch_type(PyObject *module);

/* Returns the bytes of a key, or NULL with an exception if it is not one. */
const uint8_t *key_bytes(PyObject *key);

#endif
