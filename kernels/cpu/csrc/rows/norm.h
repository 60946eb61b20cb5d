// RMSNorm of one row, or of one head of it.
#pragma once
#include "../vec/vec.h"

// Returns the inverse of the root mean square of x.
inline float inverse_rms(const float* x, int64_t width, float eps) {
    Vec squares = splat(0);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    float sum = sum_lanes(squares);
    for (; i < width; i++) sum = std::fma(x[i], x[i], sum);
    return 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
}

// LayerNorm; `bias` may be null.
inline void layer_norm(const float* x, const float* weight, const float* bias, float* y, int64_t width, float eps) {
    Vec total = splat(0);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) total = total + load(x + i);
    float sum = sum_lanes(total);
    for (; i < width; i++) sum += x[i];
    float mean = sum / static_cast<float>(width);
    for (i = 0; i < width; i++) y[i] = x[i] - mean;
    float r = inverse_rms(y, width, eps);
    for (i = 0; i < width; i++) y[i] = y[i] * r * weight[i] + (bias ? bias[i] : 0);
}

// y may be x.
inline void norm(const float* x, const float* weight, float* y, int64_t width, float eps) {
    float r = inverse_rms(x, width, eps);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) store(y + i, load(x + i) * splat(r) * load(weight + i));
    for (; i < width; i++) y[i] = x[i] * r * weight[i];
}
