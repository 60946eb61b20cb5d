// Threads that wait for each other several times a layer.
//
// A thread that waits spins for a moment, since all usually arrive together, and then sleeps: beside a busy neighbour the
// one it waits for may not be running, and gets this core then. OpenMP's own waiting spins as GOMP_SPINCOUNT says, which
// is read before anybody here can set it.
#pragma once
#include <atomic>

struct Team {
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> round{0};
    std::atomic<int> sleeping{0};
};
