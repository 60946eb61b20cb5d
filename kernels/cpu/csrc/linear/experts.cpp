// A mixture of experts: rows are assigned to experts, copied so that those of each expert are adjacent, multiplied by the
// same kernel as all products, and summed.
//
//     route       each token's experts and their weights, from the router's scores
//     dispatch    the rows, sorted by expert
//     expert_linear, expert_silu_mul, expert_linear
//     combine     each token's weighted sum
//
// What must always hold: a token's result does not depend on the other tokens of its experts. A row of linear does not
// depend on the number of rows, and combine sums a token's parts by descending weight.
#include <algorithm>
#include <cmath>
#include <vector>

#include "../vec/buffer.h"
#include "../program.h"
#include "../vec/vec.h"

namespace {

// The memory of op.dispatch. A sorted row is one in the order of experts; choice t of token n is n * T + t.
struct Dispatch {
    int64_t* counters;     // one per expert, each on its own cache line
    int64_t* starts;       // first sorted row of each expert, and the end of the last
    int64_t* sorted_rows;  // the sorted row of each choice
    explicit Dispatch(const Op& op)
        : counters(static_cast<int64_t*>(op.dispatch)), starts(counters + op.num_experts * 8),
          sorted_rows(starts + op.num_experts + 1) {}
    void reset_counters(const Op& op) const { std::fill_n(counters, op.num_experts * 8, 0); }
};

// Sets the ranks of experts to -infinity, but for those of the groups with the best: the largest, or the sum of two.
void leave_groups(const Op& op, float* ranks) {
    int64_t size = op.num_experts / op.num_groups;
    bool sums_two = op.activation == kSigmoidMul;
    static thread_local std::vector<float> best;
    best.resize(op.num_groups);
    for (int64_t g = 0; g < op.num_groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t i = g * size; i < (g + 1) * size; i++) {
            second = std::max(second, std::min(first, ranks[i]));
            first = std::max(first, ranks[i]);
        }
        best[g] = sums_two ? first + second : first;
    }
    static thread_local std::vector<char> chosen;
    chosen.assign(op.num_groups, 0);
    for (int64_t i = 0; i < op.num_chosen_groups; i++) {
        int64_t group = -1;
        for (int64_t g = 0; g < op.num_groups; g++)
            if (!chosen[g] && (group < 0 || best[g] > best[group])) group = g;
        chosen[group] = 1;
    }
    for (int64_t g = 0; g < op.num_groups; g++)
        if (!chosen[g]) std::fill_n(ranks + g * size, size, -INFINITY);
}

// Chooses one expert after the other. The weight of each is its softmax over those left whose scores are close to its own.
void mix_sparsely(const Op& op, const float* scores, float* left, float* weights, float* chosen) {
    for (int64_t t = 0; t < op.num_chosen; t++) {
        int64_t best = std::max_element(left, left + op.num_experts) - left;
        float top = left[best], sum = 0;
        for (int64_t i = 0; i < op.num_experts; i++) {
            bool is_far = top - scores[i] > op.soft_cap * std::max(std::fabs(scores[i]), top);
            if (!is_far) sum += std::exp(left[i] - top);
        }
        left[best] = -INFINITY;
        chosen[t] = static_cast<float>(best);
        weights[t] = op.scale / sum;
    }
}

}  // namespace

// y: T weights, then T indexes of experts. Ties go to the lower index.
void route(const Op& op, const Pass& pass, const Worker& worker) {
    int64_t num_experts = op.num_experts, padded = (num_experts + kLanes - 1) / kLanes * kLanes;
    bool is_sigmoid = op.activation == kSigmoidMul;
    static thread_local Buffer<float> left, power;
    left.resize(padded);
    power.resize(padded);
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++) {
        const float* scores = op.x + s.begin * op.x_stride;
        float* weights = op.y + s.begin * op.y_stride;
        float* chosen = weights + op.num_chosen;
        std::copy_n(scores, num_experts, left.begin());
        std::fill(left.begin() + num_experts, left.end(), -INFINITY);
        if (op.soft_cap > 0) {
            mix_sparsely(op, scores, left.data(), weights, chosen);
            continue;
        }
        float top = is_sigmoid ? 0 : *std::max_element(scores, scores + num_experts);
        Vec total = splat(0);
        for (int64_t i = 0; i < padded; i += kLanes) {
            Vec s = load(left.data() + i), p = is_sigmoid ? splat(1) / (splat(1) + exp(splat(0) - s)) : exp(s - splat(top));
            store(power.data() + i, p);
            total = total + p;
        }
        for (int64_t i = 0; is_sigmoid && !op.by_score && i < num_experts; i++) left[i] = power[i] + (op.bias ? op.bias[i] : 0);
        if (op.num_groups > 1) leave_groups(op, left.data());
        float sum = op.normalise ? 0 : is_sigmoid ? 1 : sum_lanes(total);
        for (int64_t t = 0; t < op.num_chosen; t++) {
            int64_t best = std::max_element(left.begin(), left.begin() + num_experts) - left.begin();
            left[best] = -INFINITY;
            chosen[t] = static_cast<float>(best);
            weights[t] = power[best];
            if (op.normalise) sum += power[best];
        }
        for (int64_t t = 0; t < op.num_chosen; t++) weights[t] = weights[t] / sum * op.scale;
        for (int64_t t = 0; op.norm && t < op.num_chosen; t++) weights[t] *= op.norm[static_cast<int64_t>(chosen[t])];
    }
}

