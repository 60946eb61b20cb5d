// tanh for vectors, and the soft cap.
#pragma once
#include "vec.h"

// Accurate to two ulp. Near 0, where 1 - 2 / (exp(2x) + 1) suffers from cancellation, it is an odd polynomial (our own
// Chebyshev fit); the two are combined by adding an exact 0 to either. NaN is preserved.
inline Vec tanh(Vec x) {
    Vec in = smaller(splat(10.0f), larger(splat(-10.0f), x));
    Vec size = larger(in, splat(0) - in);
    Vec far = splat(1) - splat(2) / (exp(in + in) + splat(1));
    Vec z = in * in;
    Vec q = splat(-0.00663105072f);
    q = fma(q, z, splat(0.0213208087f));
    q = fma(q, z, splat(-0.0539113693f));
    q = fma(q, z, splat(0.133331239f));
    q = fma(q, z, splat(-0.333333313f));
    Vec near = fma(in * z, q, in);
    return (near - zero_where_below(size, 0.5f, near)) + zero_where_below(size, 0.5f, far);
}

// cap * tanh(x / cap)
inline Vec capped(Vec x, float cap) { return splat(cap) * tanh(x / splat(cap)); }
