// Operand packing for instructions that multiply 32-bit words of several values (AVX512-VNNI,
// AVX512-BF16, AMX). A word contains four consecutive INT8 or two consecutive BF16 values of a
// vector; the packed layout is [word][vector]. Only the sources of these ISA variants include this
// file.
#pragma once

#include "gemm/paths/finish.h"

#include <cstring>
#include <immintrin.h>

namespace qsync {
namespace {

// Bytes per word, words per register, bytes per register.
constexpr std::size_t WORD = 4, LANES = 16, CHUNK = 64;
template <class T> constexpr std::size_t A_WORD = WORD / sizeof(T);
template <class T> constexpr std::size_t A_CHUNK = CHUNK / sizeof(T);

// Transpose a 16 x 16 matrix of 32-bit numbers.
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

// Load one register of values from index k on for each of `count` vectors. Missing vectors and
// values past the end are zeros.
template <class T> void load(const Vectors<T> &vectors, std::size_t first, std::size_t count, std::size_t k, __m512i (&x)[LANES]) {
    const std::size_t left = vectors.length - k;
    const T *from = vectors.at + static_cast<std::ptrdiff_t>(first) * vectors.apart + static_cast<std::ptrdiff_t>(k) * vectors.along;
    if (vectors.along == 1 && left >= A_CHUNK<T>) {
        for (std::size_t i = 0; i < count; ++i, from += vectors.apart) x[i] = _mm512_loadu_si512(from);
    } else {
        const std::size_t size = left < A_CHUNK<T> ? left : A_CHUNK<T>;
        for (std::size_t i = 0; i < count; ++i, from += vectors.apart) {
            alignas(CHUNK) T line[A_CHUNK<T>] = {};
            if (vectors.along == 1)
                std::memcpy(line, from, size * sizeof(T));
            else
                for (std::size_t j = 0; j < size; ++j) line[j] = from[static_cast<std::ptrdiff_t>(j) * vectors.along];
            x[i] = _mm512_load_si512(line);
        }
    }
    for (std::size_t i = count; i < LANES; ++i) x[i] = _mm512_setzero_si512();
}

// Return the number of words per vector.
template <class T> std::size_t words(const Vectors<T> &vectors) { return (vectors.length + A_WORD<T> - 1) / A_WORD<T>; }

// Pack vectors with contiguous or arbitrarily strided values.
template <std::size_t WIDTH, class T> void pack_along(const Vectors<T> &vectors, __m512i flip, std::byte *to) {
    for (std::size_t first = 0; first < WIDTH; first += LANES) {
        const std::size_t have = vectors.count > first ? vectors.count - first : 0, lanes = WIDTH - first < LANES ? WIDTH - first : LANES;
        const std::size_t count = have < lanes ? have : lanes;
        const auto kept = static_cast<__mmask16>((1u << lanes) - 1u);
        for (std::size_t k = 0; k < vectors.length; k += A_CHUNK<T>) {
            __m512i x[LANES];
            load(vectors, first, count, k, x);
            turn(x);
            const std::size_t word = k / A_WORD<T>, left = words(vectors) - word, some = left < LANES ? left : LANES;
            std::byte *out = to + (word * WIDTH + first) * WORD;
            for (std::size_t i = 0; i < some; ++i, out += WIDTH * WORD)
                _mm512_mask_storeu_epi32(out, kept, _mm512_xor_si512(x[i], flip));
        }
    }
}

// Write the words of `lanes` (at most 16) adjacent vectors. The values of a word are `step`
// elements apart, starting at `from`; 16 elements are read for each.
inline void interleave(const Int8 *from, std::ptrdiff_t step, std::size_t lanes, __m512i flip, std::byte *to) {
    __m128i x[A_WORD<Int8>];
    for (std::size_t i = 0; i < A_WORD<Int8>; ++i)
        x[i] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + static_cast<std::ptrdiff_t>(i) * step));
    const __m128i low = _mm_unpacklo_epi8(x[0], x[1]), high = _mm_unpackhi_epi8(x[0], x[1]);
    const __m128i low2 = _mm_unpacklo_epi8(x[2], x[3]), high2 = _mm_unpackhi_epi8(x[2], x[3]);
    const __m128i parts[] = {_mm_unpacklo_epi16(low, low2), _mm_unpackhi_epi16(low, low2), _mm_unpacklo_epi16(high, high2),
                             _mm_unpackhi_epi16(high, high2)};
    for (std::size_t i = 0; 4 * i < lanes; ++i)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + 4 * i * WORD), _mm_xor_si128(parts[i], _mm512_castsi512_si128(flip)));
}

