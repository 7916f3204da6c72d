// Matrix views that are read in vectors of eight elements of a row ("eighths").
//
// Eight elements share one block of random numbers and one store of eight bytes. If all rows are
// aligned and their length is a multiple of eight, a vector is one 16-byte load (two for FP32).
// Kernels are specialized for this case, since the branches cost more than the work. Otherwise each
// vector is tested; elements past the end of a row read as zeros, which do not affect an absolute
// maximum and are not stored.
#pragma once

#include <type_traits>

#include "plain/rounding.cuh"

namespace qsync {

QSYNC_BOTH std::uint32_t maximum(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }
QSYNC_BOTH std::uint32_t minimum(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }

// Permute bytes: byte i of the result is the byte of (a, b) whose number is hexadecimal digit i of
// `order`; `a` has bytes 0 to 3, `b` has 4 to 7.
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

// Eight elements in their memory layout.
template <Type X> struct Eight {
    std::uint32_t word[X == FLOAT32 ? 8 : 4];

    QSYNC_BOTH float value(int i) const {
        if constexpr (X == FLOAT32) return as_float(word[i]);
        // BF16 is the upper half of an FP32 word.
        if constexpr (X == BFLOAT16) return as_float(i % 2 ? word[i / 2] & 0xFFFF0000u : word[i / 2] << 16);
        return widened<X>(word[i / 2] >> 16 * (i % 2) & 0xFFFFu);
    }

    // Return the magnitude bits of element i, in the representation that `magnitude` compares.
    QSYNC_BOTH std::uint32_t bits_of(int i) const {
        if constexpr (X == FLOAT32) return word[i] & 0x7FFFFFFFu;
        return (i % 2 ? word[i / 2] : word[i / 2] << 16) & 0x7FFF0000u;
    }
};

// Division of integers below 2^31 by an invariant divisor: multiplication by a rounded inverse and
// a shift (T. Granlund, P. Montgomery, "Division by Invariant Integers using Multiplication", PLDI
// 1994).
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

// View of a matrix [rows, columns] with `stride` elements between rows. `row_eighths` is the number
// of vectors per row, and `by_row` divides by it.
template <Type X> struct Matrix {
    using Element = std::conditional_t<X == FLOAT32, std::uint32_t, std::uint16_t>;

    const Element *data;
    std::int64_t stride;
    std::uint32_t rows, row_eighths;
    std::int64_t columns;
    Division by_row;
    // aligned: every row starts at a multiple of 16 bytes. dense: rows have no gaps.
    bool aligned, dense;

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
