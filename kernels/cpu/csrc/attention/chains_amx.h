// Sums of bfloat16 products in place, with the bits of a tile (see pairs_amx.h): of each 16 pairs, a chain of fused multiply-adds
// of the even and one of the odd elements, from 0; their sum is added to the total. Included by pairs_in_place.h, within its
// namespace. On processors with tiles these are twice as fast as the instruction for pairs of bfloat16 (measured).
//
// What must always hold: chains are computed in a `ChainMode`, because tiles treat denormals as 0.

constexpr int64_t kValueSlots = 32;  // slots whose values are multiplied at a time: those of a chain

struct Pair {
    Vec even, odd;
};
typedef float Query;

inline Pair key_pair(const bf16* panel, int64_t word) { return {low_halves(panel + word * 2 * kSlots), high_halves(panel + word * 2 * kSlots)}; }
inline Pair key_pair(const int8_t* panel, int64_t word) {
    return {load(panel + 2 * word * kSlots), load(panel + (2 * word + 1) * kSlots)};
}
template <class T>
Pair value_pair(const T* even, const T* odd) { return {load(even), load(odd)}; }
inline Pair same_pair(const float* p) { return {splat(p[0]), splat(p[1])}; }
inline Pair same_pair(const bf16* p) { return {splat(widen(p[0])), splat(widen(p[1]))}; }

struct Chain {
    static constexpr int64_t kPairs = 16;
    static constexpr int kSums = 2;
    Vec even, odd;
    void start(const float*, bool) { even = odd = splat(0); }
    void add(const Pair& left, const Pair& right) {
        even = fma(left.even, right.even, even);
        odd = fma(left.odd, right.odd, odd);
    }
    void finish(float* total, bool fresh) const {
        Vec sum = even + odd;
        store(total, fresh ? sum : load(total) + sum);
    }
};

// Treats denormals as 0, operands and results, as long as it lives.
class ChainMode {
public:
    ChainMode() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlush); }
    ChainMode(const ChainMode&) = delete;
    ChainMode& operator=(const ChainMode&) = delete;
    ~ChainMode() { _mm_setcsr(before_); }

private:
    static constexpr unsigned kFlush = 0x8040;  // DAZ and FTZ
    unsigned before_;
};
