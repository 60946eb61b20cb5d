// y = x @ weight.T (+ bias) (+ z) for quantized weights and activations rounded to 8 bits, each group of each row by its own
// scale: the largest magnitude becomes 127. Sums of a group are integers, and so exact: their bits are the same on every
// processor.
#include "quantized_rows.h"
#ifdef QUIPU_AMX
#include "bytes_amx.h"
#endif

namespace {

// x as bytes, their sum in each group (an integer), and after the sums each group's scale, which is NaN if an element is not
// finite.
void prepare(const QuantizedMatrix& m, const float* x, uint32_t* words, float* sums) {
    auto bytes = reinterpret_cast<int8_t*>(words);
    int64_t size = m.num_groups == 1 ? m.width : m.group_size;
    for (int64_t group = 0; group < m.num_groups; group++) {
        const float* from = x + group * size;
        Vec top = splat(0), rest = splat(0);
        for (int64_t k = 0; k < size; k += kLanes) {
            Vec v = load(from + k, first_lanes(size - k));
            top = larger(larger(v, splat(0) - v), top);
            rest = rest + v * splat(0);
        }
        float most = max_lanes(top), inverse = most > 0 ? 127 / most : 0;
        sums[m.num_groups + group] = most / 127 + sum_lanes(rest);
        int32_t sum = 0;
        int8_t* to = bytes + group * size;
        for (int64_t k = 0; k < size; k++) to[k] = static_cast<int8_t>(std::lrintf(std::min(127.0f, std::max(-127.0f, from[k] * inverse))));
        for (int64_t k = 0; k < size; k++) sum += to[k];
        memcpy(sums + group, &sum, 4);
    }
}

#ifdef QUIPU_AMX
// Many rows by one panel.
template <class C>
void multiply_tiles(const Op& op, const QuantizedMatrix& m, const PreparedRows& x, int64_t row, int64_t rows, int64_t panel) {
    static thread_local std::vector<float> totals(kRowsPerChunk * kPanel);
    static thread_local std::vector<uint8_t> wide;
    alignas(64) int32_t sums[ByteTiles::kRowsAtOnce * kPanel];
    int64_t units = m.padded_width() / 4, group_units = m.num_groups == 1 ? units : m.group_size / 4;
    const uint8_t* codes = m.codes + panel * m.panel_bytes();
    if (C::kUnits > 1) {
        wide.resize(std::max<size_t>(wide.size(), units * 2 * ByteCodes8::kBytes));
        expand<C>(codes, 0, units, wide.data());
        codes = wide.data();
    }
    int bias = stored_bias(m);
    ByteTiles tiles;
    for (int64_t done = 0, count; done < rows; done += count) {
        count = std::min(ByteTiles::kRowsAtOnce, rows - done);
        PreparedRows some{x.p + (row + done) * x.stride, x.stride, x.sums_at};
        for (int64_t group = 0; group < m.num_groups; group++) {
            int64_t unit = group * group_units;
            tiles.multiply(some.p + unit, x.stride, count, codes + unit * 2 * ByteCodes8::kBytes, group_units, sums);
            for (int v = 0; v < 2; v++) {
                Vec scale = load_shared(m, m.scales, panel, group, v);
                Vec offset = m.offsets ? load_shared(m, m.offsets, panel, group, v) : splat(0);
                for (int64_t r = 0; r < count; r++) {
                    float* total = totals.data() + (done + r) * kPanel + v * kLanes;
                    float sum_of_x = some.sums(r)[group];
                    Vec factor = splat(some.sums(r)[m.num_groups + group]);
                    Vec y = group == 0 ? splat(0) : load(total);
                    y = fma(scale, ByteProduct::value(load_ints(sums + r * kPanel + v * kLanes), sum_of_x, bias) * factor, y);
                    if (m.offsets) y = fma(offset, ByteProduct::sum_of_x(sum_of_x) * factor, y);
                    store(total, y);
                }
            }
        }
    }
    finish_panel(op, row, rows, panel, totals.data(), kPanel);
}
#endif

template <class C>
void multiply_of(const Op& op, const QuantizedMatrix& m, const Pass& pass, const Worker& worker) {
    PreparedRows x = prepare_rows<ByteProduct>(m, num_rows(op, pass), worker, [&](int64_t row, uint32_t* words, float* sums) {
        prepare(m, op.x + row * op.x_stride, words, sums);
    });
    for_each_piece(op, pass, worker, [&](int64_t row, int64_t rows, int64_t panel, int64_t panels) {
#ifdef QUIPU_AMX
        if (rows > kFewRows) {  // tiles of fewer would be mostly empty
            for (int64_t i = 0; i < panels; i++) multiply_tiles<C>(op, m, x, row, rows, panel + i);
            return;
        }
#endif
        multiply_codes<C>(op, m, x, row, rows, panel, panels);
    });
}

}  // namespace

void linear_bytes(const Op& op, const Pass& pass, const Worker& worker) {
    const QuantizedMatrix& m = *static_cast<const QuantizedMatrix*>(op.weight);
    if (m.bits == 8) multiply_of<ByteCodes8>(op, m, pass, worker);
    else multiply_of<ByteCodes4>(op, m, pass, worker);
}
