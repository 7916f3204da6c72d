// Byte planes of 64 words: plane p contains byte p of each word, where plane 0 is the most
// significant byte.
//
// Invariant: as in lanes.h, a plane has identical bytes in every ISA variant.
#pragma once

#include "lanes/lanes.h"

namespace qsync {
namespace {

// Words per plane.
constexpr std::size_t PLANE = 4 * LANES;

#if defined(__AVX512BW__)

struct Plane { __m512i v; };

inline Plane load_plane(const std::uint8_t *p) { return {_mm512_loadu_si512(p)}; }
inline void store_plane(std::uint8_t *p, Plane a) { _mm512_storeu_si512(p, a.v); }
inline Plane no_plane() { return {_mm512_setzero_si512()}; }
inline __m512i higher() { return _mm512_set1_epi8(static_cast<char>(0xF0)); }

// Combine high nibbles: the low nibble of each result byte is the high nibble of `a`, the high
// nibble is the high nibble of `b`.
inline Plane halves(Plane a, Plane b) { return {_mm512_ternarylogic_epi32(_mm512_srli_epi16(a.v, 4), b.v, higher(), 0xD8)}; }
// Restore the high nibbles of both arguments of `halves`; the low nibbles are zero.
inline Plane of_lower(Plane a) { return {_mm512_and_si512(_mm512_slli_epi16(a.v, 4), higher())}; }
inline Plane of_higher(Plane a) { return {_mm512_and_si512(a.v, higher())}; }

// Reorder the bytes of the four words in each 128-bit lane: by significance, and the inverse.
inline __m512i quarters_by_place(__m512i a) {
    const __m128i place = _mm_setr_epi8(3, 7, 11, 15, 2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12);
    return _mm512_shuffle_epi8(a, _mm512_broadcast_i32x4(place));
}
inline __m512i quarters_by_word(__m512i a) {
    const __m128i word = _mm_setr_epi8(12, 8, 4, 0, 13, 9, 5, 1, 14, 10, 6, 2, 15, 11, 7, 3);
    return _mm512_shuffle_epi8(a, _mm512_broadcast_i32x4(word));
}

inline void to_planes(const I (&words)[4], Plane (&planes)[4]) {
    // Select bytes `at` and `at` + 1 of two registers that are ordered by significance, 32 bytes
    // each.
    const auto two = [](__m512i a, __m512i b, int at) {
        const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
        return _mm512_permutex2var_epi32(a, _mm512_add_epi32(first, _mm512_set1_epi32(at)), b);
    };
    __m512i by_place[4];
    for (int k = 0; k < 4; ++k) by_place[k] = quarters_by_place(words[k].v);
    for (int at = 0; at < 4; at += 2) {
        const __m512i low = two(by_place[0], by_place[1], at), high = two(by_place[2], by_place[3], at);
        planes[at] = {_mm512_shuffle_i64x2(low, high, 0x44)};
        planes[at + 1] = {_mm512_shuffle_i64x2(low, high, 0xEE)};
    }
}

inline void from_planes(const Plane (&planes)[4], I (&words)[4]) {
    // The inverse: gather the words of registers that are ordered by significance.
    const __m512i first = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(4));
    for (int half = 0; half < 2; ++half) {
        const auto join = [half](Plane a, Plane b) {
            return half == 0 ? _mm512_shuffle_i64x2(a.v, b.v, 0x44) : _mm512_shuffle_i64x2(a.v, b.v, 0xEE);
        };
        const __m512i upper = join(planes[0], planes[1]), lower = join(planes[2], planes[3]);
        words[2 * half] = {quarters_by_word(_mm512_permutex2var_epi32(upper, first, lower))};
        words[2 * half + 1] = {quarters_by_word(_mm512_permutex2var_epi32(upper, second, lower))};
    }
}

#else

struct Plane { std::uint8_t v[PLANE]; };

inline Plane load_plane(const std::uint8_t *p) {
    Plane a;
    std::memcpy(a.v, p, PLANE);
    return a;
}
inline void store_plane(std::uint8_t *p, const Plane &a) { std::memcpy(p, a.v, PLANE); }
inline Plane no_plane() { return {}; }

inline Plane halves(const Plane &a, const Plane &b) {
    Plane to;
    for (std::size_t i = 0; i < PLANE; ++i) to.v[i] = static_cast<std::uint8_t>(a.v[i] >> 4 | (b.v[i] & 0xF0));
    return to;
}
inline Plane of_lower(const Plane &a) {
    Plane to;
    for (std::size_t i = 0; i < PLANE; ++i) to.v[i] = static_cast<std::uint8_t>(a.v[i] << 4);
    return to;
}
inline Plane of_higher(const Plane &a) {
    Plane to;
    for (std::size_t i = 0; i < PLANE; ++i) to.v[i] = static_cast<std::uint8_t>(a.v[i] & 0xF0);
    return to;
}

inline void to_planes(const I (&words)[4], Plane (&planes)[4]) {
    for (std::size_t k = 0; k < 4; ++k) {
        const I mask = all(std::int32_t{255}); // narrowing to bytes may saturate
        store_bytes(planes[0].v + k * LANES, right<24>(words[k]));
        store_bytes(planes[1].v + k * LANES, right<16>(words[k]) & mask);
        store_bytes(planes[2].v + k * LANES, right<8>(words[k]) & mask);
        store_bytes(planes[3].v + k * LANES, words[k] & mask);
    }
}

inline void from_planes(const Plane (&planes)[4], I (&words)[4]) {
    for (std::size_t k = 0; k < 4; ++k) {
        const auto byte = [&](std::size_t plane) { return load_bytes(planes[plane].v + k * LANES); };
        words[k] = left<24>(byte(0)) | left<16>(byte(1)) | left<8>(byte(2)) | byte(3);
    }
}

#endif

// Load `count` bytes of `p`. If there are fewer than in a plane, the remaining bytes are zeros.
inline Plane load_some(const std::uint8_t *p, std::size_t count) {
    if (count >= PLANE) return load_plane(p);
    std::uint8_t padded[PLANE] = {};
    std::memcpy(padded, p, count);
    return load_plane(padded);
}
// Store the first `count` bytes.
inline void store_some(std::uint8_t *p, const Plane &a, std::size_t count) {
    if (count >= PLANE) return store_plane(p, a);
    std::uint8_t padded[PLANE];
    store_plane(padded, a);
    std::memcpy(p, padded, count);
}

} // namespace
} // namespace qsync
