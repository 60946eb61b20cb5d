// The copies of a row that AltUp has (Gemma 3n), side by side.
//
// What must always hold: a thread has the same rows as in rows.cpp, so that no barrier is needed between them.
#include <algorithm>
#include <cstring>

#include "each.h"
#include "norm.h"
#include "../program.h"

// y = x, and behind it the copies in z, scaled to the root mean square of x
void match_copies(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++) {
        const float *x = op.x + s.begin * op.x_stride, *z = op.z + s.begin * op.z_stride;
        float* y = op.y + s.begin * op.y_stride;
        memcpy(y, x, op.width * sizeof(float));
        float size = std::sqrt(mean_square(x, op.width, 0));
        for (int64_t c = 0; c < op.num_heads; c++) {
            const float* copy = z + c * op.width;
            float* to = y + (c + 1) * op.width;
            Vec factor = splat(size / std::sqrt(std::max(mean_square(copy, op.width, 0), op.eps)));  // NaN is preserved
            each(op.width, [&](int64_t i, Mask mask) { store(to + i, mask, load(copy + i, mask) * factor); });
        }
    }
}

// y = x, to each copy of which a weighted sum of the copies in z is added
void mix_copies(const Op& op, const Pass& pass, const Worker& worker) {
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++) {
        const float *x = op.x + s.begin * op.x_stride, *z = op.z + s.begin * op.z_stride;
        const float* weights = op.v ? op.v + s.begin * op.narrow_stride : static_cast<const float*>(op.weight);
        float* y = op.y + s.begin * op.y_stride;
        for (int64_t c = 0; c < op.num_heads; c++) {
            const float *copy = x + c * op.width, *row = weights + c * op.num_multiplied;
            float* to = y + c * op.width;
            each(op.width, [&](int64_t i, Mask mask) {
                Vec sum = load(copy + i, mask);
                for (int64_t j = 0; j < op.num_multiplied; j++)
                    sum = fma(splat(row[j]), load(z + j * op.width + i, mask), sum);
                store(to + i, mask, sum);
            });
        }
    }
}
