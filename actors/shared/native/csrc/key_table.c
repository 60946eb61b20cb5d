/* `KeyTable` of key_table.py in C: an open-addressed hash table from keys to objects.
 *
 * Many keys are put, taken and discarded at once, which costs a cache line each and no hash of Python's. Values are
 * never containers that could refer to the table, so the garbage collector need not know it.
 *
 * What must always hold: the same results as there, for the same calls; there is no empty slot between an entry and its
 * home slot; arguments are read completely before anything is changed. The seed is private to the process, so that
 * clients cannot choose keys with the same home slot. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

#define FIRST_ROOM 64
#define AHEAD 16 /* keys whose slots are fetched from memory while others are looked at */

typedef struct {
    uint32_t tag;   /* part of the key's hash: gives the home slot and rules out most other keys */
    uint32_t place; /* of the entry, from 1 on; 0 marks an empty slot */
} Slot;

typedef struct {
    PyObject_HEAD
    Slot *slots;
    uint32_t mask, count;
    uint64_t seed;
    /* Entries, dense: what is put together lies together. A free one has no value, and is on the stack. */
    uint8_t (*keys)[KEY_BYTES];
    PyObject **values;
    uint32_t *free;
} KeyTable;

static uint32_t tag_of(const KeyTable *table, const uint8_t *key) {
    uint64_t words[KEY_BYTES / 8], hash = table->seed;
    memcpy(words, key, KEY_BYTES);
    for (int i = 0; i < KEY_BYTES / 8; i++) {
        hash = (hash ^ words[i]) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    return (uint32_t)hash;
}

/* Returns the slot of a key, or the empty slot where it would be put. */
static Slot *find_slot(const KeyTable *table, const uint8_t *key, uint32_t tag) {
    for (uint32_t at = tag & table->mask;; at = (at + 1) & table->mask) {
        Slot *slot = table->slots + at;
        if (!slot->place || (slot->tag == tag && !memcmp(table->keys[slot->place], key, KEY_BYTES))) return slot;
    }
}

/* Makes the table as large as `room` slots, of which half may be used. Returns 0 if there is not enough memory. */
static int resize(KeyTable *table, uint32_t room) {
    Slot *slots = calloc(room, sizeof *slots);
    uint32_t num_before = table->slots ? (table->mask + 1) / 2 : 0, num_entries = room / 2;
    void *keys = slots ? realloc(table->keys, ((size_t)num_entries + 1) * KEY_BYTES) : NULL;
    if (keys) table->keys = keys;
    void *values = keys ? realloc(table->values, ((size_t)num_entries + 1) * sizeof *table->values) : NULL;
    if (values) table->values = values;
    void *unused = values ? realloc(table->free, (size_t)num_entries * sizeof *table->free) : NULL;
    if (!unused) {
        free(slots);
        return 0;
    }
    table->free = unused;
    /* the stack has those that are not used; the new ones go below them, the lowest on top */
    uint32_t num_free = num_before - table->count, num_new = num_entries - num_before;
    memmove(table->free + num_new, table->free, num_free * sizeof *table->free);
    for (uint32_t i = 0; i < num_new; i++) {
        table->free[i] = num_entries - i;
        table->values[num_entries - i] = NULL;
    }
    for (uint32_t at = 0; table->slots && at <= table->mask; at++) {
        if (!table->slots[at].place) continue;
        uint32_t to = table->slots[at].tag & (room - 1);
        while (slots[to].place) to = (to + 1) & (room - 1);
        slots[to] = table->slots[at];
    }
    free(table->slots);
    table->slots = slots;
    table->mask = room - 1;
    return 1;
}

static int make_room(KeyTable *table, size_t more) {
    size_t room = (size_t)table->mask + 1;
    while (room < 2 * (table->count + more)) room *= 2;
    if (room == (size_t)table->mask + 1) return 1;
    if (room <= UINT32_MAX && resize(table, (uint32_t)room)) return 1;
    PyErr_NoMemory();
    return 0;
}

/* Returns how many entries are not used: the length of the stack. */
static uint32_t num_free(const KeyTable *table) { return (table->mask + 1) / 2 - table->count; }

/* Empties a slot and closes the gap: entries after it move up, none of them before its home slot. Returns the value. */
static PyObject *empty(KeyTable *table, Slot *slot) {
    uint32_t place = slot->place, gap = (uint32_t)(slot - table->slots);
    PyObject *value = table->values[place];
    table->values[place] = NULL;
    table->free[num_free(table)] = place;
    for (uint32_t at = (gap + 1) & table->mask; table->slots[at].place; at = (at + 1) & table->mask) {
        uint32_t home = table->slots[at].tag & table->mask;
        if (((at - home) & table->mask) < ((at - gap) & table->mask)) continue;
        table->slots[gap] = table->slots[at];
        gap = at;
    }
    table->slots[gap].place = 0;
    table->count--;
    return value;
}

/* The keys of an argument, which have all been checked, and their tags. */
typedef struct {
    PyObject *list;
    Py_ssize_t count;
    const uint8_t **bytes;
    uint32_t *tags;
} Keys;

static void release_keys(Keys *keys) {
    Py_XDECREF(keys->list);
    free(keys->bytes);
}

/* Returns 0 with an exception, and nothing to release, if it is not a sequence of keys. */
static int read_keys(const KeyTable *table, PyObject *sequence, Keys *keys) {
    keys->bytes = NULL;
    keys->list = PyList_Check(sequence) ? Py_NewRef(sequence) : PySequence_List(sequence);
    if (!keys->list) return 0;
    keys->count = PyList_Size(keys->list);
    keys->bytes = malloc((size_t)keys->count * (sizeof *keys->bytes + sizeof *keys->tags) + 1);
    if (!keys->bytes) PyErr_NoMemory();
    else keys->tags = (uint32_t *)(keys->bytes + keys->count);
    for (Py_ssize_t i = 0; keys->bytes && i < keys->count; i++) {
        const uint8_t *key = key_bytes(PyList_GetItem(keys->list, i));
        if (key) {
            keys->bytes[i] = key;
            keys->tags[i] = tag_of(table, key);
            continue;
        }
        free(keys->bytes);
        keys->bytes = NULL;
    }
    if (keys->bytes) return 1;
    Py_DECREF(keys->list);
    return 0;
}

/* Returns the slot of key i, and has those of later ones, then their entries, fetched from memory. */
static inline Slot *slot_of(const KeyTable *table, const Keys *keys, Py_ssize_t i) {
    if (i + AHEAD < keys->count) {
        __builtin_prefetch(table->slots + (keys->tags[i + AHEAD] & table->mask), 1);
        uint32_t place = table->slots[keys->tags[i + AHEAD / 2] & table->mask].place;
        __builtin_prefetch(table->keys[place]);
        __builtin_prefetch(table->values + place, 1);
    }
    return find_slot(table, keys->bytes[i], keys->tags[i]);
}

static PyObject *table_put(KeyTable *table, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 2) return PyErr_Format(PyExc_TypeError, "put takes 2 arguments, got %zd", num_args);
    Keys keys;
    if (!read_keys(table, args[0], &keys)) return NULL;
    int has_room = make_room(table, (size_t)keys.count);
    for (Py_ssize_t i = 0; has_room && i < keys.count; i++) {
        Slot *slot = slot_of(table, &keys, i);
        PyObject *before = NULL;
        if (slot->place) before = table->values[slot->place];
        else {
            *slot = (Slot){keys.tags[i], table->free[num_free(table) - 1]};
            memcpy(table->keys[slot->place], keys.bytes[i], KEY_BYTES);
            table->count++;
        }
        table->values[slot->place] = Py_NewRef(args[1]);
        Py_XDECREF(before);
    }
    release_keys(&keys);
    return has_room ? Py_NewRef(Py_None) : NULL;
}

