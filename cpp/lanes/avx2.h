// Sixteen values in two AVX2 registers. Only lanes.h includes this file. avx512.h documents the
// operations.
#pragma once

namespace qsync {
namespace {

struct F { __m256 v, w; };
struct I { __m256i v, w; };

inline F load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float *p, F a) {
    _mm256_storeu_ps(p, a.v);
    _mm256_storeu_ps(p + 8, a.w);
}
inline void store_past(float *p, F a) {
    _mm256_stream_ps(p, a.v);
    _mm256_stream_ps(p + 8, a.w);
}
inline F all(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
inline I all(std::int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
inline F operator+(F a, F b) { return {_mm256_add_ps(a.v, b.v), _mm256_add_ps(a.w, b.w)}; }
inline F operator-(F a, F b) { return {_mm256_sub_ps(a.v, b.v), _mm256_sub_ps(a.w, b.w)}; }
inline F operator*(F a, F b) { return {_mm256_mul_ps(a.v, b.v), _mm256_mul_ps(a.w, b.w)}; }
inline I operator+(I a, I b) { return {_mm256_add_epi32(a.v, b.v), _mm256_add_epi32(a.w, b.w)}; }
inline I operator*(I a, I b) { return {_mm256_mullo_epi32(a.v, b.v), _mm256_mullo_epi32(a.w, b.w)}; }
inline I operator&(I a, I b) { return {_mm256_and_si256(a.v, b.v), _mm256_and_si256(a.w, b.w)}; }
inline I operator|(I a, I b) { return {_mm256_or_si256(a.v, b.v), _mm256_or_si256(a.w, b.w)}; }
inline I operator^(I a, I b) { return {_mm256_xor_si256(a.v, b.v), _mm256_xor_si256(a.w, b.w)}; }
template <int K> inline I left(I a) { return {_mm256_slli_epi32(a.v, K), _mm256_slli_epi32(a.w, K)}; }
template <int K> inline I right(I a) { return {_mm256_srli_epi32(a.v, K), _mm256_srli_epi32(a.w, K)}; }
inline I bits(F a) { return {_mm256_castps_si256(a.v), _mm256_castps_si256(a.w)}; }
inline F as_float(I a) { return {_mm256_castsi256_ps(a.v), _mm256_castsi256_ps(a.w)}; }
inline I truncated(F a) { return {_mm256_cvttps_epi32(a.v), _mm256_cvttps_epi32(a.w)}; }
inline F to_float(I a) { return {_mm256_cvtepi32_ps(a.v), _mm256_cvtepi32_ps(a.w)}; }
inline F floored(F a) { return {_mm256_floor_ps(a.v), _mm256_floor_ps(a.w)}; }
inline I least(I a, I b) { return {_mm256_min_epi32(a.v, b.v), _mm256_min_epi32(a.w, b.w)}; }
inline I most(I a, I b) { return {_mm256_max_epi32(a.v, b.v), _mm256_max_epi32(a.w, b.w)}; }
inline I one_more(I a, F b, F c) {
    return {_mm256_sub_epi32(a.v, _mm256_castps_si256(_mm256_cmp_ps(b.v, c.v, _CMP_LT_OQ))),
            _mm256_sub_epi32(a.w, _mm256_castps_si256(_mm256_cmp_ps(b.w, c.w, _CMP_LT_OQ)))};
}
inline I joined(I a, I bit, F b, F c) {
    return a | I{_mm256_and_si256(bit.v, _mm256_castps_si256(_mm256_cmp_ps(b.v, c.v, _CMP_LT_OQ))),
                 _mm256_and_si256(bit.w, _mm256_castps_si256(_mm256_cmp_ps(b.w, c.w, _CMP_LT_OQ)))};
}
inline I merged(I a, I b, I mask) { return a | (b & mask); }
inline std::uint32_t not_negative(F a) {
    const __m256 zero = _mm256_setzero_ps();
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.v, zero, _CMP_GE_OQ));
    const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.w, zero, _CMP_GE_OQ));
    return static_cast<std::uint32_t>(low | high << 8);
}
inline F chosen(std::uint32_t which, F a, F b) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), both = _mm256_set1_epi32(static_cast<int>(which));
    const __m256i low = _mm256_cmpeq_epi32(_mm256_and_si256(both, lane), lane);
    const __m256i high = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_srli_epi32(both, 8), lane), lane);
    return {_mm256_blendv_ps(b.v, a.v, _mm256_castsi256_ps(low)), _mm256_blendv_ps(b.w, a.w, _mm256_castsi256_ps(high))};
}
template <int H> inline __m256 butterfly(__m256 a) {
    __m256 other;
    if constexpr (H == 1) other = _mm256_permute_ps(a, 0xB1);
    if constexpr (H == 2) other = _mm256_permute_ps(a, 0x4E);
    if constexpr (H == 4) other = _mm256_permute2f128_ps(a, a, 0x01);
    constexpr int HIGHER = H == 1 ? 0xAA : H == 2 ? 0xCC : 0xF0;
    return _mm256_blend_ps(_mm256_add_ps(a, other), _mm256_sub_ps(other, a), HIGHER);
}
template <int H> inline F butterfly(F a) {
    if constexpr (H == 8)
        return {_mm256_add_ps(a.v, a.w), _mm256_sub_ps(a.v, a.w)};
    else
        return {butterfly<H>(a.v), butterfly<H>(a.w)};
}
inline __m256i narrowed(I a) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(a.v, a.w), 0xD8); }
inline void store_words(std::uint8_t *p, I a) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), narrowed(a)); }
inline void store_bytes(std::uint8_t *p, I a) {
    const __m256i words = narrowed(a);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), bytes);
}
inline I load_bytes(const std::uint8_t *p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
inline I load_words(const std::uint8_t *p) {
    const auto *words = reinterpret_cast<const __m128i *>(p);
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(words)), _mm256_cvtepu16_epi32(_mm_loadu_si128(words + 1))};
}

struct Squares {
    __m256d part[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
    void add(F a) {
        const __m128 quarter[4] = {_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1), _mm256_castps256_ps128(a.w),
                                   _mm256_extractf128_ps(a.w, 1)};
        for (int i = 0; i < 4; ++i) {
            const __m256d x = _mm256_cvtps_pd(quarter[i]);
            part[i] = _mm256_add_pd(part[i], _mm256_mul_pd(x, x));
        }
    }
    void store(double *p) const {
        for (int i = 0; i < 4; ++i) _mm256_storeu_pd(p + 4 * i, part[i]);
    }
};

} // namespace
} // namespace qsync
