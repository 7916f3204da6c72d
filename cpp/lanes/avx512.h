// Sixteen values in one AVX-512 register. Only lanes.h includes this file.
#pragma once

namespace qsync {
namespace {

struct F { __m512 v; };
struct I { __m512i v; };

inline F load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline void store(float *p, F a) { _mm512_storeu_ps(p, a.v); }
inline void store_past(float *p, F a) { _mm512_stream_ps(p, a.v); }
inline F all(float a) { return {_mm512_set1_ps(a)}; }
inline I all(std::int32_t a) { return {_mm512_set1_epi32(a)}; }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I operator*(I a, I b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline I operator&(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I operator|(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
inline I operator^(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int K> inline I left(I a) { return {_mm512_slli_epi32(a.v, K)}; }
template <int K> inline I right(I a) { return {_mm512_srli_epi32(a.v, K)}; }
inline I bits(F a) { return {_mm512_castps_si512(a.v)}; }
inline F as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
inline I truncated(F a) { return {_mm512_cvttps_epi32(a.v)}; }
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline F floored(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
inline I least(I a, I b) { return {_mm512_min_epi32(a.v, b.v)}; }
inline I most(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
// a + 1 where b < c, else a
inline I one_more(I a, F b, F c) {
    return {_mm512_mask_add_epi32(a.v, _mm512_cmp_ps_mask(b.v, c.v, _CMP_LT_OQ), a.v, _mm512_set1_epi32(1))};
}
// a | bit where b < c, else a
inline I joined(I a, I bit, F b, F c) { return {_mm512_mask_or_epi32(a.v, _mm512_cmp_ps_mask(b.v, c.v, _CMP_LT_OQ), a.v, bit.v)}; }
// a | (b & mask)
inline I merged(I a, I b, I mask) { return {_mm512_ternarylogic_epi32(a.v, b.v, mask.v, 0xF8)}; }
// Return a bit mask of the lanes that are zero or more; lane 0 is the lowest bit.
inline std::uint32_t not_negative(F a) { return _mm512_cmp_ps_mask(a.v, _mm512_setzero_ps(), _CMP_GE_OQ); }
// a in the lanes of the mask, else b
inline F chosen(std::uint32_t which, F a, F b) { return {_mm512_mask_blend_ps(static_cast<__mmask16>(which), b.v, a.v)}; }
// a + b in the lanes of the mask, else a
inline F with(F a, std::uint32_t which, F b) { return {_mm512_mask_add_ps(a.v, static_cast<__mmask16>(which), a.v, b.v)}; }
// In each pair of lanes at distance H, put the sum into the lower lane, and the lower one minus the
// higher one into the higher lane.
template <int H> inline F butterfly(F a) {
    constexpr __mmask16 HIGHER = H == 1 ? 0xAAAA : H == 2 ? 0xCCCC : H == 4 ? 0xF0F0 : 0xFF00;
    __m512 other;
    if constexpr (H == 1) other = _mm512_permute_ps(a.v, 0xB1);
    if constexpr (H == 2) other = _mm512_permute_ps(a.v, 0x4E);
    if constexpr (H == 4) other = _mm512_shuffle_f32x4(a.v, a.v, 0xB1);
    if constexpr (H == 8) other = _mm512_shuffle_f32x4(a.v, a.v, 0x4E);
    return {_mm512_mask_sub_ps(_mm512_add_ps(a.v, other), HIGHER, other, a.v)};
}
inline void store_bytes(std::uint8_t *p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(a.v)); }
inline I load_bytes(const std::uint8_t *p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))}; }
inline void store_words(std::uint8_t *p, I a) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(a.v)); }
inline I load_words(const std::uint8_t *p) {
    return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
}

// Sums of squares in FP64, one per lane.
struct Squares {
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    void add(F a) {
        const __m512d x = _mm512_cvtps_pd(_mm512_castps512_ps256(a.v));
        const __m512d y = _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)));
        low = _mm512_add_pd(low, _mm512_mul_pd(x, x));
        high = _mm512_add_pd(high, _mm512_mul_pd(y, y));
    }
    void store(double *p) const {
        _mm512_storeu_pd(p, low);
        _mm512_storeu_pd(p + 8, high);
    }
};

} // namespace
} // namespace qsync
