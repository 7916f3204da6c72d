// What becomes of a tile of sums. Included by the sources of every path, so that each compiles it for itself from the same text.
#pragma once

#include "gemm/paths/activation.h"

#include <cstring>
#include <type_traits>
#include <utility>

namespace qsync {
namespace {

// Calls work with each number of [0, COUNT) as a constant. What is indexed by constants alone is kept in registers; by the counter of a
// loop that the compiler unrolls late it is written to the stack in each round.
template <class Work, std::size_t... NUMBERS> inline __attribute__((always_inline)) void each(std::index_sequence<NUMBERS...>, Work work) {
    (work(std::integral_constant<std::size_t, NUMBERS>{}), ...);
}
template <std::size_t COUNT, class Work> inline __attribute__((always_inline)) void each(Work work) {
    each(std::make_index_sequence<COUNT>{}, work);
}

inline std::uint16_t as_bfloat16(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const std::uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    return static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

// A whole row of the tile is computed and the part that there is of it copied, so that no loop has a length that only a run knows. Nor
// has the copy where the tile is `WHOLE`, which makes it a store.
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
