// Vectors of INT8 packed for instructions that sum four products at a time (AVX512-VNNI, AMX): four consecutive values of a vector lie
// together, and those of WIDTH vectors side by side. Included by the sources of the paths that have such instructions.
#pragma once

#include "gemm/gemm.h"

#include <cstring>
#include <immintrin.h>

namespace qsync {
namespace {

constexpr std::size_t QUAD = 4, LANES = 16, CHUNK = 64;

// Turns 16 by 16 numbers of 32 bits: number j of vector i becomes number i of vector j.
inline void turn(__m512i (&x)[LANES]) {
    __m512i t[LANES], u[LANES];
    for (std::size_t i = 0; i < LANES; i += 2) {
        t[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (std::size_t i = 0; i < LANES; i += 4) {
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (std::size_t i = 0; i < 4; ++i) {
        const __m512i a = _mm512_shuffle_i32x4(u[i], u[4 + i], 0x88), b = _mm512_shuffle_i32x4(u[i], u[4 + i], 0xDD);
        const __m512i c = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0x88), d = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0xDD);
        x[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        x[8 + i] = _mm512_shuffle_i32x4(a, c, 0xDD);
        x[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
        x[12 + i] = _mm512_shuffle_i32x4(b, d, 0xDD);
    }
}

// Loads 64 values, from the k-th on, of `count` vectors that are contiguous; zeros where a vector, or its end, is none.
inline void load(const Vectors &vectors, std::size_t first, std::size_t count, std::size_t k, __m512i (&x)[LANES]) {
    const std::size_t left = vectors.length - k;
    const std::int8_t *from = vectors.at + static_cast<std::ptrdiff_t>(first) * vectors.apart + static_cast<std::ptrdiff_t>(k) * vectors.along;
    if (vectors.along == 1 && left >= CHUNK) {
        for (std::size_t i = 0; i < count; ++i, from += vectors.apart) x[i] = _mm512_loadu_si512(from);
    } else {
        const std::size_t size = left < CHUNK ? left : CHUNK;
        for (std::size_t i = 0; i < count; ++i, from += vectors.apart) {
            alignas(CHUNK) std::int8_t line[CHUNK] = {};
            if (vectors.along == 1)
                std::memcpy(line, from, size);
            else
                for (std::size_t j = 0; j < size; ++j) line[j] = from[static_cast<std::ptrdiff_t>(j) * vectors.along];
            x[i] = _mm512_load_si512(line);
        }
    }
    for (std::size_t i = count; i < LANES; ++i) x[i] = _mm512_setzero_si512();
}

// The vectors are contiguous, or lie anyhow.
template <std::size_t WIDTH> void pack_along(const Vectors &vectors, __m512i flip, std::int8_t *to) {
    const std::size_t quads = (vectors.length + QUAD - 1) / QUAD;
    for (std::size_t first = 0; first < WIDTH; first += LANES) {
        const std::size_t have = vectors.count > first ? vectors.count - first : 0, lanes = WIDTH - first < LANES ? WIDTH - first : LANES;
        const std::size_t count = have < lanes ? have : lanes;
        const auto kept = static_cast<__mmask16>((1u << lanes) - 1u);
        for (std::size_t k = 0; k < vectors.length; k += CHUNK) {
            __m512i x[LANES];
            load(vectors, first, count, k, x);
            turn(x);
            const std::size_t quad = k / QUAD, some = quads - quad < LANES ? quads - quad : LANES;
            std::int8_t *out = to + (quad * WIDTH + first) * QUAD;
            for (std::size_t i = 0; i < some; ++i, out += WIDTH * QUAD)
                _mm512_mask_storeu_epi32(out, kept, _mm512_xor_si512(x[i], flip));
        }
    }
}

// The vectors lie side by side: value k of all of them, then value k + 1.
template <std::size_t WIDTH> void pack_across(const Vectors &vectors, __m512i flip, std::int8_t *to) {
    const std::size_t quads = (vectors.length + QUAD - 1) / QUAD;
    const __m128i flipped = _mm512_castsi512_si128(flip);
    for (std::size_t quad = 0; quad < quads; ++quad, to += WIDTH * QUAD) {
        const std::int8_t *from = vectors.at + static_cast<std::ptrdiff_t>(QUAD * quad) * vectors.along;
        const std::size_t left = vectors.length - QUAD * quad;
        std::ptrdiff_t step = vectors.along;
        // Sixteen at a time are loaded, and there may be no memory behind the last.
        constexpr std::size_t READ = (WIDTH + LANES - 1) / LANES * LANES;
        alignas(64) std::int8_t some[QUAD][READ];
        if (vectors.count < READ || left < QUAD) {
            std::memset(some, 0, sizeof some);
            for (std::size_t i = 0; i < QUAD && i < left; ++i)
                std::memcpy(some[i], from + static_cast<std::ptrdiff_t>(i) * step, vectors.count < WIDTH ? vectors.count : WIDTH);
            from = some[0];
            step = READ;
        }
        for (std::size_t first = 0; first < WIDTH; first += LANES) {
            __m128i x[QUAD];
            for (std::size_t i = 0; i < QUAD; ++i)
                x[i] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + static_cast<std::ptrdiff_t>(i) * step + first));
            const __m128i low = _mm_unpacklo_epi8(x[0], x[1]), high = _mm_unpackhi_epi8(x[0], x[1]);
            const __m128i low2 = _mm_unpacklo_epi8(x[2], x[3]), high2 = _mm_unpackhi_epi8(x[2], x[3]);
            const __m128i parts[QUAD] = {_mm_unpacklo_epi16(low, low2), _mm_unpackhi_epi16(low, low2), _mm_unpacklo_epi16(high, high2),
                                         _mm_unpackhi_epi16(high, high2)};
            for (std::size_t i = 0; i < QUAD && first + QUAD * i < WIDTH; ++i)
                _mm_storeu_si128(reinterpret_cast<__m128i *>(to + (first + QUAD * i) * QUAD), _mm_xor_si128(parts[i], flipped));
        }
    }
}

// Packs vectors with every byte's bits of `flip` turned over; WIDTH is a multiple of four.
template <std::size_t WIDTH> void pack_quads(const Vectors &vectors, __m512i flip, void *packed) {
    auto *to = static_cast<std::int8_t *>(packed);
    if (vectors.apart == 1 && vectors.along != 1)
        pack_across<WIDTH>(vectors, flip, to);
    else
        pack_along<WIDTH>(vectors, flip, to);
}

} // namespace
} // namespace qsync
