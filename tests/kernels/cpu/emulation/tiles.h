// AMX tiles in plain C: configuration, load, store, TDPBF16PS and TDPBSUD, with what the hardware refuses refused here.
#pragma once
#include <cstdio>
#include <cstdlib>

namespace emulation {

struct Tiles {
    bool configured = false;
    uint8_t rows[8];
    uint16_t bytes_a_row[8];
    uint8_t data[8][16][64];
};
inline thread_local Tiles tiles;

// The hardware raises an exception; here the process ends and says why.
inline void require(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "AMX: %s\n", what);
    abort();
}

inline void load_config(const void* from) {
    const uint8_t* bytes = static_cast<const uint8_t*>(from);
    require(bytes[0] == 1, "palette 1");
    for (int i = 2; i < 16; i++) require(bytes[i] == 0, "reserved bytes are 0");
    for (int tile = 0; tile < 16; tile++) {
        uint16_t bytes_a_row;
        memcpy(&bytes_a_row, bytes + 16 + 2 * tile, 2);
        uint8_t rows = bytes[48 + tile];
        require(rows <= 16 && bytes_a_row <= 64 && (rows == 0) == (bytes_a_row == 0), "a tile is up to 16 rows of 64 bytes");
        require(tile < 8 || rows == 0, "there are eight tiles");
        if (tile == 8) break;
        tiles.rows[tile] = rows;
        tiles.bytes_a_row[tile] = bytes_a_row;
    }
    memset(tiles.data, 0, sizeof tiles.data);
    tiles.configured = true;
}

inline void check(int tile) { require(tiles.configured && tiles.rows[tile], "the tile has no shape"); }

inline void zero(int tile) {
    check(tile);
    memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
}

// Rows and bytes beyond the tile's shape become 0.
inline void load(int tile, const void* base, int64_t stride) {
    zero(tile);
    for (int row = 0; row < tiles.rows[tile]; row++)
        memcpy(tiles.data[tile][row], static_cast<const uint8_t*>(base) + row * stride, tiles.bytes_a_row[tile]);
}

inline void store(int tile, void* base, int64_t stride) {
    check(tile);
    for (int row = 0; row < tiles.rows[tile]; row++)
        memcpy(static_cast<uint8_t*>(base) + row * stride, tiles.data[tile][row], tiles.bytes_a_row[tile]);
}

inline void check_product(int to, int left, int right) {
    check(to), check(left), check(right);
    require(tiles.rows[to] == tiles.rows[left], "sums and left-hand side have the same rows");
    require(tiles.bytes_a_row[to] == tiles.bytes_a_row[right], "sums and right-hand side have the same columns");
    require(tiles.bytes_a_row[left] == 4 * tiles.rows[right], "the left-hand side's words are the right-hand side's rows");
}

// For each sum: the even products of all pairs, the odd ones, both together, and that is added to the sum.
inline void add_products(int to, int left, int right) {
    check_product(to, left, right);
    for (int m = 0; m < tiles.rows[to]; m++) {
        float even[16] = {}, odd[16] = {}, sums[16];
        for (int k = 0; k < tiles.rows[right]; k++) {
            uint16_t a[2], b[32];
            memcpy(a, tiles.data[left][m] + 4 * k, sizeof a);
            memcpy(b, tiles.data[right][k], sizeof b);
            for (int n = 0; n < 16; n++) {
                even[n] = fused(from_bf16(a[0]), from_bf16(b[2 * n]), even[n]);
                odd[n] = fused(from_bf16(a[1]), from_bf16(b[2 * n + 1]), odd[n]);
            }
        }
        memcpy(sums, tiles.data[to][m], sizeof sums);
        for (int n = 0; n < 16; n++) sums[n] = flushed(flushed(sums[n]) + flushed(even[n] + odd[n]));
        memcpy(tiles.data[to][m], sums, tiles.bytes_a_row[to]);
    }
}

// Four signed bytes times four bytes, signed or not, are added to each sum.
template <class T>
void add_byte_products(int to, int left, int right) {
    check_product(to, left, right);
    for (int m = 0; m < tiles.rows[to]; m++) {
        int32_t sums[16];
        memcpy(sums, tiles.data[to][m], sizeof sums);
        for (int k = 0; k < 4 * tiles.rows[right]; k++)
            for (int n = 0; n < 16; n++)
                sums[n] += static_cast<int8_t>(tiles.data[left][m][k]) * static_cast<T>(tiles.data[right][k / 4][4 * n + k % 4]);
        memcpy(tiles.data[to][m], sums, tiles.bytes_a_row[to]);
    }
}

inline void release() { tiles.configured = false; }

}  // namespace emulation

// 1 while the calling thread has tiles that it did not give back.
extern "C" inline __attribute__((used)) int32_t emulated_tiles_held() { return emulation::tiles.configured; }

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#undef _tile_dpbssd
#define _tile_loadconfig(from) emulation::load_config(from)
#define _tile_release() emulation::release()
#define _tile_zero(tile) emulation::zero(tile)
#define _tile_loadd(tile, base, stride) emulation::load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulation::store(tile, base, stride)
#define _tile_dpbf16ps(to, left, right) emulation::add_products(to, left, right)
#define _tile_dpbsud(to, left, right) emulation::add_byte_products<uint8_t>(to, left, right)
#define _tile_dpbssd(to, left, right) emulation::add_byte_products<int8_t>(to, left, right)
