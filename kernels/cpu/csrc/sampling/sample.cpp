// Draws tokens from rows of logits: exactly those of ../../../sampling/oracle.py, which documents the settings.
//
// The oracle computes in float64 over a sorted vocabulary. Here few tokens are visited more than once: those whose scores
// are large enough to matter are gathered, sorted as far as needed and weighted in float64; the mass of all others is summed
// in float32. Every sum has a bound on its difference from the oracle's (another order, another exp), and a decision is made
// only if it is the same on both sides of that bound. Otherwise (an exact tie of masses, one draw in some millions), the row
// is left to the oracle.
//
// What must always hold: a drawn token is the oracle's, whatever the other rows and the number of threads.
#include <limits>

#include "logits.h"

struct Draw {
    double temperature, top_p, log_min_p;
    int64_t top_k;
    uint64_t seed, position;
};

namespace {

constexpr int64_t kUndecided = -1;      // the oracle must draw
constexpr int64_t kInvalidLogits = -2;  // the oracle reports what is wrong
constexpr double kDouble = 1e-10;       // error bound of float64 sums of at most 2^18 terms within two ulp: more than 2^18 x 2^-52
constexpr double kFloat = 1e-5;         // the same for float32: three roundings of a score down to -40, and sums of 8 terms per lane

// Philox4x32-10 (Salmon et al., SC 2011), as in ../../../sampling/philox.py.
double uniform(uint64_t seed, uint64_t position) {
    uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(position >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
        uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
        c1 = static_cast<uint32_t>(b), c3 = static_cast<uint32_t>(a), c0 = n0, c2 = n2;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return static_cast<double>((uint64_t{c1} << 32 | c0) >> 11) * 0x1p-53;
}

struct Candidate {
    double score, mass;
    int64_t id;
    bool operator<(const Candidate& other) const { return score > other.score || (score == other.score && id < other.id); }
};

struct Row : Logits {
    std::vector<Candidate> found;
    int64_t sorted;

    int64_t best() const {
        for (size_t block = 0;; block++)
            if (maxima[block] == top)
                for (int64_t i = block * kBlock;; i++)
                    if (x[i] == top) return i;
    }
    double score(float logit, const Draw& d) const {
        return (static_cast<double>(logit) - static_cast<double>(top)) / d.temperature;
    }
    // Gathers all tokens with at least this logit that pass min_p.
    void gather(float least, const Draw& d) {
        found.clear();
        sorted = 0;
        each_from(least, [&](int64_t i) {
            double s = score(x[i], d);
            if (s >= d.log_min_p) found.push_back({s, std::exp(s), i});
        });
    }
    // Sorts the first count + 1.
    const Candidate& at(int64_t count) {
        while (count >= sorted) {
            int64_t more = std::min<int64_t>(found.size(), std::max<int64_t>(64, 4 * sorted));
            if (more < static_cast<int64_t>(found.size())) std::nth_element(found.begin() + sorted, found.begin() + more, found.end());
            std::sort(found.begin() + sorted, found.begin() + more);
            sorted = more;
        }
        return found[count];
    }
};

enum class Outcome { kDrawn, kNeedsMore, kUncertain };

// Draws among row.found; all other tokens have lower scores and this mass in total, with an error of at most `off`.
Outcome draw_among(Row& row, const Draw& d, double u, double rest, double off, int64_t* id) {
    int64_t count = row.found.size();
    double total = rest, margin;
    for (const Candidate& c : row.found) total += c.mass;
    margin = off + kDouble * total;
    if (d.top_p < 1) {
        double limit = d.top_p * total, mass = 0;
        int64_t kept = 0;
        for (; kept < count; kept++) {
            if (kept > 0 && std::abs(mass - limit) <= 2 * margin) return Outcome::kUncertain;
            if (kept > 0 && mass >= limit) break;
            mass += row.at(kept).mass;
        }
        if (kept == count && rest > 0 && mass <= limit + 2 * margin) return Outcome::kNeedsMore;
        count = kept;
        total = mass;
        margin = kDouble * total;
        rest = 0;
    }
    double target = u * total, mass = 0;
    for (int64_t i = 0; i < count; i++) {
        mass += row.at(i).mass;
        if (std::abs(mass - target) <= 2 * margin) return Outcome::kUncertain;
        if (mass > target) {
            *id = row.at(i).id;
            return Outcome::kDrawn;
        }
    }
    return rest > 0 ? Outcome::kNeedsMore : Outcome::kUncertain;
}

int64_t draw(Row& row, const Draw& d) {
    if (d.temperature == 0) return row.best();
    // where the error bounds do not hold, or different logits could have equal scores
    if (!(d.temperature >= 1e-3 && d.temperature <= 1e3) || std::abs(row.top) > 1e4f) return kUndecided;
    double u = uniform(d.seed, d.position);
    int64_t id = kUndecided;
    if (d.top_k > 0 && d.top_k < row.size) {
        int64_t k = d.top_k;
        float least = std::max(row.reached_by(k), std::numeric_limits<float>::lowest());
        row.gather(least, d);
        if (static_cast<int64_t>(row.found.size()) >= k) {
            double border = row.at(k - 1).score;
            if (row.score(std::nextafter(least, -INFINITY), d) >= border) return kUndecided;
            row.found.resize(k);
            row.sorted = std::min(row.sorted, k);
        }
        return draw_among(row, d, u, 0, 0, &id) == Outcome::kDrawn ? id : kUndecided;
    }
    for (double window : {6.0, 12.0, 20.0, 40.0, 1e9}) {
        double bound = static_cast<double>(row.top) - window * d.temperature;
        float least = bound < -1e30 ? std::numeric_limits<float>::lowest() : static_cast<float>(bound);
        if (window < 12 && d.top_p < 1) continue;  // the threshold of top_p is rarely so near
        bool all = window > 1e8 || row.score(least, d) < d.log_min_p;
        if (!all && std::isfinite(d.log_min_p)) continue;  // min_p cuts within the rest
        row.gather(least, d);
        double rest = all ? 0 : row.mass_below(least, d.temperature);
        Outcome outcome = draw_among(row, d, u, rest, kFloat * rest, &id);
        if (outcome == Outcome::kDrawn) return id;
        if (outcome == Outcome::kUncertain && all) return kUndecided;
    }
    return kUndecided;
}

int64_t draw_row(const float* logits, int64_t vocab_size, const Draw& d) {
    static thread_local Row row;
    return row.scan(logits, vocab_size) ? draw(row, d) : kInvalidLogits;
}

// Widens a row into memory that the next one of this thread overwrites: it is still in the cache when it is read.
const float* widened(const bf16* logits, int64_t count) {
    static thread_local std::vector<float> row;
    row.resize(count);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(row.data() + i, load(logits + i));
    for (; i < count; i++) row[i] = widen(logits[i]);
    return row.data();
}

}  // namespace

// Draws one token for each row, or stores one of the two negative codes.
extern "C" void quipu_sample(const float* logits, int64_t stride, int64_t vocab_size, int64_t num_rows, const Draw* draws, int64_t* ids,
                             int64_t num_threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(num_threads)) if (num_rows > 1)
    for (int64_t r = 0; r < num_rows; r++) ids[r] = draw_row(logits + r * stride, vocab_size, draws[r]);
}

// The same from logits in bfloat16, of which those in row places[r] are for draw r.
extern "C" void quipu_sample_bf16(const bf16* logits, int64_t stride, int64_t vocab_size, const int64_t* places, int64_t num_rows,
                                  const Draw* draws, int64_t* ids, int64_t num_threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(num_threads)) if (num_rows > 1)
    for (int64_t r = 0; r < num_rows; r++) ids[r] = draw_row(widened(logits + places[r] * stride, vocab_size), vocab_size, draws[r]);
}
