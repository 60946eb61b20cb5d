// A row of logits as sample.cpp and scores.cpp read it. It keeps the maximum of each block of tokens, so that a search for
// large logits can skip most blocks.
//
// What must always hold: the bits of a row's results depend on that row alone.
#pragma once
#include <algorithm>
#include <vector>

#include "../vec/vec.h"

constexpr int64_t kBlock = 64;          // tokens that share a maximum
constexpr int64_t kGroup = 4 * kBlock;  // tokens whose mass is summed in float32, with four sums per lane

struct Logits {
    const float* x;
    int64_t size;
    float top;
    std::vector<float> maxima;  // of each block

    int64_t end(int64_t block) const { return std::min(size, (block + 1) * kBlock); }

    // Returns false for NaN, or if there is no finite maximum.
    bool scan(const float* logits, int64_t count) {
        static_assert(kBlock % kLanes == 0);
        x = logits, size = count;
        maxima.resize((size + kBlock - 1) / kBlock);
        top = -INFINITY;
        uint32_t nan = 0;
        for (size_t block = 0; block < maxima.size(); block++) {
            int64_t first = block * kBlock, last = end(block);
            float most = -INFINITY;
            if (last - first == kBlock) {
                Vec m = load(x + first);
                for (int64_t i = first + kLanes; i < last; i += kLanes) m = larger(m, load(x + i));
                most = max_lanes(m);
            } else {
                for (int64_t i = first; i < last; i++) most = std::max(most, x[i]);
            }
            for (int64_t i = first; i < last; i++) {
                uint32_t bits;
                memcpy(&bits, x + i, 4);
                nan |= (bits & 0x7fffffffu) > 0x7f800000u;
            }
            maxima[block] = most;
            top = std::max(top, most);
        }
        return !nan && std::isfinite(top);
    }
    // Returns a logit that at least this many tokens reach, because as many blocks do; -inf if there are fewer blocks.
    float reached_by(int64_t count) const {
        if (count > static_cast<int64_t>(maxima.size())) return -INFINITY;
        std::vector<float> largest(maxima);
        std::nth_element(largest.begin(), largest.begin() + count - 1, largest.end(), [](float a, float b) { return a > b; });
        return largest[count - 1];
    }
    // Finds all tokens with at least this logit, ids ascending.
    template <class F>
    void each_from(float least, F visit) const {
        for (size_t block = 0; block < maxima.size(); block++) {
            if (maxima[block] < least) continue;
            for (int64_t i = block * kBlock, last = end(block); i < last; i++)
                if (x[i] >= least) visit(i);
        }
    }
    // The mass of tokens below this logit, where that of the most likely token is 1: float32 each, their sum in float64.
    double mass_below(float bound, double temperature) const {
        float inverse = static_cast<float>(1 / temperature), rest[kGroup];
        int64_t whole = size - size % kGroup;
        double total = 0;
        for (int64_t first = 0; first < whole; first += kGroup) total += mass_of_group(x + first, bound, inverse);
        if (whole == size) return total;
        std::fill(std::copy(x + whole, x + size, rest), rest + kGroup, -INFINITY);
        return total + mass_of_group(rest, bound, inverse);
    }

private:
    float mass_of_group(const float* p, float bound, float inverse) const {
        static_assert(kGroup % (4 * kLanes) == 0);
        Vec sums[4] = {splat(0), splat(0), splat(0), splat(0)};
        for (int64_t i = 0; i < kGroup; i += 4 * kLanes)
            for (int v = 0; v < 4; v++) {
                Vec logit = load(p + i + v * kLanes), mass = exp((logit - splat(top)) * splat(inverse));
                sums[v] = sums[v] + (mass - zero_where_below(logit, bound, mass));
            }
        return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
};
