// See team.h.
#include "team.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

#include "program.h"

namespace {

#ifndef SPINS
#define SPINS 2000
#endif
constexpr int kSpins = SPINS;

long futex(std::atomic<int>* at, int operation, int value) {
    return syscall(SYS_futex, reinterpret_cast<int*>(at), operation, value, nullptr, nullptr, 0);
}

}  // namespace

void Worker::wait() const {
    if (num_threads == 1) return;
    int round = team->round.load(std::memory_order_acquire);
    if (team->arrived.fetch_add(1) + 1 == num_threads) {
        team->arrived.store(0);
        team->round.fetch_add(1);
        // a thread registers as sleeping before it checks the round once more
        if (team->sleeping.load() > 0) futex(&team->round, FUTEX_WAKE_PRIVATE, INT_MAX);
        return;
    }
    for (int i = 0; i < kSpins; i++) {
        if (team->round.load(std::memory_order_acquire) != round) return;
        __builtin_ia32_pause();
    }
    team->sleeping.fetch_add(1);
    while (team->round.load() == round) futex(&team->round, FUTEX_WAIT_PRIVATE, round);
    team->sleeping.fetch_sub(1);
}
