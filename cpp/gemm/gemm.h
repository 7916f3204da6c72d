// Products of matrices in INT8 and BF16: what one path (instruction set) offers, and the whole product, over blocks and threads.
// Invariant: products are added to a sum in an order that its length alone decides, and what becomes of a sum is float32 arithmetic that
// every path rounds alike. So a result depends neither on blocks nor on the number of threads; and not on the path, where sums are exact:
// always in INT8, in BF16 where no sum on the way needs more bits than FP32 has.
#pragma once

#include "gemm/windows.h"

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace qsync {

// Values of operands are of these types, and sums of their products of those.
using Int8 = std::int8_t;
struct Bfloat16 {
    std::uint16_t bits;
};
template <class T> using Sum = std::conditional_t<std::is_same_v<T, Int8>, std::int32_t, float>;

// Vectors that are multiplied with those of another: rows of the first matrix, columns of the second. Value k of vector i is
// at[i * apart + k * along].
template <class T> struct Vectors {
    const T *at;
    std::size_t count, length;
    std::ptrdiff_t apart, along;
};

enum Output { OUT_FLOAT32, OUT_BFLOAT16, OUT_SUMS, OUTPUTS };

enum Activation { NO_ACTIVATION, RELU, GELU, GELU_TANH, ACTIVATIONS };

// Where sums go, and what they are made before: sum * row_scales * column_scales + bias, and an activation of that.
struct Target {
    void *to;
    std::size_t stride; // values from one row to the next
    Output output;
    const float *row_scales;
    std::size_t row_step; // 1, or 0 where one scale serves all rows
    const float *column_scales, *bias; // one a column, readable up to a whole tile
    Activation activation;
};

// A tile is what one call computes: `rows` by `columns` sums, a row after the other.
template <class T> struct Multiplier {
    const char *instruction; // that multiplies
    std::size_t rows, columns;
    std::size_t depth; // packed vectors are filled up with zeros to a multiple of that many values
    std::size_t value; // bytes that a packed value takes
    // Packs the first of the given vectors, as many as a tile has rows, or columns; if there are fewer, zeros take the place of the others.
    // `offsets` is what the sums of each column begin with.
    void (*pack_rows)(const Vectors<T> &vectors, void *packed);
    void (*pack_columns)(const Vectors<T> &vectors, void *packed, Sum<T> *offsets);
    // Sums over `length` values, a multiple of `depth`, into the tile: added to it, or to the offsets.
    void (*multiply)(const void *rows, const void *columns, const Sum<T> *offsets, std::size_t length, Sum<T> *tile, bool add);
    // Gives out the first `rows` by `columns` of a tile.
    void (*finish)(const Sum<T> *tile, std::size_t rows, std::size_t columns, const Target &target);
    // Called by each thread before and after it multiplies; null where nothing is to be done.
    void (*enter)();
    void (*leave)();
};

extern const Multiplier<Int8> scalar_int8;
extern const Multiplier<Bfloat16> scalar_bf16;
#ifdef QSYNC_X86
extern const Multiplier<Int8> avx2_int8, avx512_int8, avx512_vnni_int8;
extern const Multiplier<Bfloat16> avx2_bf16, avx512_bf16;
#endif
#ifdef QSYNC_AVX512_BF16
extern const Multiplier<Bfloat16> avx512_vnni_bf16;
#endif
#ifdef QSYNC_AMX
extern const Multiplier<Int8> amx_int8;
extern const Multiplier<Bfloat16> amx_bf16;
// Whether this processor has the tiles, for both, and the system lets this process use them.
bool amx_usable();
#endif

// Up to here no sum of products of two INT8 numbers leaves INT32.
constexpr std::size_t MOST_DEPTH = 131071;

struct Scales {
    const float *at; // null for none
    bool each;       // one a row (column), or one for all
};

template <class T> struct Gemm {
    Vectors<T> a; // the rows of the first matrix
    Vectors<T> b; // the columns of the second, as long
    Scales a_scale, b_scale;
    const float *bias; // one a column, or null
    Output output;
    void *result; // a.count by b.count, without gaps
    // If given, `a.at` are images, and the vectors of `a` their windows, or the taps of those, each for all windows. INT8 alone.
    const Windows *windows = nullptr;
    bool taps = false;
    Activation activation = NO_ACTIVATION;
};

// Computes the product. The contract is in qsync_fx/_C.pyi.
template <class T> void gemm(const Multiplier<T> &with, const Gemm<T> &what, int threads);

// Returns multiplications and additions a second, of one thread whose operands lie in its first cache: what the unit can do.
template <class T> double gemm_peak(const Multiplier<T> &with);

} // namespace qsync
