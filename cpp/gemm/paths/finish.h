// GEMM epilogue for a tile of sums: scales, bias, activation, cast. Every ISA variant includes this
// file and compiles its own copy.
#pragma once

#include "gemm/paths/activation.h"

#include <cstring>
#include <type_traits>
#include <utility>

namespace qsync {
namespace {

// Call work with each number of [0, COUNT) as a compile-time constant. An array that is only
// indexed by constants stays in registers; with the counter of a loop that the compiler unrolls
// late, it is written to the stack in each iteration.
template <class Work, std::size_t... NUMBERS> inline __attribute__((always_inline)) void each(std::index_sequence<NUMBERS...>, Work work) {
    (work(std::integral_constant<std::size_t, NUMBERS>{}), ...);
}
template <std::size_t COUNT, class Work> inline __attribute__((always_inline)) void each(Work work) {
    each(std::make_index_sequence<COUNT>{}, work);
}

// Round to BF16, ties to even; NaN becomes the canonical quiet NaN.
inline std::uint16_t as_bfloat16(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const std::uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    return static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

// Compute full rows of the tile and copy their valid part, so that the inner loops have constant
// length. For a full tile (`WHOLE`) the copy has constant length too and compiles to a store.
//
// tile: [rows, COLUMNS], row-major; only the first `columns` of each row are stored.
template <std::size_t COLUMNS, class T, bool WHOLE, class S>
void finish_rows(const S *tile, std::size_t rows, std::size_t columns, const Target &target) {
    for (std::size_t row = 0; row < rows; ++row, tile += COLUMNS) {
        const float scale = target.row_scales[row * target.row_step];
        float values[COLUMNS];
        for (std::size_t i = 0; i < COLUMNS; ++i)
            values[i] = static_cast<float>(tile[i]) * scale * target.column_scales[i] + target.bias[i];
        activate(values, target.activation);
        T *to = static_cast<T *>(target.to) + row * target.stride;
        if constexpr (sizeof(T) == 2) {
            std::uint16_t narrow[COLUMNS];
            for (std::size_t i = 0; i < COLUMNS; ++i) narrow[i] = as_bfloat16(values[i]);
            std::memcpy(to, narrow, WHOLE ? sizeof narrow : columns * sizeof(T));
        } else {
            std::memcpy(to, values, WHOLE ? sizeof values : columns * sizeof(T));
        }
    }
}

template <std::size_t COLUMNS, class T, class S>
void finish_as(const S *tile, std::size_t rows, std::size_t columns, const Target &target) {
    if (columns == COLUMNS)
        finish_rows<COLUMNS, T, true>(tile, rows, columns, target);
    else
        finish_rows<COLUMNS, T, false>(tile, rows, columns, target);
}

template <std::size_t COLUMNS, class S> void finish(const S *tile, std::size_t rows, std::size_t columns, const Target &target) {
    switch (target.output) {
    case OUT_FLOAT32:
        return finish_as<COLUMNS, float>(tile, rows, columns, target);
    case OUT_BFLOAT16:
        return finish_as<COLUMNS, std::uint16_t>(tile, rows, columns, target);
    default:
        for (std::size_t row = 0; row < rows; ++row, tile += COLUMNS)
            std::memcpy(static_cast<S *>(target.to) + row * target.stride, tile, columns * sizeof *tile);
    }
}

} // namespace
} // namespace qsync
