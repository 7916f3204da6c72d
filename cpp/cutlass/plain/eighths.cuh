// Quantization of eight elements to eight bytes: their random numbers, divisors, rounding and
// packing.
//
// rounding.cuh explains the cost per element. Loops are fully unrolled, so that all arrays are in
// registers.
#pragma once

#include "plain/matrix.cuh"

namespace qsync {

// Rounding of vectors of eight elements. `columns` is the row length of the matrix.
template <Type X, Format F, Rounding R> struct Rounder {
    Random random;
    std::int64_t columns;

    // Draw the random numbers of several vectors of eight elements. `places` are the linear indices
    // of their first elements.
    template <bool WHOLE, int number> QSYNC_BOTH void draw(const std::int64_t (&places)[number], Words (&words)[number]) const {
        if constexpr (R == STOCHASTIC) {
#ifdef __CUDACC__
#pragma unroll
#endif
            for (int i = 0; i < number; ++i) words[i] = random.counter(static_cast<std::uint64_t>(places[i]) / 8);
            random.draw(words);
            if (WHOLE || columns % 8 == 0) return;
#ifdef __CUDACC__
#pragma unroll
#endif
            for (int i = 0; i < number; ++i) {
                Words next[1] = {random.counter(static_cast<std::uint64_t>(places[i]) / 8 + 1)};
                random.draw(next);
                shift(words[i], next[0], static_cast<int>(places[i] % 8));
            }
        }
    }

    // Quantize eight elements, with one divisor or one per element.
    template <class Divisors> QSYNC_BOTH void operator()(const Eight<X> &x, const Divisors &by, const Words &words, std::uint32_t (&out)[2]) const {
        float value[8];
#ifdef __CUDACC__
#pragma unroll
#endif
        for (int i = 0; i < 8; ++i) value[i] = x.value(i);
        by.enlarge(value);
        std::uint32_t code[8];
#ifdef __CUDACC__
#pragma unroll
#endif
        for (int i = 0; i < 8; ++i) code[i] = rounded<F, R>(value[i], by.of(i), sixteen(words, i));
        out[0] = packed(code[0], code[1], code[2], code[3]) & by.known(0);
        out[1] = packed(code[4], code[5], code[6], code[7]) & by.known(1);
    }

    // Shift two consecutive random blocks (32 bytes) by `by` elements and return the first sixteen
    // bytes in `words`.
    QSYNC_BOTH static void shift(Words &words, const Words &next, int by) {
        std::uint32_t all[9] = {words.word[0], words.word[1], words.word[2], words.word[3], next.word[0], next.word[1], next.word[2], next.word[3], 0};
#ifdef __CUDACC__
#pragma unroll
#endif
        for (int step = 4; step; step /= 2) {
#ifdef __CUDACC__
#pragma unroll
#endif
            for (int i = 0; i < 8; ++i) {
                if (!(by & step)) continue;
                if (step == 1) {
                    all[i] = all[i] >> 16 | all[i + 1] << 16;
                } else {
                    all[i] = i + step / 2 < 8 ? all[i + step / 2] : 0u;
                }
            }
        }
        for (int i = 0; i < 4; ++i) words.word[i] = all[i];
    }

    QSYNC_BOTH static std::uint32_t packed(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
        return permuted(permuted(a, b, 0x0040), permuted(c, d, 0x0040), 0x5410);
    }
};

// Divisors of eight elements: one scale for all, or one per element. Elements with a NaN scale
// become zero.
template <Rounding R> struct OneDivisor {
    Divisor divisor_;
    std::uint32_t known_;

    OneDivisor() = default;
    QSYNC_BOTH explicit OneDivisor(float scale) : divisor_(divisor<R>(scale)), known_(scale == scale ? 0xFFFFFFFFu : 0u) {}
    QSYNC_BOTH const Divisor &of(int) const { return divisor_; }
    // Rarely needed, and uniform over the vector: one branch around eight multiplications.
    QSYNC_BOTH void enlarge(float (&value)[8]) const {
        if (divisor_.enlarged == 1.0f) return;
#ifdef __CUDACC__
#pragma unroll
#endif
        for (int i = 0; i < 8; ++i) value[i] = multiply(value[i], divisor_.enlarged);
    }
    QSYNC_BOTH std::uint32_t known(int) const { return known_; }
};

template <Rounding R> struct EightDivisors {
    Divisor divisors[8];
    // small: bit mask of the columns whose values are enlarged.
    std::uint32_t known_[2], small;

    EightDivisors() = default;
    QSYNC_BOTH EightDivisors(const float *scale, std::int64_t column, std::int64_t columns) : known_{}, small(0) {
#ifdef __CUDACC__
#pragma unroll
#endif
        for (int i = 0; i < 8; ++i) {
            const float mine = column + i < columns ? scale[column + i] : 1.0f;
            divisors[i] = divisor<R>(mine);
            known_[i / 4] |= mine == mine ? 0xFFu << 8 * (i % 4) : 0u;
            small |= divisors[i].enlarged != 1.0f ? 1u << i : 0u;
        }
    }
    QSYNC_BOTH const Divisor &of(int i) const { return divisors[i]; }
    QSYNC_BOTH void enlarge(float (&value)[8]) const {
        if (small == 0) return;
#ifdef __CUDACC__
#pragma unroll
#endif
        for (int i = 0; i < 8; ++i) value[i] = multiply(value[i], small >> i & 1 ? ENLARGED : 1.0f);
    }
    QSYNC_BOTH std::uint32_t known(int half) const { return known_[half]; }
};

} // namespace qsync