static PyObject *table_take(KeyTable *table, PyObject *argument) {
    Keys keys;
    if (!read_keys(table, argument, &keys)) return NULL;
    PyObject *values = PyList_New(keys.count);
    for (Py_ssize_t i = 0; values && i < keys.count; i++) {
        Slot *slot = slot_of(table, &keys, i);
        PyList_SetItem(values, i, slot->place ? empty(table, slot) : Py_NewRef(Py_None));
    }
    release_keys(&keys);
    return values;
}

static PyObject *table_discard(KeyTable *table, PyObject *argument) {
    Keys keys;
    if (!table->count) Py_RETURN_NONE;
    if (!read_keys(table, argument, &keys)) return NULL;
    for (Py_ssize_t i = 0; i < keys.count; i++) {
        Slot *slot = slot_of(table, &keys, i);
        if (slot->place) Py_DECREF(empty(table, slot));
    }
    release_keys(&keys);
    Py_RETURN_NONE;
}

static PyObject *table_find(KeyTable *table, PyObject *argument) {
    const uint8_t *key = key_bytes(argument);
    if (!key) return NULL;
    uint32_t place = find_slot(table, key, tag_of(table, key))->place;
    return Py_NewRef(place ? table->values[place] : Py_None);
}

static PyObject *table_all_keys(KeyTable *table, PyObject *nothing) {
    (void)nothing;
    PyObject *keys = PyList_New(0);
    for (uint32_t at = 0; keys && at <= table->mask; at++) {
        if (!table->slots[at].place) continue;
        PyObject *key = PyBytes_FromStringAndSize((const char *)table->keys[table->slots[at].place], KEY_BYTES);
        if (!key || PyList_Append(keys, key)) Py_CLEAR(keys);
        Py_XDECREF(key);
    }
    return keys;
}

