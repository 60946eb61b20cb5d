// Rotary embedding of one head.
#pragma once
#include "../program.h"
#include "../vec/vec.h"

// Rotates one head by its position; y may be x.
inline void rotate_head(const Op& op, int64_t position, const float* x, float* y) {
    int64_t half = op.out_width / 2;
    const float *cos = op.cos + position * half, *sin = op.sin + position * half;
    int64_t i = 0;
    if (op.interleaved) {
        for (; i < half; i++) {
            float a = x[2 * i], b = x[2 * i + 1];
            y[2 * i] = a * cos[i] - b * sin[i];
            y[2 * i + 1] = b * cos[i] + a * sin[i];
        }
    }
    for (; i + kLanes <= half; i += kLanes) {
        Vec a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(y + i, a * c - b * s);
        store(y + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        y[i] = a * cos[i] - b * sin[i];
        y[half + i] = b * cos[i] + a * sin[i];
    }
    for (i = op.out_width; i < op.width; i++) y[i] = x[i];
}
