// Rounding of one value to INT8 or FP8, bit-identical to backend/numerics/reference.py, in few
// instructions. It also compiles for the host, where a test compares every function with the
// reference.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef __CUDA_ARCH__
#include <cfenv>
#include <cmath>
#endif

#include "plain/philox.cuh"

namespace qsync {

enum Type : int { FLOAT32, FLOAT16, BFLOAT16 };
enum Format : int { INT8, E4M3, E5M2 };
enum Rounding : int { NEAREST, STOCHASTIC, FLOOR };

QSYNC_BOTH std::uint32_t bits(float value) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(value);
#else
    std::uint32_t word;
    std::memcpy(&word, &value, 4);
    return word;
#endif
}

QSYNC_BOTH float as_float(std::uint32_t word) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(word);
#else
    float value;
    std::memcpy(&value, &word, 4);
    return value;
#endif
}

// Explicit roundings: the compiler must neither contract separate operations nor split a fused one.
#ifdef __CUDA_ARCH__
QSYNC_BOTH float add_near(float a, float b) { return __fadd_rn(a, b); }
QSYNC_BOTH float add_down(float a, float b) { return __fadd_rd(a, b); }
QSYNC_BOTH float add_up(float a, float b) { return __fadd_ru(a, b); }
QSYNC_BOTH float multiply(float a, float b) { return __fmul_rn(a, b); }
QSYNC_BOTH float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
QSYNC_BOTH float divide(float a, float b) { return __fdiv_rn(a, b); }
#else
inline float add_in_mode(float a, float b, int mode) {
    const int before = std::fegetround();
    std::fesetround(mode);
    volatile float left = a, right = b;
    volatile float sum = left + right;
    std::fesetround(before);
    return sum;
}
inline float add_near(float a, float b) { return add_in_mode(a, b, FE_TONEAREST); }
inline float add_down(float a, float b) { return add_in_mode(a, b, FE_DOWNWARD); }
inline float add_up(float a, float b) { return add_in_mode(a, b, FE_UPWARD); }
inline float multiply(float a, float b) {
    volatile float product = a * b;
    return product;
}
inline float fused(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float divide(float a, float b) {
    volatile float quotient = a / b;
    return quotient;
}
#endif

// Return the value of `word`. FLOAT16 and BFLOAT16 are given as their sixteen bits.
template <Type X> QSYNC_BOTH float widened(std::uint32_t word) {
    if constexpr (X == BFLOAT16) return as_float(word << 16);
    if constexpr (X == FLOAT32) return as_float(word);
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<std::uint16_t>(word)));
    return value;
#else
    const auto narrow = static_cast<std::uint16_t>(word);
    _Float16 value;
    std::memcpy(&value, &narrow, 2);
    return static_cast<float>(value);
#endif
}

template <Format F> constexpr float LEVELS = F == INT8 ? 127.0f : F == E4M3 ? 448.0f : 57344.0f;

constexpr float SMALLEST_SCALE = 0x1p-126f;

// Return the scale of a group whose largest magnitude is `largest`: 1 for zeros, NaN for NaN and
// Inf.
template <Format F> QSYNC_BOTH float scale_of(float largest) {
    if (largest == 0.0f) return 1.0f;
    if ((bits(largest) & 0x7F800000u) == 0x7F800000u) return as_float(0x7FC00000u);
    const float scale = divide(largest, LEVELS<F>);
    return scale < SMALLEST_SCALE ? SMALLEST_SCALE : scale;
}

// Repeated division by one scale. With a correctly rounded reciprocal, two of Markstein's
// correction steps ("Computation of elementary functions on the IBM RISC System/6000 processor",
// 1990, theorem 8.1) yield the correctly rounded quotient if the remainder is exact. To ensure
// this, small scales are enlarged, and the caller must enlarge the values by the same factor.
// Quotients below 2^-34 may be inexact, which does not affect rounding to nearest and stochastic
// rounding; rounding down uses a true division.
constexpr float ENLARGED = 0x1p64f;

struct Divisor {
    float scale, inverse, enlarged; // enlarged: 1 or ENLARGED
};

template <Rounding R> QSYNC_BOTH Divisor divisor(float scale) {
    if constexpr (R == FLOOR) return {scale, 0.0f, 1.0f};
    const float enlarged = scale < 0x1p-60f ? ENLARGED : 1.0f;
    const float by = multiply(scale, enlarged);
    return {by, divide(1.0f, by), enlarged};
}

template <Rounding R> QSYNC_BOTH float quotient(float a, const Divisor &by) {
    if constexpr (R == FLOOR) return divide(a, by.scale);
    float q = multiply(a, by.inverse);
    q = fused(fused(-by.scale, q, a), by.inverse, q);
    return fused(fused(-by.scale, q, a), by.inverse, q);
}

// 3 * 2^22 + x contains x, rounded to an integer, in its low bits. The rounding mode of the
// addition determines the rounding of x.
constexpr float WHOLE = 12582912.0f;