static PyObject *table_clear(KeyTable *table, PyObject *nothing) {
    (void)nothing;
    uint32_t num_entries = (table->mask + 1) / 2;
    int has_any = table->count > 0;
    if (has_any) memset(table->slots, 0, ((size_t)table->mask + 1) * sizeof *table->slots);
    table->count = 0;
    for (uint32_t i = 0; has_any && i < num_entries; i++) {
        table->free[i] = num_entries - i;
        Py_CLEAR(table->values[num_entries - i]); /* floats and records: nothing that calls back */
    }
    Py_RETURN_NONE;
}

static Py_ssize_t length(KeyTable *table) { return (Py_ssize_t)table->count; }

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"seed", NULL};
    unsigned long long seed;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "K", names, &seed)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    KeyTable *table = (KeyTable *)allocate(type, 0);
    if (!table) return NULL;
    table->seed = seed;
    if (resize(table, FIRST_ROOM)) return (PyObject *)table;
    Py_DECREF(table);
    return PyErr_NoMemory();
}

static void destroy(KeyTable *table) {
    PyTypeObject *type = Py_TYPE((PyObject *)table);
    if (table->slots) Py_DECREF(table_clear(table, NULL));
    free(table->slots), free(table->keys), free(table->values), free(table->free);
    freefunc release_memory = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release_memory(table);
    Py_DECREF(type);
}

#define METHOD(name, flags) {#name, (PyCFunction)(void (*)(void))table_##name, flags, "See key_table.py."}
static PyMethodDef methods[] = {
    METHOD(put, METH_FASTCALL), METHOD(take, METH_O),      METHOD(discard, METH_O),
    METHOD(find, METH_O),       METHOD(all_keys, METH_NOARGS), METHOD(clear, METH_NOARGS), {0},
};
static PyType_Slot slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, destroy}, {Py_tp_methods, methods}, {Py_mp_length, length}, {0},
};
static PyType_Spec spec = {
    .name = "quipu.actors.shared.native._native.KeyTable",
    .basicsize = sizeof(KeyTable),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

PyObject *make_key_table_type(PyObject *module) { return PyType_FromModuleAndSpec(module, &spec, NULL); }
