// Sums of bfloat16 products in place with AVX-512 BF16: one chain. Included by pairs_in_place.h, within its namespace.

constexpr int64_t kValueSlots = kSlots;  // slots whose values are multiplied at a time

typedef __m512i Pair;  // of bfloat16, in each lane
typedef bf16 Query;

inline Pair key_pair(const bf16* panel, int64_t word) { return _mm512_loadu_si512(panel + word * 2 * kSlots); }
inline Pair key_pair(const int8_t* panel, int64_t word) {
    return interleaved(panel + 2 * word * kSlots, panel + (2 * word + 1) * kSlots);
}
template <class T>
Pair value_pair(const T* even, const T* odd) { return interleaved(even, odd); }
inline Pair same_pair(const bf16* p) {
    int32_t word;
    memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}

struct Chain {
    static constexpr int64_t kPairs = INT64_MAX / 2;  // that are one chain
    static constexpr int kSums = 1;
    Vec sum;
    void start(const float* total, bool fresh) { sum = fresh ? splat(0) : load(total); }
    void add(Pair left, Pair right) { sum = _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right); }
    void finish(float* total, bool) const { store(total, sum); }
};

struct ChainMode {};  // the instruction has a mode of its own
