/* How blocks are used again: a sample of keys on a timeline, and a HyperLogLog of all. See reuse.h. */
#include "reuse.h"

#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- bits of a key */

static inline uint64_t word_of(const uint8_t *bytes) {
    uint64_t word = (uint64_t)bytes[0] | (uint64_t)bytes[1] << 8 | (uint64_t)bytes[2] << 16 | (uint64_t)bytes[3] << 24 |
                    (uint64_t)bytes[4] << 32 | (uint64_t)bytes[5] << 40 | (uint64_t)bytes[6] << 48 |
                    (uint64_t)bytes[7] << 56; /* little-endian: one load */
    return word ? word : 1;
}

/* The register takes the upper bits, the sample those in the middle, the rank the lower ones. */
static inline int is_sampled(const Sketch *sketch, uint64_t key) {
    return (key >> 26 & 0xffffff) >> (MAX_SHIFT - sketch->shift) == 0;
}

static inline uint32_t bin_of(uint64_t distance) {
    if (distance < 16) return (uint32_t)distance;
    uint32_t exponent = 63 - (uint32_t)__builtin_clzll(distance);
    uint32_t bin = 16 * (exponent - 3) + (uint32_t)(distance >> (exponent - 4) & 15);
    return bin < NUM_BINS ? bin : NUM_BINS - 1;
}

/* ---------------------------------------------------------------- memory */

int sketch_make(Sketch *sketch, uint32_t max_keys, uint32_t register_bits) {
    uint32_t size = 16;
    while (size < 2 * max_keys) size *= 2;
    sketch->max_keys = max_keys;
    sketch->mask = size - 1;
    sketch->num_places = 2 * max_keys + MAX_SAMPLED_IN_CALL;
    sketch->register_bits = register_bits;
    sketch->sum = 1ULL << (register_bits + SCALE_BITS);
    sketch->table = calloc(size, sizeof *sketch->table);
    sketch->timeline = calloc(sketch->num_places, sizeof *sketch->timeline);
    sketch->tree = calloc((size_t)sketch->num_places + 1, sizeof *sketch->tree);
    sketch->registers = calloc((size_t)1 << register_bits, 1);
    return sketch->table && sketch->timeline && sketch->tree && sketch->registers;
}

void sketch_free(Sketch *sketch) {
    free(sketch->table), free(sketch->timeline), free(sketch->tree), free(sketch->registers);
}

/* ---------------------------------------------------------------- the sample */

static inline Tracked *find(const Sketch *sketch, uint64_t key) {
    for (uint32_t at = (uint32_t)(key ^ key >> 32) & sketch->mask;; at = (at + 1) & sketch->mask) {
        Tracked *entry = sketch->table + at;
        if (!entry->key || entry->key == key) return entry;
    }
}

static inline void tree_add(Sketch *sketch, uint32_t place, uint32_t amount) {
    for (uint32_t at = place + 1; at <= sketch->num_places; at += at & -at) sketch->tree[at] += amount;
}

/* How many keys were last used at `place` or before. */
static inline uint32_t num_up_to(const Sketch *sketch, uint32_t place) {
    uint32_t total = 0;
    for (uint32_t at = place + 1; at; at -= at & -at) total += sketch->tree[at];
    return total;
}

/* Drops keys that are not in the sample any more, and closes the gaps of the timeline. */
static int rebuild(Sketch *sketch) {
    Tracked *before = sketch->table, *table = calloc((size_t)sketch->mask + 1, sizeof *table);
    if (!table) return 0;
    uint32_t next = 0;
    for (uint32_t place = 0; place < sketch->next_place; place++) {
        uint64_t key = sketch->timeline[place];
        if (!key || !is_sampled(sketch, key)) continue;
        sketch->table = before;
        Tracked entry = *find(sketch, key);
        entry.place = next;
        sketch->table = table;
        *find(sketch, key) = entry;
        sketch->timeline[next++] = key;
    }
    free(before);
    sketch->table = table;
    memset(sketch->timeline + next, 0, (sketch->num_places - next) * sizeof *sketch->timeline);
    sketch->num_keys = sketch->next_place = next;
    for (uint32_t at = 1; at <= sketch->num_places; at++) sketch->tree[at] = at <= next;
    for (uint32_t at = 1; at <= sketch->num_places; at++) {
        uint32_t parent = at + (at & -at);
        if (parent <= sketch->num_places) sketch->tree[parent] += sketch->tree[at];
    }
    return 1;
}

/* Makes a key the one that was used last. */
static void use(Sketch *sketch, uint64_t key, uint32_t now, uint32_t owner) {
    Tracked *entry = find(sketch, key);
    if (entry->key) {
        tree_add(sketch, entry->place, (uint32_t)-1);
        sketch->timeline[entry->place] = 0;
    } else {
        sketch->num_keys++;
    }
    *entry = (Tracked){key, sketch->next_place, now, owner};
    sketch->timeline[sketch->next_place] = key;
    tree_add(sketch, sketch->next_place++, 1);
}

/* Makes room for so many uses, `num_missing` of them of keys that are not tracked. Returns 0 if there is not enough
 * memory. */
static int make_room(Sketch *sketch, uint32_t num_uses, uint32_t num_missing) {
    while (sketch->num_keys + num_missing > sketch->max_keys && sketch->shift < MAX_SHIFT) {
        sketch->shift++;
        if (!rebuild(sketch)) return 0;
    }
    return sketch->next_place + num_uses <= sketch->num_places || rebuild(sketch);
}

/* ---------------------------------------------------------------- all keys */

