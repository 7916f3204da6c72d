// Cache-blocked batched matrix transposition.

#include "gemm/turn.h"

#include "parallel.h"

#include <algorithm>
#include <cstdint>

namespace qsync {
namespace {

// A block reads one cache line per row (or parts of two) and writes a few lines per column. Row
// strides are often powers of two, which map to few sets of the L1 cache: each line is read only
// once, and prefetches go to the L2 cache.
constexpr std::size_t LINE = 64, LINES = 4, COLUMNS = 16;

// Prefetch distance in rows: a row contributes too few bytes per block for hardware prefetchers.
constexpr std::size_t AHEAD = 64;

// Bytes per thread that amortize waking it.
constexpr std::size_t GRAIN_BYTES = std::size_t{1} << 16;

template <class T> constexpr std::size_t BLOCK_ROWS = LINES * LINE / sizeof(T);

// Transpose a block of full size. Row strides are in elements.
template <class T> void whole_block(const T *from, std::size_t from_row, T *to, std::size_t to_row) {
    constexpr std::size_t ROWS = BLOCK_ROWS<T>;
    T block[COLUMNS][ROWS];
    for (std::size_t i = 0; i < ROWS; ++i)
        for (std::size_t j = 0; j < COLUMNS; ++j) block[j][i] = from[i * from_row + j];
    for (std::size_t j = 0; j < COLUMNS; ++j) std::copy(block[j], block[j] + ROWS, to + j * to_row);
}

// Transpose a block at the edge of the matrix.
template <class T>
void part_of_block(const T *from, std::size_t from_row, T *to, std::size_t to_row, std::size_t rows, std::size_t columns) {
    for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t j = 0; j < columns; ++j) to[j * to_row + i] = from[i * from_row + j];
}

template <class T> void turn_values(const T *source, T *target, std::size_t count, std::size_t rows, std::size_t columns, int threads) {
    constexpr std::size_t ROWS = BLOCK_ROWS<T>;
    // Parallelize over bands of columns of all matrices, since one matrix may have few bands. The
    // output of a band is contiguous.
    const std::size_t bands = (columns + COLUMNS - 1) / COLUMNS, band_bytes = std::min(columns, COLUMNS) * rows * sizeof(T);
    parallel(count * bands, (GRAIN_BYTES + band_bytes - 1) / band_bytes, threads, [&](std::size_t begin, std::size_t end, std::size_t) {
        for (std::size_t band = begin; band < end; ++band) {
            const std::size_t matrix = band / bands * rows * columns, column = band % bands * COLUMNS;
            const std::size_t wide = std::min(COLUMNS, columns - column);
            const T *from = source + matrix + column;
            T *to = target + matrix + column * rows;
            for (std::size_t row = 0; row < rows; row += ROWS) {
                const std::size_t tall = std::min(ROWS, rows - row);
                for (std::size_t ahead = row + AHEAD; wide == COLUMNS && ahead < std::min(row + AHEAD + ROWS, rows); ++ahead) {
                    __builtin_prefetch(from + ahead * columns, 0, 2);
                    __builtin_prefetch(from + ahead * columns + COLUMNS - 1, 0, 2);
                }
                if (wide == COLUMNS && tall == ROWS)
                    whole_block(from + row * columns, columns, to + row, rows);
                else
                    part_of_block(from + row * columns, columns, to + row, rows, tall, wide);
            }
        }
    });
}

} // namespace

void turn(const void *source, void *target, std::size_t count, std::size_t rows, std::size_t columns, std::size_t bytes, int threads) {
    const auto values = [&](auto value) {
        using T = decltype(value);
        turn_values(static_cast<const T *>(source), static_cast<T *>(target), count, rows, columns, threads);
    };
    if (count == 0 || rows == 0 || columns == 0) return;
    if (bytes == 1)
        values(std::uint8_t{});
    else if (bytes == 2)
        values(std::uint16_t{});
    else
        values(std::uint32_t{});
}

} // namespace qsync
