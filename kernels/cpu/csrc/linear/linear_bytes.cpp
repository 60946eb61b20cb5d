// y = x @ weight.T (+ bias) (+ z) for quantized weights and activations rounded to 8 bits, each group of each row by its own
// scale: the largest magnitude becomes 127. Sums of a group are integers, and so exact: their bits are the same on every
// processor.
#include <cmath>

#include "quantized_rows.h"
#ifdef QUIPU_AMX
#include "quantized_tiles.h"
#endif

namespace {

// x as bytes, and three numbers of each group: their sum (an integer); their scale, which is NaN if an element is not finite;
// minus the sum times the bias of codes (an integer).
void prepare(const QuantizedMatrix& m, const float* x, uint32_t* words, float* sums) {
    auto bytes = reinterpret_cast<int8_t*>(words);
    int64_t size = m.num_groups == 1 ? m.width : m.group_size, whole = size / kLanes * kLanes;
    for (int64_t group = 0; group < m.num_groups; group++) {
        const float* from = x + group * size;
        auto each = [&](auto go) __attribute__((always_inline)) {  // what is stored after the last byte is overwritten, or 0
            for (int64_t k = 0; k < whole; k += kLanes) go(k, load(from + k));
            if (whole < size) go(whole, load(from + whole, first_lanes(size - whole)));
        };
        Vec top = splat(0), total = splat(0), rest = splat(0);  // rest: 0, or NaN if an element is not finite
        each([&](int64_t, Vec v) {
            top = larger(larger(v, splat(0) - v), top);
            rest = fma(v, splat(0), rest);
        });
        float most = max_lanes(top), inverse = most > 0 ? 127 / most : 0;
        int8_t* to = bytes + group * size;
        each([&](int64_t k, Vec v) {
            Vec byte = nearest_integer(smaller(splat(127), larger(v * splat(inverse), splat(-127))));
            store_bytes(to + k, byte);
            total = total + byte;  // exact
        });
        float sum_of_bytes = sum_lanes(total + rest);
        bool is_finite = sum_of_bytes == sum_of_bytes;
        auto sum = is_finite ? static_cast<int32_t>(sum_of_bytes) : 0;
        memcpy(sums + group, &sum, 4);
        sums[m.num_groups + group] = is_finite ? most / 127 : NAN;
        sum *= -stored_bias(m);
        memcpy(sums + 2 * m.num_groups + group, &sum, 4);
    }
}

template <class C>
void multiply_of(const Op& op, const QuantizedMatrix& m, const Pass& pass, const Worker& worker) {
    PreparedRows x = prepare_rows<ByteProduct>(m, num_rows(op, pass), worker, [&](int64_t row, uint32_t* words, float* sums) {
        prepare(m, op.x + row * op.x_stride, words, sums);
    });
    for_each_needed_piece(op, pass, division(m, x), worker,
                          [&](const Op& to, int64_t row, int64_t rows, int64_t panel, int64_t panels, int64_t next) {
#ifdef QUIPU_AMX
        if (rows > kFewRows && Steps(m, 4).are_whole(m, 4)) {  // tiles of fewer would be mostly empty
            Tiles tiles;
            for (int64_t i = 0; i < panels; i++) {
                if (C::kUnits == 1) multiply_panel_in_steps<C, BiasedByteTiles, false>(to, m, x, row, rows, panel + i, tiles);
                else multiply_panel_in_steps<SignedCodes4, SignedByteTiles, true>(to, m, x, row, rows, panel + i, tiles);
            }
            return;
        }
#endif
        multiply_codes<C>(to, m, x, row, rows, panel, panels, next);
    });
}

}  // namespace

void linear_bytes(const Op& op, const Pass& pass, const Worker& worker) {
    const QuantizedMatrix& m = *static_cast<const QuantizedMatrix*>(op.weight);
    if (m.bits == 8) multiply_of<ByteCodes8>(op, m, pass, worker);
    else multiply_of<ByteCodes4>(op, m, pass, worker);
}
