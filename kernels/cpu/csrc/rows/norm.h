// RMSNorm of one row, or of one head of it.
#pragma once
#include "../vec/vec.h"

inline float mean_of(const float* x, int64_t width) {
    Vec total = splat(0);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) total = total + load(x + i);
    float sum = sum_lanes(total);
    for (; i < width; i++) sum += x[i];
    return sum / static_cast<float>(width);
}

// Returns the mean square of x - from.
inline float mean_square(const float* x, int64_t width, float from) {
    Vec squares = splat(0);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        Vec distance = load(x + i) - splat(from);
        squares = fma(distance, distance, squares);
    }
    float sum = sum_lanes(squares);
    for (; i < width; i++) sum = std::fma(x[i] - from, x[i] - from, sum);
    return sum / static_cast<float>(width);
}

// Returns the inverse of the root mean square of x.
inline float inverse_rms(const float* x, int64_t width, float eps) {
    return 1.0f / std::sqrt(mean_square(x, width, 0) + eps);
}

// LayerNorm; `bias` may be null.
inline void layer_norm(const float* x, const float* weight, const float* bias, float* y, int64_t width, float eps) {
    int64_t i;
    float mean = mean_of(x, width);
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
