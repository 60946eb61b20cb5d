// The barrier of a team of threads, used several times per layer.
//
// A waiting thread spins for a moment, since all usually arrive together, and then sleeps: beside a busy process the thread
// that it waits for may not be running, and then gets this core. OpenMP's own barrier spins as GOMP_SPINCOUNT says, which
// is read before this code can set it.
#pragma once
#include <atomic>

struct Team {
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> round{0};
    std::atomic<int> sleeping{0};
};