inline void interleave(const Bfloat16 *from, std::ptrdiff_t step, std::size_t lanes, __m512i flip, std::byte *to) {
    const auto values = [&](std::ptrdiff_t i) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + i * step)));
    };
    const __m512i both = _mm512_or_si512(values(0), _mm512_slli_epi32(values(1), 16));
    _mm512_mask_storeu_epi32(to, static_cast<__mmask16>((1u << lanes) - 1u), _mm512_xor_si512(both, flip));
}

// Pack adjacent vectors (unit stride between vectors): value k of all vectors, then value k + 1.
template <std::size_t WIDTH, class T> void pack_across(const Vectors<T> &vectors, __m512i flip, std::byte *to) {
    constexpr std::size_t VALUES = A_WORD<T>;
    for (std::size_t word = 0; word < words(vectors); ++word, to += WIDTH * WORD) {
        const T *from = vectors.at + static_cast<std::ptrdiff_t>(VALUES * word) * vectors.along;
        const std::size_t left = vectors.length - VALUES * word;
        std::ptrdiff_t step = vectors.along;
        // Each load reads 16 values, so copy to a padded buffer near the end of the operand.
        constexpr std::size_t READ = (WIDTH + LANES - 1) / LANES * LANES;
        alignas(64) T some[VALUES][READ];
        if (vectors.count < READ || left < VALUES) {
            std::memset(some, 0, sizeof some);
            for (std::size_t i = 0; i < VALUES && i < left; ++i)
                std::memcpy(some[i], from + static_cast<std::ptrdiff_t>(i) * step, (vectors.count < WIDTH ? vectors.count : WIDTH) * sizeof(T));
            from = some[0];
            step = READ;
        }
        for (std::size_t first = 0; first < WIDTH; first += LANES)
            interleave(from + first, step, WIDTH - first < LANES ? WIDTH - first : LANES, flip, to + first * WORD);
    }
}

// Pack WIDTH vectors into words and XOR them with `flip`. WIDTH is a multiple of four.
template <std::size_t WIDTH, class T> void pack_words(const Vectors<T> &vectors, __m512i flip, void *packed) {
    auto *to = static_cast<std::byte *>(packed);
    if (vectors.apart == 1 && vectors.along != 1)
        pack_across<WIDTH>(vectors, flip, to);
    else
        pack_along<WIDTH>(vectors, flip, to);
}

// Multiply ROWS packed rows by two registers of packed columns, word by word. `dot` accumulates the
// products of words; registers are typed as integers for every element type.
//
// rows: [count][ROWS] words; columns: [count][32] words; offsets: [32]; tile: [ROWS, 32],
// row-major.
template <std::size_t ROWS, class S, class Dot>
inline __attribute__((always_inline)) void multiply_words(const void *rows, const void *columns, const S *offsets, std::size_t count, S *tile,
                                                          bool add, Dot dot) {
    __m512i sums[ROWS][2];
    const S *begin = add ? tile : offsets;
    const std::size_t step = add ? 2 * LANES : 0;
    each<ROWS>([&](auto r) {
        sums[r][0] = _mm512_loadu_si512(begin + r * step);
        sums[r][1] = _mm512_loadu_si512(begin + r * step + LANES);
    });
    const auto *a = static_cast<const std::int32_t *>(rows);
    const auto *b = static_cast<const std::byte *>(columns);
    for (; count != 0; --count, a += ROWS, b += 2 * CHUNK) {
        const __m512i first = _mm512_loadu_si512(b), second = _mm512_loadu_si512(b + CHUNK);
        each<ROWS>([&](auto r) {
            const __m512i word = _mm512_set1_epi32(a[r]);
            sums[r][0] = dot(sums[r][0], word, first);
            sums[r][1] = dot(sums[r][1], word, second);
        });
    }
    each<ROWS>([&](auto r) {
        _mm512_storeu_si512(tile + r * 2 * LANES, sums[r][0]);
        _mm512_storeu_si512(tile + r * 2 * LANES + LANES, sums[r][1]);
    });
}

} // namespace
} // namespace qsync
