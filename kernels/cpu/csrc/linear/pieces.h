// Divides a matrix product among threads: pieces of some rows by some panels. Used by all products with bfloat16 and quantized
// matrices.
#pragma once
#include <algorithm>

#include "../program.h"

struct Division {
    int64_t rows;      // of a piece, at most
    int64_t step;      // pieces have multiples of so many rows, but for the last
    int64_t panels;    // of a piece, at most
    bool keeps_rows;   // whether consecutive pieces share their rows, or else their weights
    bool large = false;  // whether a thread takes few pieces, but not more panels than another; or else more, to end together
};

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls go(row, rows, panel, panels) for each piece that this thread takes.
template <class F>
static void for_each_piece(int64_t num_rows, int64_t num_panels, const Division& by, const Worker& worker, F go) {
    int64_t chunks = divide_up(num_rows, by.rows), steps = divide_up(num_rows, by.step);
    // pieces of several panels, if there are enough for every thread
    int64_t group = std::max<int64_t>(1, std::min(by.panels, num_panels * chunks / ((by.large ? 2 : 4) * worker.num_threads)));
    int64_t least = INT64_MAX;
    for (int64_t size = group, smallest = group / 2; by.large && size > smallest; size--) {
        int64_t of_thread = divide_up(divide_up(num_panels, size) * chunks, worker.num_threads) * size;
        if (of_thread < least) least = of_thread, group = size;
    }
    int64_t groups = divide_up(num_panels, group);
    for (int64_t item; (item = worker.next()) < groups * chunks;) {
        int64_t chunk = by.keeps_rows ? item / groups : item % chunks, panel = (by.keeps_rows ? item % groups : item / chunks) * group;
        int64_t row = steps * chunk / chunks * by.step, end = std::min(num_rows, steps * (chunk + 1) / chunks * by.step);
        go(row, end - row, panel, std::min(group, num_panels - panel));
    }
}