// x: rows; z: the result of route; y: the sorted rows.
void dispatch(const Op& op, const Pass& pass, const Worker& worker) {
    int64_t n = num_rows(op, pass), chosen = op.num_chosen;
    Dispatch shared(op);
    auto expert = [&](int64_t choice) {
        return static_cast<int64_t>(op.z[choice / chosen * op.z_stride + chosen + choice % chosen]);
    };
    // each thread counts by itself: that is cheaper than a barrier
    static thread_local std::vector<int64_t> next, sorted_rows;
    next.assign(op.num_experts + 1, 0);
    sorted_rows.resize(std::max<size_t>(sorted_rows.size(), n * chosen));
    for (int64_t choice = 0; choice < n * chosen; choice++) next[expert(choice) + 1]++;
    for (int64_t e = 0; e < op.num_experts; e++) next[e + 1] += next[e];
    if (worker.thread == 0) {
        shared.reset_counters(op);
        std::copy(next.begin(), next.end(), shared.starts);
    }
    for (int64_t choice = 0; choice < n * chosen; choice++) sorted_rows[choice] = next[expert(choice)]++;
    for (Share s(n * chosen, worker); s.begin < s.end; s.begin++) {
        shared.sorted_rows[s.begin] = sorted_rows[s.begin];
        const float* x = op.x + s.begin / chosen * op.x_stride;
        float* y = op.y + sorted_rows[s.begin] * op.width;
        memcpy(y, x, op.width * sizeof(float));
        if (op.activation != kMul) continue;
        float weight = op.z[s.begin / chosen * op.z_stride + s.begin % chosen];
        for (int64_t i = 0; i < op.width; i++) y[i] *= weight;
    }
}

// Multiplies the sorted rows of x with the matrices of their experts.
void expert_linear(const Op& op, const Pass& pass, const Worker& worker) {
    Dispatch shared(op);
    Op one = op;
    Pass its = pass;
    Worker own = worker;
    one.on_logits_rows = 0;
    one.x_stride = op.width;
    one.y_stride = op.out_width;
    for (int64_t e = 0; e < op.num_experts; e++) {
        its.num_tokens = shared.starts[e + 1] - shared.starts[e];
        if (its.num_tokens == 0) continue;
        one.weight = op.matrices[e];
        if (op.bias) one.bias = op.bias + e * op.out_width;
        one.x = op.x + shared.starts[e] * op.width;
        one.y = op.y + shared.starts[e] * op.out_width;
        own.counter = shared.counters + e * 8;
        linear(one, its, own);
        if (its.num_tokens <= kOwnRows) continue;
#pragma omp barrier
    }
}

// Also resets the counters for the second product; no thread is in a product at this time.
void expert_silu_mul(const Op& op, const Pass& pass, const Worker& worker) {
    if (worker.thread == 0) Dispatch(op).reset_counters(op);
    Op one = op;
    Pass all = pass;
    all.num_tokens = num_rows(op, pass) * op.num_chosen;
    one.on_logits_rows = 0;
    one.x_stride = 2 * op.width;
    one.y_stride = op.width;
    if (op.soft_cap > 0) clamped_swiglu(one, all, worker);
    else if (op.activation == kGeluMul) gelu_mul(one, all, worker);
    else silu_mul(one, all, worker);
}

// x: the result of route; z: the experts' sorted rows.
void combine(const Op& op, const Pass& pass, const Worker& worker) {
    Dispatch shared(op);
    for (Share s(num_rows(op, pass), worker); s.begin < s.end; s.begin++) {
        const float* weights = op.x + s.begin * op.x_stride;
        float* y = op.y + s.begin * op.y_stride;
        for (int64_t t = 0; t < op.num_chosen; t++) {
            const float* z = op.z + shared.sorted_rows[s.begin * op.num_chosen + t] * op.width;
            float weight = op.activation == kMul ? 1 : weights[t];
            if (t == 0)
                for (int64_t i = 0; i < op.width; i++) y[i] = weight * z[i];
            else
                for (int64_t i = 0; i < op.width; i++) y[i] = y[i] + weight * z[i];
        }
    }
}
