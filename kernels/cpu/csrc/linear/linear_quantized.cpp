// y = x @ weight.T (+ bias) (+ z) for quantized weights and activations that are not: x is rounded to bfloat16 where the
// instruction set multiplies it, else float32. Codes are exact in either. linear.cpp calls this for such matrices.
#include "quantized_rows.h"
#ifdef QUIPU_AMX
#include "../vec/pairs.h"
#include "quantized_tiles.h"
#endif

namespace {

#ifdef QUIPU_PAIRS
typedef PairProduct Product;
typedef PairCodes8 Codes8;
typedef WholePairCodes8 WholeCodes8;
typedef PairCodes4 Codes4;
typedef PairCodesE2m1 CodesE2m1;
typedef bf16 Element;
#else
typedef FloatProduct Product;
typedef FloatCodes8 Codes8;
typedef FloatCodes8 WholeCodes8;
typedef FloatCodes4 Codes4;
typedef FloatCodesE2m1 CodesE2m1;
typedef float Element;
#endif

// x as it is multiplied, and the sum of each group of it, if these are needed.
template <class P>
void prepare(const QuantizedMatrix& m, const float* x, uint32_t* words, float* sums) {
    Element* to = reinterpret_cast<Element*>(words);
    for (int64_t k = 0; k < m.width; k++) narrow(x[k], to + k);
    if (!m.offsets && !P::kNeedsSums) return;
    int64_t size = m.num_groups == 1 ? m.padded_width() : m.group_size;
    for (int64_t group = 0; group < m.num_groups; group++) {
        Vec sum = splat(0);
        const Element* at = to + group * size;
        for (int64_t k = 0; k < size; k += 8) {
            float eight[kLanes] = {};
            for (int i = 0; i < 8; i++) eight[i] = widen(at[k + i]);
            sum = sum + load(eight);
        }
        sums[group] = sum_lanes(sum);
    }
    P::scale_row(to, m.width);
}

#ifdef QUIPU_AMX
// All rows go through tiles, whose sums have other bits than those of the vector instruction.
// This is for a width that is not a multiple of a tile's depth.
template <class C>
void multiply_panel(const Op& op, const QuantizedMatrix& m, const PreparedRows& x, int64_t row, int64_t rows, int64_t panel) {
    static thread_local Buffer<float> totals(2 * kRowsPerChunk * kPanel);
    alignas(64) static thread_local bf16 wide[kQuantizedDepth * kPanel];
    float* sums = totals.data() + kRowsPerChunk * kPanel;
    const uint8_t* codes = m.codes + panel * m.panel_bytes();
    int64_t num_k = m.padded_width(), group_size = m.num_groups == 1 ? num_k : m.group_size;
    const bf16* left = reinterpret_cast<const bf16*>(x.p + row * x.stride);
    Pairs pairs;
    for (int64_t depth = 0; depth < num_k; depth += kQuantizedDepth) {
        int64_t until = std::min(depth + kQuantizedDepth, num_k);
        expand<C>(codes, depth / 2, until / 2, reinterpret_cast<uint8_t*>(wide));
        for (int64_t k = depth, end; k < until; k = end) {
            int64_t group = k / group_size;
            end = std::min(until, (group + 1) * group_size);
            pairs.add(left + k, 2 * x.stride, rows, packed(wide + (k - depth) * kPanel), end - k, k == group * group_size, sums, kPanel);
            if (end < (group + 1) * group_size) break;
            for (int v = 0; v < 2; v++) {
                Vec scale = load_shared(m, m.scales, panel, group, v);
                for (int64_t r = 0; r < rows; r++) {
                    float* total = totals.data() + r * kPanel + v * kLanes;
                    Vec y = fma(scale, load(sums + r * kPanel + v * kLanes), group == 0 ? splat(0) : load(total));
                    if (m.offsets) y = fma(load_shared(m, m.offsets, panel, group, v), splat(x.sums(row + r)[group]), y);
                    store(total, y);
                }
            }
        }
    }
    finish_panel(op, row, rows, panel, totals.data(), kPanel);
}

template <class C>
void multiply(const Op& op, const QuantizedMatrix& m, const PreparedRows& x, int64_t row, int64_t rows, int64_t panel, int64_t panels,
              int64_t) {
    Tiles tiles;
    bool in_steps = Steps(m, 2).are_whole(m, 2);
    for (int64_t i = 0; i < panels; i++) {
        if (in_steps) multiply_panel_in_steps<C, PairTiles, true>(op, m, x, row, rows, panel + i, tiles);
        else
            for (int64_t done = 0; done < rows; done += kRowsPerChunk)
                multiply_panel<C>(op, m, x, row + done, std::min(kRowsPerChunk, rows - done), panel + i);
    }
}
#elif defined(QUIPU_PAIRS)
// Two codes become a pair of bfloat16 in fewer instructions than it takes to store the pair for other rows.
template <class C>
void multiply(const Op& op, const QuantizedMatrix& m, const PreparedRows& x, int64_t row, int64_t rows, int64_t panel, int64_t panels,
              int64_t next) {
    multiply_codes<C>(op, m, x, row, rows, panel, panels, next);
}
#else
// For more rows than this, codes are expanded to floats first, a part of a panel at a time.
constexpr int64_t kDirectRows = 48;

template <class C>
void multiply_panel(const Op& op, const QuantizedMatrix& m, const PreparedRows& x, int64_t row, int64_t rows, int64_t panel) {
    static thread_local Buffer<float> totals(2 * kRowsPerChunk * kPanel);
    alignas(64) static thread_local Element wide[kQuantizedDepth * kPanel];
    const uint8_t* codes = m.codes + panel * m.panel_bytes();
    Sums sums{totals.data(), totals.data() + kRowsPerChunk * kPanel};
    int64_t units = m.padded_width() / Product::kInputs;
    constexpr int64_t depth = kQuantizedDepth / Product::kInputs;
    PreparedRows some{x.p + row * x.stride, x.stride, x.sums_at};
    for (int64_t first = 0; first < units; first += depth) {
        int64_t last = std::min(first + depth, units);
        expand<C>(codes, first, last, reinterpret_cast<uint8_t*>(wide));
        // as if the panel began at unit 0
        Columns columns{&m, panel, reinterpret_cast<const uint8_t*>(wide) - first * 2 * C::Wide::kBytes, 0};
        multiply_all<typename C::Wide, 1>(rows, some, columns, first, last, sums);
    }
    finish_panel(op, row, rows, panel, totals.data(), kPanel);
}

template <class C>
void multiply(const Op& op, const QuantizedMatrix& m, const PreparedRows& x, int64_t row, int64_t rows, int64_t panel, int64_t panels,
              int64_t next) {
    if (rows <= kDirectRows) return multiply_codes<C>(op, m, x, row, rows, panel, panels, next);
    for (int64_t i = 0; i < panels; i++) multiply_panel<C>(op, m, x, row, rows, panel + i);
}
#endif

template <class C>
void multiply_of(const Op& op, const QuantizedMatrix& m, const Pass& pass, const Worker& worker) {
    PreparedRows x = prepare_rows<Product>(m, num_rows(op, pass), worker, [&](int64_t row, uint32_t* words, float* sums) {
        prepare<typename C::Product>(m, op.x + row * op.x_stride, words, sums);
    });
    for_each_needed_piece(op, pass, division(m, x), worker,
                          [&](const Op& to, int64_t row, int64_t rows, int64_t panel, int64_t panels, int64_t next) {
        multiply<C>(to, m, x, row, rows, panel, panels, next);
    });
}

}  // namespace

