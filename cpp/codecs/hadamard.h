// Randomized Hadamard transform, for the ISA variant that the including file is compiled for.
// qsync_fx/_C.pyi specifies it.
//
// Invariant: as in quantizer/kernels.cpp, identical bits in every ISA variant and no inline
// function with external linkage. Additions run in the order of the butterfly stages.
#pragma once

#include "codecs/bytes.h"
#include "lanes/lanes.h"
#include "random.h"

namespace qsync {
namespace {

// Vectors and values of the first stages, which run in registers. A block has at least as many.
constexpr size_t VECTORS = 8, TILE = VECTORS * LANES;

constexpr size_t SIGNS_PER_WORD = 32;

// Negate the lanes whose random bit is set. `counter` belongs to the first word of the tile.
inline void negate(F (&tile)[VECTORS], uint32_t counter) {
    for (size_t k = 0; k < VECTORS; ++k) {
        const uint32_t word = mix(counter + WEYL * static_cast<uint32_t>(k / 2));
        const uint32_t which = k % 2 == 0 ? word & 0xFFFFu : word >> 16;
        const F negated = as_float(bits(tile[k]) ^ all(static_cast<int32_t>(0x80000000u)));
        tile[k] = chosen(which, negated, tile[k]);
    }
}

inline uint32_t sign_counter(uint32_t counter, size_t index) {
    return counter + WEYL * static_cast<uint32_t>(index / SIGNS_PER_WORD);
}

inline void butterfly(F &a, F &b) {
    const F sum = a + b;
    b = a - b;
    a = sum;
}

// Run the stage that combines vectors at a distance of H vectors.
template <size_t H> inline void across(F (&tile)[VECTORS]) {
    for (size_t k = 0; k < VECTORS; ++k)
        if ((k & H) == 0) butterfly(tile[k], tile[k + H]);
}
template <int H> inline void within(F (&tile)[VECTORS]) {
    for (F &vector : tile) vector = butterfly<H>(vector);
}

// Run the stages of strides `stride` and 2 * stride, or of the first only if there is no other, on
// a block in the L1 cache.
template <bool BACK> void far_stages(float *block, size_t size, size_t stride) {
    const bool both = 4 * stride <= size;
    const size_t step = both ? 4 * stride : 2 * stride;
    for (size_t begin = 0; begin < size; begin += step) {
        for (size_t i = begin; i < begin + stride; i += LANES) {
            F a = load(block + i), b = load(block + i + stride);
            if (!both) {
                butterfly(a, b);
            } else {
                F c = load(block + i + 2 * stride), d = load(block + i + 3 * stride);
                if (BACK) butterfly(a, c), butterfly(b, d);
                butterfly(a, b), butterfly(c, d);
                if (!BACK) butterfly(a, c), butterfly(b, d);
                store(block + i + 2 * stride, c);
                store(block + i + 3 * stride, d);
            }
            store(block + i, a);
            store(block + i + stride, b);
        }
    }
}

void rotate(const float *x, size_t n, size_t block, uint32_t signs, float *y) {
    for (size_t begin = 0; begin < n; begin += block) {
        for (size_t at = begin; at < begin + block; at += TILE) {
            F tile[VECTORS];
            for (size_t k = 0; k < VECTORS; ++k) {
                const size_t i = at + k * LANES;
                ask_ahead(x + i, LANES * sizeof(float));
                tile[k] = i < n ? load_some(x + i, n - i) : all(0.0f);
            }
            negate(tile, sign_counter(signs, at));
            within<1>(tile), within<2>(tile), within<4>(tile), within<8>(tile);
            across<1>(tile), across<2>(tile), across<4>(tile);
            for (size_t k = 0; k < VECTORS; ++k) store(y + at + k * LANES, tile[k]);
        }
        for (size_t stride = TILE; stride < block; stride *= 4)
            far_stages<false>(y + begin, block, stride);
    }
}

void rotate_back(float *y, size_t n, size_t block, uint32_t signs, float *x, bool add) {
    const F share = all(1.0f / static_cast<float>(block));
    size_t last = TILE;
    while (4 * last < block) last *= 4;
    for (size_t begin = 0; begin < n; begin += block) {
        for (size_t stride = last; TILE < block && stride >= TILE; stride /= 4)
            far_stages<true>(y + begin, block, stride);
        for (size_t at = begin; at < begin + block && at < n; at += TILE) {
            F tile[VECTORS];
            for (size_t k = 0; k < VECTORS; ++k) tile[k] = load(y + at + k * LANES);
            across<4>(tile), across<2>(tile), across<1>(tile);
            within<8>(tile), within<4>(tile), within<2>(tile), within<1>(tile);
            negate(tile, sign_counter(signs, at));
            for (size_t k = 0; k < VECTORS && at + k * LANES < n; ++k) {
                const size_t i = at + k * LANES;
                const F value = tile[k] * share;
                ask_ahead(x + i, LANES * sizeof(float));
                store_some(x + i, add ? load_some(x + i, n - i) + value : value, n - i);
            }
        }
    }
}

} // namespace
} // namespace qsync