// Round a value in units of its scale to INT8, in the low byte of the result. No magnitude exceeds
// 127 * (1 + 2^-24), since the scale is computed from the value's own group, so only rounding down
// can leave the range.
template <Rounding R> QSYNC_BOTH std::uint32_t to_int8(float units, std::uint32_t sixteen_bits) {
    if constexpr (R == NEAREST) return bits(add_near(units, WHOLE));
    const float value = fmaxf(units, -127.0f);
    const float whole = add_down(value, WHOLE);
    if constexpr (R == FLOOR) return bits(whole);
    const float fraction = add_near(value, -add_near(whole, -WHOLE));
    // A float with the bits of 2^23 plus sixteen low bits, times 2^-16, minus 2^7, plus half of
    // 2^-16: (sixteen_bits + 1/2) * 2^-16.
    const float uniform = fused(as_float(0x4B000000u | sixteen_bits), 0x1p-16f, -128.0f + 0x1p-17f);
    // The sign bit of the difference is the result of the comparison.
    return bits(whole) + (bits(add_near(uniform, -fraction)) >> 31);
}

template <Format F> struct Float8 {
    static constexpr int MANTISSA = F == E4M3 ? 3 : 2, CUT = 23 - MANTISSA;
    // SMALLEST: smallest normal number.
    static constexpr std::uint32_t SMALLEST = static_cast<std::uint32_t>(127 + (F == E4M3 ? -6 : -14)) << 23;
    static constexpr std::uint32_t LARGEST = F == E4M3 ? 0x7Eu : 0x7Bu;
};

// Round to FP8 with an addition: scale the magnitude to units in the last place at its own
// exponent, round it to an integer by adding 2^23, and add the exponent field. A carry out of the
// mantissa increments the exponent.
template <Format F, Rounding R> QSYNC_BOTH std::uint32_t float8_by_addition(float units) {
    using G = Float8<F>;
    const std::uint32_t word = bits(units), magnitude = word & 0x7FFFFFFFu;
    std::uint32_t exponent = magnitude & 0x7F800000u;
    exponent = exponent < G::SMALLEST ? G::SMALLEST : exponent;
    const float inverse_step = as_float((static_cast<std::uint32_t>(254 + G::MANTISSA) << 23) - exponent);
    const float steps = multiply(as_float(magnitude), inverse_step);
    const float whole = R == NEAREST ? add_near(steps, 8388608.0f) : word >> 31 ? add_up(steps, 8388608.0f) : add_down(steps, 8388608.0f);
    const std::uint32_t code = ((exponent - G::SMALLEST) >> G::CUT) + (bits(whole) - 0x4B000000u);
    return (code > G::LARGEST ? G::LARGEST : code) | (word >> 24 & 0x80u);
}

// Round to FP8 stochastically, in integer arithmetic: add a random number below the last place and
// truncate after the carry. With u = (sixteen_bits + 1/2) * 2^-16, a value is rounded up if u is
// less than its fraction. For positive values the addend is the bitwise complement of u. A negative
// value is rounded down, which increases its magnitude, if the fraction of the magnitude is at
// least 1 - u, so the addend is u itself. Subnormal values are aligned by an addition that rounds
// up.
template <Format F> QSYNC_BOTH std::uint32_t float8_stochastic(float units, std::uint32_t sixteen_bits) {
    using G = Float8<F>;
    const std::uint32_t word = bits(units), sign = word & 0x80000000u;
    const bool small = (word & 0x7FFFFFFFu) < G::SMALLEST;
    const std::uint32_t placed = small ? bits(add_up(units, as_float(G::SMALLEST | sign))) : word;
    const std::uint32_t offset = (G::SMALLEST >> G::CUT) - (small ? 0u : 1u << G::MANTISSA);
    const std::uint32_t carry = ((sixteen_bits << (G::CUT - 16)) + (1u << (G::CUT - 17))) ^ (sign ? 0u : (1u << G::CUT) - 1);
    const std::uint32_t code = (((placed & 0x7FFFFFFFu) + carry) >> G::CUT) - offset;
    return (code > G::LARGEST ? G::LARGEST : code) | sign >> 24;
}

// Divide `x`, which the caller has enlarged, by its scale and round it. The result is in the low
// byte; the other bytes are undefined.
template <Format F, Rounding R> QSYNC_BOTH std::uint32_t rounded(float x, const Divisor &by, std::uint32_t sixteen_bits) {
    const float units = quotient<R>(x, by);
    if constexpr (F == INT8) {
        return to_int8<R>(units, sixteen_bits);
    } else {
        // Values that round to zero retain the sign of x, which the division steps may lose.
        const float value = as_float((bits(units) & 0x7FFFFFFFu) | (bits(x) & 0x80000000u));
        if constexpr (R == STOCHASTIC) return float8_stochastic<F>(value, sixteen_bits);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
        if constexpr (R == NEAREST) {
            std::uint16_t pair;
            if constexpr (F == E4M3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
            if constexpr (F == E5M2) asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
            return pair;
        }
#endif
        return float8_by_addition<F, R>(value);
    }
}

} // namespace qsync
