/* The chain of a prompt's block keys, and what is packed of tokens and keys: functions of block_keys.py in C.
 *
 * What must always hold: the same keys and the same types of errors as there, for the same arguments. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"
#include "sha256.h"

#define KEY_PREFIX_BYTES 8

/* Reads a token id. Returns -1 with an exception if it is none. */
static int read_token(PyObject *object, uint32_t *token) {
    unsigned long value = PyLong_AsUnsignedLong(object);
    if (value == (unsigned long)-1 && PyErr_Occurred()) return -1;
    if (value > 0xffffffffUL) {
        PyErr_SetString(PyExc_OverflowError, "a token id needs more than 32 bits");
        return -1;
    }
    *token = (uint32_t)value;
    return 0;
}

/* pack_tokens(token_ids, start, end) */
PyObject *pack_tokens(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (num_args != 3) return PyErr_Format(PyExc_TypeError, "pack_tokens takes 3 arguments, got %zd", num_args);
    Py_ssize_t start = PyLong_AsSsize_t(args[1]), end = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred()) return NULL;
    if (!PyList_Check(args[0])) return PyErr_Format(PyExc_TypeError, "token ids are a list");
    Py_ssize_t num_tokens = PyList_Size(args[0]);
    if (end > num_tokens) end = num_tokens;
    if (start < 0 || end < start) end = start;
    PyObject *packed = PyBytes_FromStringAndSize(NULL, 4 * (end - start));
    char *at = packed ? PyBytes_AsString(packed) : NULL;
    for (Py_ssize_t i = start; packed && i < end; i++, at += 4) {
        uint32_t token;
        if (read_token(PyList_GetItem(args[0], i), &token)) Py_CLEAR(packed);
        else memcpy(at, &token, 4);
    }
    return packed;
}

/* key_prefixes(keys) */
PyObject *key_prefixes(PyObject *module, PyObject *keys) {
    (void)module;
    if (!PyList_Check(keys)) return PyErr_Format(PyExc_TypeError, "keys are a list");
    PyObject *prefixes = PyBytes_FromStringAndSize(NULL, KEY_PREFIX_BYTES * PyList_Size(keys));
    char *at = prefixes ? PyBytes_AsString(prefixes) : NULL;
    for (Py_ssize_t i = 0; prefixes && i < PyList_Size(keys); i++, at += KEY_PREFIX_BYTES) {
        const uint8_t *key = key_bytes(PyList_GetItem(keys, i));
        if (!key) Py_CLEAR(prefixes);
        else memcpy(at, key, KEY_PREFIX_BYTES);
    }
    return prefixes;
}

/* chain_keys(parent, token_ids, block_size) */
PyObject *chain_keys(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (num_args != 3) return PyErr_Format(PyExc_TypeError, "chain_keys takes 3 arguments, got %zd", num_args);
    char *parent;
    Py_ssize_t parent_length, block_size = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[0], &parent, &parent_length)) return NULL;
    if (block_size <= 0) return PyErr_Format(PyExc_ValueError, "a block has %zd tokens", block_size);
    PyObject *tokens = PySequence_List(args[1]);
    if (!tokens) return NULL;
    Py_ssize_t num_tokens = PyList_Size(tokens), num_keys = num_tokens / block_size;
    size_t room = (parent_length > KEY_BYTES ? (size_t)parent_length : KEY_BYTES) + 4 * (size_t)block_size;
    uint8_t *message = malloc(room), digest[SHA256_BYTES];
    PyObject *keys = message ? PyList_New(num_keys) : PyErr_NoMemory();
    if (!keys) goto failed;
    size_t before = (size_t)parent_length;
    memcpy(message, parent, before);
    for (Py_ssize_t i = 0; i < num_tokens; i++) { /* a partial block's ids are checked, but not hashed */
        uint32_t token;
        if (read_token(PyList_GetItem(tokens, i), &token)) goto failed;
        uint8_t *at = message + before + 4 * (i % block_size);
        for (int b = 0; b < 4; b++) at[b] = (uint8_t)(token >> 8 * b);
        if ((i + 1) % block_size) continue;
        sha256(message, before + 4 * (size_t)block_size, digest);
        PyObject *key = PyBytes_FromStringAndSize((const char *)digest, SHA256_BYTES);
        if (!key) goto failed;
        PyList_SetItem(keys, i / block_size, key);
        memcpy(message, digest, before = SHA256_BYTES);
    }
    free(message);
    Py_DECREF(tokens);
    return keys;
failed:
    free(message);
    Py_DECREF(tokens);
    Py_XDECREF(keys);
    return NULL;
}
