// Portable vectors of sixteen 32-bit values: AVX-512, AVX2, or plain loops, by the flags that the
// including file is compiled with.
//
// Invariant: an operation gives identical bits in all three. All operations are exact or rounded
// identically by IEEE 754, none contracts or reorders, and minima and maxima are of integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace qsync {
namespace {

constexpr std::size_t LANES = 16;

} // namespace
} // namespace qsync

#if defined(__AVX512F__)
#include "lanes/avx512.h"
#elif defined(__AVX2__)
#include "lanes/avx2.h"
#else
#include "lanes/plain.h"
#endif

namespace qsync {
namespace {

// Return the largest lane. No lane is negative.
#if defined(__AVX2__)
inline std::int32_t highest(__m256i a) {
    const __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i c = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(c, _mm_shuffle_epi32(c, 0xB1)));
}
#endif
#if defined(__AVX512F__)
inline std::int32_t highest(I a) {
    return highest(_mm256_max_epi32(_mm512_castsi512_si256(a.v), _mm512_extracti64x4_epi64(a.v, 1)));
}
#elif defined(__AVX2__)
inline std::int32_t highest(I a) { return highest(_mm256_max_epi32(a.v, a.w)); }
#else
inline std::int32_t highest(const I &a) {
    Lane found = 0;
    for (const Lane x : a.v) found = x > found ? x : found;
    return found;
}
#endif

#if !defined(__AVX512F__)
inline F with(const F &a, std::uint32_t which, const F &b) { return chosen(which, a + b, a); }
#endif

inline F magnitude(const F &a) { return as_float(bits(a) & all(std::int32_t{0x7FFFFFFF})); }

// Return whether n float32 at `p`, written in units of `unit` values, should bypass the caches with
// `store_past` (non-temporal stores): they exceed the private cache of a core, and each store of
// sixteen values fills an aligned cache line. A regular store first reads the line into the cache,
// which costs the same time again. Call `written_past` after the last store.
constexpr std::size_t PAST = std::size_t{1} << 18;
inline bool goes_past(const float *p, std::size_t n, std::size_t unit) {
    return n >= PAST && unit % LANES == 0 && reinterpret_cast<std::uintptr_t>(p) % 64 == 0;
}
inline void written_past() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

// Load `count` values of `p`. If there are fewer than sixteen, the remaining lanes are zeros.
inline F load_some(const float *p, std::size_t count) {
    if (count >= LANES) return load(p);
    float padded[LANES] = {};
    std::memcpy(padded, p, count * sizeof(float));
    return load(padded);
}
// Store the first `count` lanes.
inline void store_some(float *p, const F &a, std::size_t count) {
    if (count >= LANES) return store(p, a);
    float padded[LANES];
    store(padded, a);
    std::memcpy(p, padded, count * sizeof(float));
}

// Return the sum of the lanes. Halves are added to halves, an order that does not depend on the
// instruction set.
inline double folded(const Squares &a) {
    double lanes[LANES];
    a.store(lanes);
    for (std::size_t half = LANES / 2; half != 0; half /= 2)
        for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}
#if defined(__AVX2__)
inline float folded(__m256 a) {
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
#endif
#if defined(__AVX512F__)
inline float folded(F a) {
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
    return folded(_mm256_add_ps(_mm512_castps512_ps256(a.v), high));
}
#elif defined(__AVX2__)
inline float folded(F a) { return folded(_mm256_add_ps(a.v, a.w)); }
#else
inline float folded(F a) {
    for (std::size_t half = LANES / 2; half != 0; half /= 2)
        for (std::size_t i = 0; i < half; ++i) a.v[i] += a.v[i + half];
    return a.v[0];
}
#endif

} // namespace
} // namespace qsync
