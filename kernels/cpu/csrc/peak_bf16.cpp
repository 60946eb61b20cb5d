// How fast the processor multiplies without any memory access: the limit that ../../../bench/machine_limits.py compares with.
#include <omp.h>

#include <cstdint>
#include <cstring>

#include "vec/micro.h"
#include "program.h"
#include "vec/vec.h"
#ifdef QUIPU_AMX
#include "vec/tiles.h"
#endif

namespace {

constexpr int kIndependent = 16;  // sums, enough to hide the latency of an addition

// Numbers of about 1 in bfloat16 (as float32 and as bytes they are numbers, too): multiplying zeros would take less power, and
// processors that are limited by it would seem faster than they are.
struct Operands {
    alignas(64) uint16_t words[2][512];
    Operands() {
        uint32_t state = 1;
        for (auto& one : words)
            for (auto& word : one) {
                state = state * 1664525 + 1013904223;
                word = static_cast<uint16_t>(0x3f00 | (state >> 16 & 0x80ff));
            }
    }
};

// Calls multiply(sum) for each of some sums, so many times. The compiler neither knows what they hold nor may drop them.
template <class V, class F>
void repeat(int64_t rounds, F multiply) {
    V sums[kIndependent];
    memset(sums, 0, sizeof sums);
    for (V& sum : sums) asm volatile("" : "+m"(sum));  // or it computes one sum instead of equal ones
    for (int64_t round = 0; round < rounds; round++)
        UNROLL for (int i = 0; i < kIndependent; i++) multiply(sums[i]);
    for (V& sum : sums) asm volatile("" : : "m"(sum));
}

#ifdef QUIPU_AMX
template <class F>
void repeat_tiles(const Operands& operands, int64_t rounds, F multiply) {
    Tiles tiles;
    tiles.configure(2 * Tiles::kRows, 16);
    Tiles::compiler_barrier(&operands);
    _tile_loadd(4, operands.words[0], 64);
    _tile_loadd(5, operands.words[1], 64);
    _tile_loadd(6, operands.words[0], 64);
    _tile_loadd(7, operands.words[1], 64);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t round = 0; round < rounds; round++) multiply();
}
#endif

// Returns the operations of a round of one thread: multiplications and additions. Each runs on all threads.
int64_t multiply_floats(const Operands& operands, int64_t rounds) {
#if defined(QUIPU_AMX)
    repeat_tiles(operands, rounds, [] {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    });
    return 4 * 2 * 16 * 16 * 32;
#elif defined(QUIPU_PAIRS)
    auto a = (__m512bh)_mm512_loadu_si512(operands.words[0]), b = (__m512bh)_mm512_loadu_si512(operands.words[1]);
    repeat<Vec>(rounds, [&](Vec& sum) { sum = _mm512_dpbf16_ps(sum, a, b); });
    return kIndependent * kLanes * 4;
#else
    float numbers[2][kLanes];
    memcpy(numbers, operands.words[0], sizeof numbers);
    Vec a = load(numbers[0]), b = load(numbers[1]);
    repeat<Vec>(rounds, [&](Vec& sum) { sum = accumulate(sum, a, b); });
    return kIndependent * kLanes * 2;
#endif
}

int64_t multiply_bytes([[maybe_unused]] const Operands& operands, [[maybe_unused]] int64_t rounds) {
#if defined(QUIPU_AMX)
    repeat_tiles(operands, rounds, [] {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    });
    return 4 * 2 * 16 * 16 * 64;
#elif defined(QUIPU_VNNI)
    __m512i a = _mm512_loadu_si512(operands.words[0]), b = _mm512_loadu_si512(operands.words[1]);
    repeat<__m512i>(rounds, [&](__m512i& sum) { sum = _mm512_dpbusd_epi32(sum, a, b); });
    return kIndependent * kLanes * 8;
#else
    return 0;
#endif
}

}  // namespace

// Multiplies numbers in registers, in so many rounds on so many threads: bfloat16, or float32 where the instruction set does not
// multiply it; or bytes. Returns the number of operations, or 0 if there is no instruction for it.
extern "C" int64_t quipu_multiply_in_registers(int64_t rounds, int32_t bytes, int64_t num_threads) {
    Operands operands;
    int64_t of_round = 0;
#pragma omp parallel num_threads(num_threads)
    {
        int64_t mine = bytes ? multiply_bytes(operands, rounds) : multiply_floats(operands, rounds);
#pragma omp single
        of_round = mine;
    }
    return of_round * rounds * num_threads;
}