/* Counts a key in its register; returns how many keys this stands for, 0 if the register says no more than before. */
static inline double count_distinct(Sketch *sketch, uint64_t key) {
    uint8_t *reg = sketch->registers + (key >> (64 - sketch->register_bits));
    uint8_t rank = (uint8_t)(1 + __builtin_ctzll(key | 1ULL << (SCALE_BITS - 1)));
    if (rank <= *reg) return 0;
    double weight = (double)(1ULL << (sketch->register_bits + SCALE_BITS)) / (double)sketch->sum;
    sketch->sum -= (1ULL << (SCALE_BITS - *reg)) - (1ULL << (SCALE_BITS - rank));
    *reg = rank;
    return weight;
}

/* Reads a list of keys into words. Returns NULL with an exception. */
static uint64_t *words_of(PyObject *keys, Py_ssize_t *count) {
    if (!PyList_Check(keys)) return PyErr_Format(PyExc_TypeError, "keys are a list"), NULL;
    *count = PyList_Size(keys);
    uint64_t *words = malloc((size_t)(*count ? *count : 1) * sizeof *words);
    if (!words) return PyErr_NoMemory(), NULL;
    for (Py_ssize_t i = 0; i < *count; i++) {
        const uint8_t *bytes = key_bytes(PyList_GetItem(keys, i));
        if (!bytes) return free(words), NULL;
        words[i] = word_of(bytes);
    }
    return words;
}

/* ---------------------------------------------------------------- methods */

/* access(keys, num_found, num_matchable, now, owner) */
PyObject *sketch_access(Sketch *sketch, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 5) return PyErr_Format(PyExc_TypeError, "access takes 5 arguments, got %zd", num_args);
    Py_ssize_t count, num_found = PyLong_AsSsize_t(args[1]), num_matchable = PyLong_AsSsize_t(args[2]);
    uint32_t now = (uint32_t)PyLong_AsUnsignedLong(args[3]), owner = (uint32_t)PyLong_AsUnsignedLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    if (num_found < 0 || num_matchable < 0) return PyErr_Format(PyExc_ValueError, "a number of blocks is negative");
    uint64_t *words = words_of(args[0], &count);
    if (!words) return NULL;
    uint32_t sampled[MAX_SAMPLED_IN_CALL], num_sampled;
    for (;;) {
        num_sampled = 0;
        Py_ssize_t i = 0;
        for (; i < count; i++) {
            if (!is_sampled(sketch, words[i])) continue;
            if (num_sampled == MAX_SAMPLED_IN_CALL) break;
            sampled[num_sampled++] = (uint32_t)i;
        }
        if (i == count || sketch->shift == MAX_SHIFT) break;
        sketch->shift++;
        if (!rebuild(sketch)) goto no_memory;
    }
    int is_exact = sketch->shift == 0;
    uint32_t num_missing = 0;
    for (uint32_t i = 0; i < num_sampled; i++) {
        Py_ssize_t index = sampled[i];
        Tracked *entry = find(sketch, words[index]);
        num_missing += !entry->key;
        if (index >= num_matchable) continue;
        if (entry->key) {
            uint64_t more_recent = sketch->num_keys - num_up_to(sketch, entry->place);
            sketch->bins[bin_of((more_recent << sketch->shift) + 1)] += 1ULL << sketch->shift;
        } else if (is_exact && index >= num_found) {
            sketch->num_new += 1;
        }
    }
    for (Py_ssize_t i = num_found; i < count; i++) {
        double weight = count_distinct(sketch, words[i]);
        if (!is_exact && i < num_matchable) sketch->num_new += weight;
    }
    sketch->num_queries += (uint64_t)(num_matchable < count ? num_matchable : count);
    if (!make_room(sketch, num_sampled, num_missing)) goto no_memory;
    for (uint32_t i = num_sampled; i--;)
        if (is_sampled(sketch, words[sampled[i]])) use(sketch, words[sampled[i]], now, owner);
    free(words);
    Py_RETURN_NONE;
no_memory:
    free(words);
    return PyErr_NoMemory();
}

/* touch(prefixes, now, owner) */
PyObject *sketch_touch(Sketch *sketch, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 3) return PyErr_Format(PyExc_TypeError, "touch takes 3 arguments, got %zd", num_args);
    char *bytes;
    Py_ssize_t length;
    uint32_t now = (uint32_t)PyLong_AsUnsignedLong(args[1]), owner = (uint32_t)PyLong_AsUnsignedLong(args[2]);
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[0], &bytes, &length)) return NULL;
    for (Py_ssize_t at = 0; at + 8 <= length; at += 8) {
        uint64_t key = word_of((const uint8_t *)bytes + at);
        count_distinct(sketch, key);
        if (!is_sampled(sketch, key) || find(sketch, key)->key) continue;
        if (!make_room(sketch, 1, 1)) return PyErr_NoMemory();
        if (is_sampled(sketch, key)) use(sketch, key, now, owner);
    }
    Py_RETURN_NONE;
}

/* idle(prefixes, now) */
PyObject *sketch_idle(Sketch *sketch, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 2) return PyErr_Format(PyExc_TypeError, "idle takes 2 arguments, got %zd", num_args);
    char *bytes;
    Py_ssize_t length;
    uint32_t now = (uint32_t)PyLong_AsUnsignedLong(args[1]);
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[0], &bytes, &length)) return NULL;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t at = 0; found && at + 8 <= length; at += 8) {
        uint64_t key = word_of((const uint8_t *)bytes + at);
        if (!is_sampled(sketch, key)) continue;
        Tracked *entry = find(sketch, key);
        if (!entry->key) continue;
        PyObject *pair = Py_BuildValue("(kk)", (unsigned long)entry->owner, (unsigned long)(now - entry->used_at));
        if (!pair || PyList_Append(found, pair)) Py_CLEAR(found);
        Py_XDECREF(pair);
    }
    return found;
}
