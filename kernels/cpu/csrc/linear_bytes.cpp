// y = x @ weight.T (+ bias) (+ z) for quantized weights and activations rounded to 8 bits, each row by its own scale: the
// largest magnitude becomes 127. Sums of a group are integers, and so exact: their bits are the same on every processor.
#include "quantized_rows.h"

namespace {

// x as bytes, their sum in each group (an integer), and before the sums the row's scale, which is NaN if an element is not
// finite.
void prepare(const QuantizedMatrix& m, const float* x, uint32_t* words, float* sums) {
    Vec top = splat(0), rest = splat(0);
    for (int64_t k = 0; k < m.width; k += kLanes) {
        Vec v = load(x + k, first_lanes(m.width - k));
        top = larger(larger(v, splat(0) - v), top);
        rest = rest + v * splat(0);
    }
    float most = max_lanes(top), inverse = most > 0 ? 127 / most : 0;
    sums[-1] = most / 127 + sum_lanes(rest);
    auto bytes = reinterpret_cast<int8_t*>(words);
    for (int64_t k = 0; k < m.width; k++) bytes[k] = static_cast<int8_t>(std::lrintf(std::min(127.0f, std::max(-127.0f, x[k] * inverse))));
    int64_t size = m.num_groups == 1 ? m.width : m.group_size;
    for (int64_t group = 0; group < m.num_groups; group++) {
        int32_t sum = 0;
        for (int64_t k = group * size; k < (group + 1) * size; k++) sum += bytes[k];
        memcpy(sums + group, &sum, 4);
    }
}

template <class C>
void multiply_of(const Op& op, const QuantizedMatrix& m, int64_t num_rows, const Worker& worker) {
    PreparedRows x = prepare_rows(m, num_rows, ByteProduct::kInputs, worker, [&](int64_t row, uint32_t* words, float* sums) {
        prepare(m, op.x + row * op.x_stride, words, sums);
    });
    for_each_piece(op, num_rows, worker, [&](int64_t row, int64_t rows, int64_t panel, int64_t panels) {
        for (int64_t done = 0, some; done < rows; done += some) {
            some = std::min<int64_t>(8, rows - done);
            multiply_few<C>(op, m, x, row + done, some, panel, panels, true);
        }
    });
}

}  // namespace

void linear_bytes(const Op& op, int64_t num_rows, const Worker& worker) {
    const QuantizedMatrix& m = *static_cast<const QuantizedMatrix*>(op.weight);
    if (m.bits == 8) multiply_of<ByteCodes8>(op, m, num_rows, worker);
    else multiply_of<ByteCodes4>(op, m, num_rows, worker);
}
