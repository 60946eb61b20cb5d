// Activations of gated MLPs, one Vec of gate and of up at a time.
#pragma once
#include "../vec/vec.h"

inline Vec silu_mul(Vec gate, Vec up) { return gate / (splat(1) + exp(splat(0) - gate)) * up; }

// The activation of gpt-oss; NaN is preserved.
inline Vec clamped_swiglu(Vec gate, Vec up, Vec alpha, Vec limit) {
    gate = smaller(limit, gate);
    up = smaller(limit, larger(splat(0) - limit, up));
    return gate / (splat(1) + exp(splat(0) - alpha * gate)) * (up + splat(1));
}

// x / 2 * (1 + tanh(u)) is x / (1 + exp(-2u)).
inline Vec gelu_mul(Vec gate, Vec up) {
    const Vec linear = splat(-1.5957691216f), cubic = splat(-0.0713548162f);  // -2 sqrt(2 / pi), and that times 0.044715
    return gate / (splat(1) + exp(gate * fma(gate * gate, cubic, linear))) * up;
}
