#include "gemm/turn.h"

#include "parallel.h"

#include <algorithm>
#include <cstdint>

namespace qsync {
namespace {

// A block is read some lines of memory and written a whole line a column. What lies between two of them is often a power of two, of which
// the first cache holds few lines: none may be needed twice.
constexpr std::size_t LINE = 64, COLUMNS = 16;

// What a thread is worth waking for.
constexpr std::size_t GRAIN_BYTES = std::size_t{1} << 16;

template <class T> constexpr std::size_t BLOCK_ROWS = LINE / sizeof(T);

template <class T> void whole_block(const T *from, std::size_t from_row, T *to, std::size_t to_row) {
    constexpr std::size_t ROWS = BLOCK_ROWS<T>;
    T block[COLUMNS][ROWS];
    for (std::size_t i = 0; i < ROWS; ++i)
        for (std::size_t j = 0; j < COLUMNS; ++j) block[j][i] = from[i * from_row + j];
    for (std::size_t j = 0; j < COLUMNS; ++j) std::copy(block[j], block[j] + ROWS, to + j * to_row);
}

template <class T>
void part_of_block(const T *from, std::size_t from_row, T *to, std::size_t to_row, std::size_t rows, std::size_t columns) {
    for (std::size_t j = 0; j < columns; ++j)
        for (std::size_t i = 0; i < rows; ++i) to[j * to_row + i] = from[i * from_row + j];
}

template <class T> void turn_values(const T *source, T *target, std::size_t count, std::size_t rows, std::size_t columns, int threads) {
    constexpr std::size_t ROWS = BLOCK_ROWS<T>;
    // Strips of rows, of all matrices, since those of one may be few. What is read of them lies together.
    const std::size_t strips = (rows + ROWS - 1) / ROWS, strip_bytes = std::min(rows, ROWS) * columns * sizeof(T);
    parallel(count * strips, (GRAIN_BYTES + strip_bytes - 1) / strip_bytes, threads, [&](std::size_t begin, std::size_t end, std::size_t) {
        for (std::size_t strip = begin; strip < end; ++strip) {
            const std::size_t matrix = strip / strips * rows * columns, row = strip % strips * ROWS, tall = std::min(ROWS, rows - row);
            for (std::size_t column = 0; column < columns; column += COLUMNS) {
                const std::size_t wide = std::min(COLUMNS, columns - column);
                const T *from = source + matrix + row * columns + column;
                T *to = target + matrix + column * rows + row;
                if (wide == COLUMNS && tall == ROWS)
                    whole_block(from, columns, to, rows);
                else
                    part_of_block(from, columns, to, rows, tall, wide);
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
