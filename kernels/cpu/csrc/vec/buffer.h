// Memory that kernels keep between passes. It begins at a cache line: a vector, or a row of a tile, that crosses from one line
// into the next takes two accesses (measured: products with tiles take 1.3 times as long). Larger buffers are in large pages,
// whose lines are spread over all sets of the second-level cache.
#pragma once
#include <sys/mman.h>

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
    T* allocate(std::size_t count) {
        std::size_t bytes = count * sizeof(T);
        if (!is_large(count)) return static_cast<T*>(::operator new(bytes, kLine));
        bytes = (bytes + kPage - 1) / kPage * kPage;
        void* p = ::operator new(bytes, std::align_val_t{kPage});
        madvise(p, bytes, MADV_HUGEPAGE);  // a wish: without it, or if the system has none, pages are small
        return static_cast<T*>(p);
    }
    void deallocate(T* p, std::size_t count) {
        if (is_large(count)) ::operator delete(p, std::align_val_t{kPage});
        else ::operator delete(p, kLine);
    }
    template <class U>
    bool operator==(const LineAllocator<U>&) const { return true; }
    template <class U>
    bool operator!=(const LineAllocator<U>&) const { return false; }

private:
    static constexpr std::size_t kPage = std::size_t{1} << 21;
    static bool is_large(std::size_t count) { return count * sizeof(T) >= kPage / 4; }
};

template <class T>
using Buffer = std::vector<T, LineAllocator<T>>;
