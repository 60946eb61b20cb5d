// Runs a program, one operation after the other, on a team of threads. Called from Python by ctypes, which releases the GIL
// during a call.
#include <omp.h>
#include <sys/mman.h>

#include <vector>

#include "program.h"
#include "attention/shared_prefixes.h"
#include "team.h"

// Requests large pages for memory that has not been written yet: scattered accesses then need fewer page walks.
extern "C" void quipu_large_pages(void* start, int64_t bytes) {
    constexpr uintptr_t kPage = 1 << 21;
    uintptr_t first = (reinterpret_cast<uintptr_t>(start) + kPage - 1) / kPage * kPage;
    uintptr_t last = (reinterpret_cast<uintptr_t>(start) + bytes) / kPage * kPage;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

// Touches each page of memory, without changing it: the system commits pages at their first use. No other thread may write it.
extern "C" void quipu_touch(void* start, int64_t bytes) {
    constexpr int64_t kPage = 4096;
    volatile char* p = static_cast<volatile char*>(start);
    for (int64_t i = 0; i < bytes; i += kPage) p[i] = p[i];
}

extern "C" void quipu_run(const Op* ops, int64_t num_ops, const Pass* pass) {
    using Kernel = void (*)(const Op&, const Pass&, const Worker&);
    static const Kernel kernels[] = {
        embed, gather, linear, rms_norm, rope, write_kv, attend, silu_mul, add,
        gelu_mul, soft_cap, route, dispatch, expert_linear, expert_silu_mul, combine, low_rank, sigmoid_mul,
        norm_latent, head_linear, layer_norm, gelu, mul, sparse_gelu_mul, match_copies, mix_copies,
    };
    constexpr int64_t kStride = Worker::kCounterStride * Worker::kCounters;
    std::vector<int64_t> counters(num_ops * kStride);
    Team team;
    SharedPrefixes shared;
    shared.find(*pass);
    if (shared.any()) shared.make_room(ops, num_ops);
#pragma omp parallel num_threads(static_cast<int>(pass->num_threads))
    {
        int thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
        for (int64_t i = 0; i < num_ops; i++) {
            Worker worker{thread, num_threads, &counters[i * kStride], &team, &shared};
            kernels[ops[i].kind](ops[i], *pass, worker);
            if (!ops[i].no_barrier) worker.wait();
        }
    }
}
