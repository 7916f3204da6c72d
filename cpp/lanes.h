// Sixteen values at a time, for the instruction set that a file is compiled for: AVX-512, AVX2, or plain loops.
//
// Invariant: an operation gives the same bits in all three. Only what IEEE rounds alike stands here, no operation contracts or
// reorders, and minima and maxima are of integers.
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

#if defined(__AVX512F__)

struct F { __m512 v; };
struct I { __m512i v; };

inline F load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline void store(float *p, F a) { _mm512_storeu_ps(p, a.v); }
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
// A bit for each lane that is zero or more, the first lane's the lowest.
inline std::uint32_t not_negative(F a) { return _mm512_cmp_ps_mask(a.v, _mm512_setzero_ps(), _CMP_GE_OQ); }
inline F chosen(std::uint32_t which, F a, F b) { return {_mm512_mask_blend_ps(static_cast<__mmask16>(which), b.v, a.v)}; }
inline void store_bytes(std::uint8_t *p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(a.v)); }
inline I load_bytes(const std::uint8_t *p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))}; }
inline void store_words(std::uint8_t *p, I a) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(a.v)); }
inline I load_words(const std::uint8_t *p) {
    return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
}

// Sums of squares in FP64, one a lane.
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

#elif defined(__AVX2__)

struct F { __m256 v, w; };
struct I { __m256i v, w; };

inline F load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float *p, F a) {
    _mm256_storeu_ps(p, a.v);
    _mm256_storeu_ps(p + 8, a.w);
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

#else

struct F { float v[LANES]; };
struct I { std::int32_t v[LANES]; };

template <class To, class From, class Work> inline To each(const From &a, const Work &work) {
    To to;
    for (std::size_t i = 0; i < LANES; ++i) to.v[i] = work(a.v[i]);
    return to;
}
template <class To, class From, class Work> inline To each(const From &a, const From &b, const Work &work) {
    To to;
    for (std::size_t i = 0; i < LANES; ++i) to.v[i] = work(a.v[i], b.v[i]);
    return to;
}
using Lane = std::int32_t;
inline std::uint32_t word(Lane a) { return static_cast<std::uint32_t>(a); }
inline Lane lane(std::uint32_t a) { return static_cast<Lane>(a); }

inline F load(const float *p) {
    F a;
    std::memcpy(a.v, p, sizeof a.v);
    return a;
}
inline void store(float *p, const F &a) { std::memcpy(p, a.v, sizeof a.v); }
inline F all(float x) { return each<F>(F{}, [x](float) { return x; }); }
inline I all(Lane x) { return each<I>(I{}, [x](Lane) { return x; }); }
inline F operator+(const F &a, const F &b) { return each<F>(a, b, [](float x, float y) { return x + y; }); }
inline F operator-(const F &a, const F &b) { return each<F>(a, b, [](float x, float y) { return x - y; }); }
inline F operator*(const F &a, const F &b) { return each<F>(a, b, [](float x, float y) { return x * y; }); }
inline I operator+(const I &a, const I &b) { return each<I>(a, b, [](Lane x, Lane y) { return lane(word(x) + word(y)); }); }
inline I operator*(const I &a, const I &b) { return each<I>(a, b, [](Lane x, Lane y) { return lane(word(x) * word(y)); }); }
inline I operator&(const I &a, const I &b) { return each<I>(a, b, [](Lane x, Lane y) { return x & y; }); }
inline I operator|(const I &a, const I &b) { return each<I>(a, b, [](Lane x, Lane y) { return x | y; }); }
inline I operator^(const I &a, const I &b) { return each<I>(a, b, [](Lane x, Lane y) { return x ^ y; }); }
template <int K> inline I left(const I &a) { return each<I>(a, [](Lane x) { return lane(word(x) << K); }); }
template <int K> inline I right(const I &a) { return each<I>(a, [](Lane x) { return lane(word(x) >> K); }); }
inline I bits(const F &a) {
    I to;
    std::memcpy(to.v, a.v, sizeof to.v);
    return to;
}
inline F as_float(const I &a) {
    F to;
    std::memcpy(to.v, a.v, sizeof to.v);
    return to;
}
inline I truncated(const F &a) { return each<I>(a, [](float x) { return static_cast<Lane>(x); }); }
inline F to_float(const I &a) { return each<F>(a, [](Lane x) { return static_cast<float>(x); }); }
inline F floored(const F &a) { return each<F>(a, [](float x) { return __builtin_floorf(x); }); }
inline I least(const I &a, const I &b) { return each<I>(a, b, [](Lane x, Lane y) { return x < y ? x : y; }); }
inline I most(const I &a, const I &b) { return each<I>(a, b, [](Lane x, Lane y) { return x > y ? x : y; }); }
inline I one_more(const I &a, const F &b, const F &c) { return a + each<I>(b, c, [](float x, float y) { return x < y ? 1 : 0; }); }
inline std::uint32_t not_negative(const F &a) {
    std::uint32_t found = 0;
    for (std::size_t i = 0; i < LANES; ++i) found |= static_cast<std::uint32_t>(a.v[i] >= 0.0f) << i;
    return found;
}
inline F chosen(std::uint32_t which, const F &a, const F &b) {
    F to;
    for (std::size_t i = 0; i < LANES; ++i) to.v[i] = which >> i & 1u ? a.v[i] : b.v[i];
    return to;
}
inline void store_bytes(std::uint8_t *p, const I &a) {
    for (std::size_t i = 0; i < LANES; ++i) p[i] = static_cast<std::uint8_t>(a.v[i]);
}
inline I load_bytes(const std::uint8_t *p) {
    I to;
    for (std::size_t i = 0; i < LANES; ++i) to.v[i] = p[i];
    return to;
}
inline void store_words(std::uint8_t *p, const I &a) {
    for (std::size_t i = 0; i < LANES; ++i) {
        const auto x = static_cast<std::uint16_t>(a.v[i]);
        std::memcpy(p + 2 * i, &x, 2);
    }
}
inline I load_words(const std::uint8_t *p) {
    I to;
    for (std::size_t i = 0; i < LANES; ++i) {
        std::uint16_t x;
        std::memcpy(&x, p + 2 * i, 2);
        to.v[i] = x;
    }
    return to;
}

struct Squares {
    double part[LANES] = {};
    void add(const F &a) {
        for (std::size_t i = 0; i < LANES; ++i) part[i] += static_cast<double>(a.v[i]) * static_cast<double>(a.v[i]);
    }
    void store(double *p) const { std::memcpy(p, part, sizeof part); }
};

#endif

// The largest lane; none is negative.
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

inline F magnitude(const F &a) { return as_float(bits(a) & all(std::int32_t{0x7FFFFFFF})); }

// `count` values of `p`, fewer than sixteen perhaps: zeros take the place of the others.
inline F load_some(const float *p, std::size_t count) {
    if (count >= LANES) return load(p);
    float padded[LANES] = {};
    std::memcpy(padded, p, count * sizeof(float));
    return load(padded);
}
inline void store_some(float *p, const F &a, std::size_t count) {
    if (count >= LANES) return store(p, a);
    float padded[LANES];
    store(padded, a);
    std::memcpy(p, padded, count * sizeof(float));
}

// The sum of sixteen numbers, halves onto halves: an order that is nobody's instruction set's.
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
