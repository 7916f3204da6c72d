// Stochastic quantization for AVX-512 in fixed point, with a fifth fewer instructions than in
// floating point.
//
// Invariant: bit-identical to the loop of kernels.cpp. With u = x / scale, U = u * 2**24 and the
// random number R * 2**-24,
//     floor(u) + (R * 2**-24 < u - floor(u))  =  (C + 2**24 - 1 - R) >> 24,
// where C is U rounded up to an integer. For integers R, `R < U - 2**24 floor(u)` is equivalent to
// `R < C - 2**24 floor(u)`. For u in (-1/2, 0) the loop rounds `u - floor(u)` to a multiple of
// 2**-24, ties to even, so C is U rounded to nearest. From 2**23 on U is an integer and the
// rounding mode has no effect. Clamping U is equivalent to clamping the result. The divisor scale *
// 2**-24 is exact for scales from 2**-102 on. With a scale of at most 1/2 no quotient underflows to
// zero, which suffices for small quotients.
#pragma once

#include "ahead.h"
#include "random.h"

#include <cstddef>
#include <cstdint>
#include <immintrin.h>

namespace qsync {
namespace {

inline __m512 sixteen(const std::uint32_t *x) { return _mm512_loadu_ps(x); }
// BF16 input: the high halves of floats.
inline __m512 sixteen(const std::uint16_t *x) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(x)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// Return 2**24 - 1 - R for sixteen counters.
inline __m512i random_left(__m512i x) {
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x7FEB352D));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(static_cast<int>(0x846CA68Bu)));
    constexpr int NOT_XOR = 0xC3;
    x = _mm512_ternarylogic_epi32(x, _mm512_srli_epi32(x, 16), x, NOT_XOR);
    return _mm512_srli_epi32(x, 8);
}

// Quantize blocks of 64 values. Return the number of quantized values: 0 for an unsupported scale.
//
// x: [n] float32 or BF16 bit patterns; target: [n] int8; `next`: address to prefetch from.
template <class Stored>
std::size_t quantize_in_fixed_point(const Stored *x, std::int8_t *target, std::size_t n, float scale, float levels, std::uint32_t counter,
                                    const void *next) {
    if (!(scale >= 0x1p-102f && scale <= 0.5f)) return 0;
    const __m512 divisor = _mm512_set1_ps(scale * 0x1p-24f), most = _mm512_set1_ps(levels * 0x1p24f);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i weyl = _mm512_set1_epi32(static_cast<int>(WEYL)), step = _mm512_set1_epi32(static_cast<int>(16 * WEYL));
    __m512i index = _mm512_add_epi32(_mm512_mullo_epi32(lanes, weyl), _mm512_set1_epi32(static_cast<int>(counter)));
    std::size_t done = 0;
    for (; done + 64 <= n; done += 64) {
        ask(static_cast<const Stored *>(next) + done, 64 * sizeof(Stored));
        __m512i q[4];
        for (std::size_t k = 0; k < 4; ++k) {
            constexpr int SMALLER_MAGNITUDE = 2;
            const __m512 u = _mm512_range_ps(_mm512_div_ps(sixteen(x + done + 16 * k), divisor), most, SMALLER_MAGNITUDE);
            const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(u));
            const __m512i up = _mm512_cvt_roundps_epi32(u, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
            const __m512i c = _mm512_mask_cvt_roundps_epi32(up, negative, u, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            q[k] = _mm512_srai_epi32(_mm512_add_epi32(c, random_left(index)), 24);
            index = _mm512_add_epi32(index, step);
        }
        const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3]));
        _mm512_storeu_si512(target + done, _mm512_permutexvar_epi32(order, bytes));
    }
    return done;
}

} // namespace
} // namespace qsync
