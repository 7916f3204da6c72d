// Unchanged cpp/gemm/paths/amx.cpp with tile instructions emulated in C++ (Intel's manual,
// LDTILECFG to TDPBSSD). Exceptions of the processor end the process: use of unconfigured tiles, or
// another configuration than 16 rows of 64 bytes.

#include <immintrin.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {
namespace {

constexpr int TILES = 8, ROWS = 16, BYTES = 64;

std::uint8_t tiles[TILES][ROWS][BYTES];
bool configured = false;

std::uint8_t (&tile(int which))[ROWS][BYTES] {
    if (!configured) {
        std::puts("a tile is used that is not configured");
        std::exit(3);
    }
    return tiles[which];
}

void configure(const void *shapes) {
    std::array<std::uint8_t, 64> given;
    std::memcpy(given.data(), shapes, given.size());
    bool whole = given[0] == 1;
    for (int i = 0; i < TILES; ++i) whole = whole && given[16 + 2 * i] == BYTES && given[17 + 2 * i] == 0 && given[48 + i] == ROWS;
    if (!whole) {
        std::puts("tiles are not configured as 16 rows of 64 bytes");
        std::exit(3);
    }
    std::memset(tiles, 0, sizeof tiles);
    configured = true;
}

void release() { configured = false; }

void zero(int which) { std::memset(tile(which), 0, sizeof tiles[0]); }

void load(int which, const void *from, std::size_t stride) {
    for (int i = 0; i < ROWS; ++i) std::memcpy(tile(which)[i], static_cast<const char *>(from) + i * stride, BYTES);
}

void store(int which, void *to, std::size_t stride) {
    for (int i = 0; i < ROWS; ++i) std::memcpy(static_cast<char *>(to) + i * stride, tile(which)[i], BYTES);
}

// Signed bytes, four products per 32-bit sum, which wraps around.
void multiply_add(int sums, int first, int second) {
    for (int m = 0; m < ROWS; ++m) {
        for (int n = 0; n < BYTES / 4; ++n) {
            std::uint32_t sum;
            std::memcpy(&sum, &tile(sums)[m][4 * n], sizeof sum);
            for (int k = 0; k < BYTES; ++k) {
                const auto a = static_cast<std::int8_t>(tile(first)[m][k]), b = static_cast<std::int8_t>(tile(second)[k / 4][4 * n + k % 4]);
                sum += static_cast<std::uint32_t>(a * b);
            }
            std::memcpy(&tile(sums)[m][4 * n], &sum, sizeof sum);
        }
    }
}

// BF16 value; denormals count as zero, in operands and sums.
float value(const std::uint8_t *at) {
    std::uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    const std::uint32_t wide = static_cast<std::uint32_t>((bits & 0x7F80u) != 0 ? bits : bits & 0x8000u) << 16;
    float found;
    std::memcpy(&found, &wide, sizeof found);
    return found;
}

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

// BF16 products: even and odd ones in separate sums, each rounded once; then both and the
// accumulator are added.
void multiply_add_bf16(int sums, int first, int second) {
    for (int m = 0; m < ROWS; ++m) {
        for (int n = 0; n < BYTES / 4; ++n) {
            float parts[2] = {0.0f, 0.0f}, sum;
            for (int k = 0; k < BYTES / 2; ++k) {
                const float a = value(&tile(first)[m][2 * k]), b = value(&tile(second)[k / 2][4 * n + 2 * (k % 2)]);
                parts[k % 2] = flushed(std::fma(a, b, parts[k % 2]));
            }
            std::memcpy(&sum, &tile(sums)[m][4 * n], sizeof sum);
            sum = flushed(flushed(sum) + flushed(parts[0] + parts[1]));
            std::memcpy(&tile(sums)[m][4 * n], &sum, sizeof sum);
        }
    }
}

} // namespace
} // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::configure
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbssd emulated::multiply_add
#define _tile_dpbf16ps emulated::multiply_add_bf16

#include "gemm/paths/amx.cpp"
