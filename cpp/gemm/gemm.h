// Products of INT8 matrices: what one path (instruction set) offers, and the whole product, over blocks and threads.
// Invariant: every sum is exact, and what becomes of it is float32 arithmetic that every path rounds alike. So a result depends neither on
// the path, nor on blocks, nor on the number of threads.
#pragma once

#include "gemm/windows.h"

#include <cstddef>
#include <cstdint>

namespace qsync {

// Vectors of INT8 that are multiplied with those of another: rows of the first matrix, columns of the second. Value k of vector i is
// at[i * apart + k * along].
struct Vectors {
    const std::int8_t *at;
    std::size_t count, length;
    std::ptrdiff_t apart, along;
};

enum Output { OUT_FLOAT32, OUT_BFLOAT16, OUT_INT32, OUTPUTS };

// Where sums go, and what they are made before: sum * row_scales * column_scales + bias.
struct Target {
    void *to;
    std::size_t stride; // values from one row to the next
    Output output;
    const float *row_scales;
    std::size_t row_step; // 1, or 0 where one scale serves all rows
    const float *column_scales, *bias; // one a column, readable up to a whole tile
};

// A tile is what one call computes: `rows` by `columns` sums, a row after the other.
struct Multiplier {
    std::size_t rows, columns;
    std::size_t depth; // packed vectors are filled up with zeros to a multiple of that many values
    std::size_t value; // bytes that a packed value takes
    // Packs the first of the given vectors, as many as a tile has rows, or columns; if there are fewer, zeros take the place of the others.
    // `offsets` is what the sums of each column begin with.
    void (*pack_rows)(const Vectors &vectors, void *packed);
    void (*pack_columns)(const Vectors &vectors, void *packed, std::int32_t *offsets);
    // Sums over `length` values, a multiple of `depth`, into the tile: added to it, or to the offsets.
    void (*multiply)(const void *rows, const void *columns, const std::int32_t *offsets, std::size_t length, std::int32_t *tile, bool add);
    // Gives out the first `rows` by `columns` of a tile.
    void (*finish)(const std::int32_t *tile, std::size_t rows, std::size_t columns, const Target &target);
    // Called by each thread before and after it multiplies; null where nothing is to be done.
    void (*enter)();
    void (*leave)();
};

extern const Multiplier scalar_multiplier;
#ifdef QSYNC_X86
extern const Multiplier avx2_multiplier;
extern const Multiplier avx512_multiplier;
extern const Multiplier avx512_vnni_multiplier;
#endif
#ifdef QSYNC_AMX
extern const Multiplier amx_multiplier;
// Whether this processor has the tiles, and the system lets this process use them.
bool amx_usable();
#endif

// Up to here no sum of products of two INT8 numbers leaves INT32.
constexpr std::size_t MOST_DEPTH = 131071;

struct Scales {
    const float *at; // null for none
    bool each;       // one a row (column), or one for all
};

struct Gemm {
    Vectors a; // the rows of the first matrix
    Vectors b; // the columns of the second, as long
    Scales a_scale, b_scale;
    const float *bias; // one a column, or null
    Output output;
    void *result; // a.count by b.count, without gaps
    // If given, `a.at` are images, and the vectors of `a` their windows, or the taps of those, each for all windows.
    const Windows *windows = nullptr;
    bool taps = false;
};

// Computes the product. The contract is in qsync_fx/_C.pyi.
void gemm(const Multiplier &with, const Gemm &what, int threads);

// Returns multiplications and additions a second, of one thread whose operands lie in its first cache: what the unit can do.
double gemm_peak(const Multiplier &with);

} // namespace qsync
