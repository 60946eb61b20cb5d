/* What the parts of the module `native` share. Written to Python's limited API: one library serves every Python. */
#ifndef QUIPU_NATIVE_H
#define QUIPU_NATIVE_H

#define Py_LIMITED_API 0x030B0000 /* 3.11 and whatever comes after it */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define KEY_BYTES 32

/* keys.c */
PyObject *chain_keys(PyObject *module, PyObject *const *args, Py_ssize_t num_args);

/* pool_type.c */
PyObject *make_block_pool_type(PyObject *module);

/* The bytes of a key. NULL with an exception where it is none. */
const uint8_t *key_bytes(PyObject *key);

#endif
