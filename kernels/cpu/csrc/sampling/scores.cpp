// Computes logprobs, ranks and the most likely tokens of rows of logits, as ../../../sampling/logprobs.py does.
//
// A mass has a relative error of some 5e-7 (a float32 difference, and exp), so has their sum, and a logprob has that error
// in addition to its own rounding.
//
// What must always hold: the bits of a row's results depend on that row alone; ids and ranks are the oracle's.
#include "logits.h"

struct Scored {
    int64_t row, target, num_top;
    int64_t first_top;  // start of its most likely tokens among those of all rows
};

namespace {

constexpr int64_t kInvalidLogits = 0;  // in place of a rank

struct Token {
    float logit;
    int64_t id;
    bool operator<(const Token& other) const { return logit > other.logit || (logit == other.logit && id < other.id); }
};

struct Row : Logits {
    double log_mass;
    std::vector<Token> found;

    bool load_logits(const float* logits, int64_t count) {
        if (!scan(logits, count)) return false;
        log_mass = std::log(mass_below(INFINITY, 1));
        return true;
    }
    float logprob(float logit) const {
        return static_cast<float>((static_cast<double>(logit) - static_cast<double>(top)) - log_mass);
    }
    int64_t rank(int64_t target) const {
        float logit = x[target];
        int64_t num_before = 0;
        for (size_t block = 0; block < maxima.size(); block++) {
            if (maxima[block] < logit) continue;
            int64_t first = block * kBlock, last = end(block), middle = std::clamp(target, first, last);
            int32_t count = 0;
            for (int64_t i = first; i < middle; i++) count += x[i] >= logit;
            for (int64_t i = middle; i < last; i++) count += x[i] > logit;
            num_before += count;
        }
        return 1 + num_before;
    }
    // Sorts the first `count` of `found`.
    void find_likeliest(int64_t count) {
        found.clear();
        each_from(reached_by(count), [&](int64_t id) { found.push_back({x[id], id}); });
        std::partial_sort(found.begin(), found.begin() + count, found.end());
    }
};

}  // namespace

// For each of `scored`: a logprob, a rank (0 if the row holds NaN or has no finite maximum), and the num_top most likely.
extern "C" void quipu_score(const float* logits, int64_t stride, int64_t vocab_size, int64_t num_scored, const Scored* scored,
                            float* logprobs, int64_t* ranks, int64_t* top_ids, float* top_logprobs, int64_t num_threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(num_threads)) if (num_scored > 1)
    for (int64_t s = 0; s < num_scored; s++) {
        static thread_local Row row;
        const Scored& one = scored[s];
        if (!row.load_logits(logits + one.row * stride, vocab_size)) {
            ranks[s] = kInvalidLogits;
            continue;
        }
        logprobs[s] = row.logprob(row.x[one.target]);
        ranks[s] = row.rank(one.target);
        if (one.num_top == 0) continue;
        row.find_likeliest(one.num_top);
        for (int64_t i = 0; i < one.num_top; i++) {
            top_ids[one.first_top + i] = row.found[i].id;
            top_logprobs[one.first_top + i] = row.logprob(row.found[i].logit);
        }
    }
}
