// A matrix in memory, read eight elements of a row at a time.
//
// Eight elements have one block of random numbers, and a store of eight bytes. Where all rows are aligned and whole eighths they are one load
// of 16 bytes (two for FP32); kernels are compiled for that case apart, as the branches cost more than the work. Else each eighth is looked
// at on its own; beyond the end of a row stand zeros, which are no one's largest magnitude and are not stored.
#pragma once

#include <type_traits>

#include "plain/rounding.cuh"

namespace qsync {

QSYNC_BOTH std::uint32_t maximum(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }
QSYNC_BOTH std::uint32_t minimum(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }

// Byte i of the result is the one, of the four of `a` and then the four of `b`, whose number is hexadecimal digit i of `order`.
QSYNC_BOTH std::uint32_t permuted(std::uint32_t a, std::uint32_t b, std::uint32_t order) {
#ifdef __CUDA_ARCH__
    return __byte_perm(a, b, order);
#else
    const std::uint64_t both = static_cast<std::uint64_t>(b) << 32 | a;
    std::uint32_t word = 0;
    for (int i = 0; i < 4; ++i) word |= static_cast<std::uint32_t>(both >> 8 * (order >> 4 * i & 7) & 0xFF) << 8 * i;
    return word;
#endif
}

// Eight elements as they lie in memory.
template <Type X> struct Eight {
    std::uint32_t word[X == FLOAT32 ? 8 : 4];

    QSYNC_BOTH float value(int i) const {
        if constexpr (X == FLOAT32) return as_float(word[i]);
        // The high half of a word is a float already, but for bits that have to go.
        if constexpr (X == BFLOAT16) return as_float(i % 2 ? word[i / 2] & 0xFFFF0000u : word[i / 2] << 16);
        return widened<X>(word[i / 2] >> 16 * (i % 2) & 0xFFFFu);
    }

    // Those of the magnitude of element i, as `magnitude` compares them.
    QSYNC_BOTH std::uint32_t bits_of(int i) const {
        if constexpr (X == FLOAT32) return word[i] & 0x7FFFFFFFu;
        return (i % 2 ? word[i / 2] : word[i / 2] << 16) & 0x7FFF0000u;
    }
};

// Division of numbers below 2^31 by a number that stays: multiplication by a rounded inverse and a shift (T. Granlund, P. Montgomery,
// "Division by Invariant Integers using Multiplication", PLDI 1994).
struct Division {
    std::uint32_t by, factor, shift;

    Division() = default;
    explicit Division(std::uint32_t by) : by(by), factor(0), shift(0) {
        if (by <= 1) return;
        while ((std::uint64_t{1} << (shift + 1)) < by) ++shift;
        factor = static_cast<std::uint32_t>(((std::uint64_t{1} << (32 + shift)) + by - 1) / by);
    }

    QSYNC_BOTH std::uint32_t operator()(std::uint32_t number) const {
        if (by <= 1) return number;
        return static_cast<std::uint32_t>((static_cast<std::uint64_t>(number) * factor) >> 32) >> shift;
    }
};

template <Type X> struct Matrix {
    using Element = std::conditional_t<X == FLOAT32, std::uint32_t, std::uint16_t>;

    const Element *data;
    std::int64_t stride;
    std::uint32_t rows, row_eighths;
    std::int64_t columns;
    Division by_row;
    bool aligned, dense; // dense: no gaps between rows

    QSYNC_BOTH std::uint32_t eighths() const { return rows * row_eighths; }
    bool whole_eighths() const { return aligned && columns % 8 == 0; }

#ifdef QSYNC_KERNELS
    __device__ __forceinline__ static Eight<X> whole(const Element *from) {
        Eight<X> found;
        const uint4 first = *reinterpret_cast<const uint4 *>(from);
        found.word[0] = first.x, found.word[1] = first.y, found.word[2] = first.z, found.word[3] = first.w;
        if constexpr (X == FLOAT32) {
            const uint4 second = *reinterpret_cast<const uint4 *>(from + 4);
            found.word[4] = second.x, found.word[5] = second.y, found.word[6] = second.z, found.word[7] = second.w;
        }
        return found;
    }

    template <bool WHOLE> __device__ __forceinline__ Eight<X> load(std::uint32_t row, std::int64_t column) const {
        const Element *from = data + row * stride + column;
        if (WHOLE || (aligned && column + 8 <= columns)) return whole(from);
        Eight<X> found;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const std::uint32_t element = column + i < columns ? from[i] : 0u;
            if constexpr (X == FLOAT32) {
                found.word[i] = element;
            } else {
                found.word[i / 2] = i % 2 ? found.word[i / 2] | element << 16 : element;
            }
        }
        return found;
    }

    template <bool WHOLE> __device__ __forceinline__ Eight<X> load(std::uint32_t eighth) const {
        if (WHOLE && dense) return whole(data + 8 * static_cast<std::int64_t>(eighth));
        const std::uint32_t row = by_row(eighth);
        return load<WHOLE>(row, 8 * static_cast<std::int64_t>(eighth - row * row_eighths));
    }
#endif
};

} // namespace qsync
