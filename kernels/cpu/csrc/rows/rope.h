// Rotary embedding of one head.
#pragma once
#include "../program.h"

// Rotates one head by its position; y may be x.
inline void rotate_head(const Op& op, int64_t position, const float* x, float* y) {
    int64_t half = op.out_width / 2;
    const float *cos = op.cos + position * half, *sin = op.sin + position * half;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[half + i];
        y[i] = a * cos[i] - b * sin[i];
        y[half + i] = b * cos[i] + a * sin[i];
    }
    for (int64_t i = op.out_width; i < op.width; i++) y[i] = x[i];
}
