// Copies of blocks from another cache, by one thread.
#include <emmintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kLine = 64;

// Writes whole lines to memory without reading them first and without displacing what the processor's caches hold: the
// blocks of a prompt are larger than those. What does not fill an aligned line is copied as usual.
void stream_row(char* to, const char* from, int64_t bytes) {
    int64_t first = -reinterpret_cast<uintptr_t>(to) & (kLine - 1);
    if (first > bytes) first = bytes;
    int64_t last = first + (bytes - first) / kLine * kLine;
    memcpy(to, from, first);
    for (int64_t i = first; i < last; i += kLine)
        for (int64_t part = 0; part < kLine; part += sizeof(__m128i)) {
            __m128i loaded = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + part));
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + i + part), loaded);
        }
    memcpy(to + last, from + last, bytes - last);
}

}  // namespace

// Copies rows that lie these distances apart. All is visible to other threads when it returns.
extern "C" void quipu_copy_rows(
    char* to, const char* from, int64_t num_rows, int64_t row_bytes, int64_t to_stride, int64_t from_stride) {
    for (int64_t row = 0; row < num_rows; row++) stream_row(to + row * to_stride, from + row * from_stride, row_bytes);
    _mm_sfence();  // streamed stores are in no order with others
}