void linear_quantized(const Op& op, const Pass& pass, const Worker& worker) {
    const QuantizedMatrix& m = *static_cast<const QuantizedMatrix*>(op.weight);
    if (m.byte_products) linear_bytes(op, pass, worker);
    else if (m.bits == 8 && m.has_lowest) multiply_of<WholeCodes8>(op, m, pass, worker);
    else if (m.bits == 8) multiply_of<Codes8>(op, m, pass, worker);
    else if (m.e2m1) multiply_of<CodesE2m1>(op, m, pass, worker);
    else multiply_of<Codes4>(op, m, pass, worker);
}

// Dequantizes one row of an embedding that is also the head, or that is stored quantized (never as e2m1).
void embed_quantized(const Op& op, int64_t id, float* y) {
    const QuantizedMatrix& m = *static_cast<const QuantizedMatrix*>(op.weight);
    int64_t panel = id / kPanel, lane = id % kPanel, half = lane / kLanes;
    const uint8_t* codes = m.codes + panel * m.panel_bytes();
    float shared[kLanes], offsets[kLanes] = {};
    int64_t size = m.num_groups == 1 ? m.width : m.group_size;
    for (int64_t group = 0; group < m.num_groups; group++) {
        store(shared, load_shared(m, m.scales, panel, group, static_cast<int>(half)));
        if (m.offsets) store(offsets, load_shared(m, m.offsets, panel, group, static_cast<int>(half)));
        float scale = shared[lane % kLanes], offset = offsets[lane % kLanes];
        for (int64_t k = group * size; k < (group + 1) * size; k++) {
            CodePlace place = code_place(m, lane, k);
            auto stored = static_cast<uint8_t>(codes[place.byte] >> place.shift);
            int code = code_of(m, m.bits == 4 ? stored & 15 : stored);
            y[k] = (scale * static_cast<float>(code) + offset) * op.scale;
        }
    }
}

// Packs codes [rows, width], one byte each, into the panels from `panel` on; missing rows are 0.
extern "C" void quipu_pack_quantized(const int8_t* codes, const QuantizedMatrix* matrix, int64_t panel, int64_t rows) {
    const QuantizedMatrix& m = *matrix;
    int64_t num_panels = (rows + kPanel - 1) / kPanel;
    int zero = stored_code(m, 0);
#pragma omp parallel for
    for (int64_t p = 0; p < num_panels; p++) {
        uint8_t* to = const_cast<uint8_t*>(m.codes) + (panel + p) * m.panel_bytes();
        std::fill_n(to, m.panel_bytes(), static_cast<uint8_t>(m.bits == 8 ? zero : zero * 17));
        for (int64_t lane = 0; lane < kPanel && p * kPanel + lane < rows; lane++) {
            const int8_t* from = codes + (p * kPanel + lane) * m.width;
            for (int64_t k = 0; k < m.width; k++) {
                CodePlace place = code_place(m, lane, k);
                uint8_t code = stored_code(m, from[k]), &at = to[place.byte];
                at = m.bits == 8 ? code : static_cast<uint8_t>((at & (place.shift ? 15 : 240)) | code << place.shift);
            }
        }
    }
}

extern "C" int32_t quipu_panel() { return kPanel; }
