// GEMM in INT8 and BF16 on the CPU: micro-kernels of one ISA variant, and the blocked,
// multithreaded product.
//
// Invariant: products are accumulated in an order that depends on K only, and the epilogue is
// float32 arithmetic that every ISA variant rounds identically. So a result depends neither on the
// blocking nor on the number of threads. It is also independent of the ISA variant if all sums are
// exact: always in INT8, and in BF16 if no partial sum needs more bits than FP32 has.
#pragma once

#include "gemm/windows.h"

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace qsync {

// Element types of the operands and of the accumulators.
using Int8 = std::int8_t;
struct Bfloat16 {
    std::uint16_t bits;
};
template <class T> using Sum = std::conditional_t<std::is_same_v<T, Int8>, std::int32_t, float>;

// Strided operand: rows of the first matrix or columns of the second. Element k of vector i is
// at[i * apart + k * along]; strides are in elements.
template <class T> struct Vectors {
    const T *at;
    std::size_t count, length;
    std::ptrdiff_t apart, along;
};

enum Output { OUT_FLOAT32, OUT_BFLOAT16, OUT_SUMS, OUTPUTS };

enum Activation { NO_ACTIVATION, RELU, GELU, GELU_TANH, ACTIVATIONS };

// Destination of sums and the epilogue: sum * row_scales * column_scales + bias, then the
// activation, then the cast to the output dtype.
struct Target {
    void *to;
    std::size_t stride; // elements between consecutive rows
    Output output;
    const float *row_scales;
    std::size_t row_step; // 1, or 0 if one scale applies to all rows
    const float *column_scales, *bias; // one per column, padded to a full tile
    Activation activation;
};

// Micro-kernel of one ISA variant. A call computes a tile of `rows` x `columns` sums, row-major.
template <class T> struct Multiplier {
    const char *instruction; // multiply instruction
    std::size_t rows, columns;
    std::size_t depth; // packed vectors are zero-padded to a multiple of this length
    std::size_t value; // bytes per packed value
    // Pack the first `rows` (or `columns`) of the given vectors, zero-padding the missing ones.
    // `packed` has room for vectors.length values, rounded up to `depth`, of each; its layout is
    // private to the micro-kernel and the source must not overlap it. `offsets` ([columns])
    // receives the initial value of the sums of each column.
    void (*pack_rows)(const Vectors<T> &vectors, void *packed);
    void (*pack_columns)(const Vectors<T> &vectors, void *packed, Sum<T> *offsets);
    // Accumulate `length` products (a multiple of `depth`) into the tile: add them to the tile if
    // `add`, else to the offsets. tile: [rows, columns], row-major, aligned to 64 bytes.
    void (*multiply)(const void *rows, const void *columns, const Sum<T> *offsets, std::size_t length, Sum<T> *tile, bool add);
    // Apply the epilogue to the first `rows` x `columns` sums of a tile and store them.
    void (*finish)(const Sum<T> *tile, std::size_t rows, std::size_t columns, const Target &target);
    // Set up and tear down the state of a thread, such as the AMX tile configuration. Null if not
    // needed.
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
// Return whether this processor supports AMX tiles for both types and the operating system lets
// this process use them.
bool amx_usable();
#endif

// Largest K for which no sum of products of two INT8 numbers overflows INT32.
constexpr std::size_t MOST_DEPTH = 131071;

struct Scales {
    const float *at; // null: no scale
    bool each;       // one per row (column), or one for all
};

template <class T> struct Gemm {
    Vectors<T> a; // rows of the first matrix: [m, k]
    Vectors<T> b; // columns of the second matrix: [n, k]
    Scales a_scale, b_scale;
    const float *bias; // one per column, or null
    Output output;
    void *result; // [m, n], row-major, contiguous
    // Convolution: if set, `a.at` points to images, and the vectors of `a` are the rows of their
    // im2col matrix or, with `taps`, its columns. INT8 only.
    const Windows *windows = nullptr;
    bool taps = false;
    Activation activation = NO_ACTIVATION;
};

// Compute the product. qsync_fx/_C.pyi specifies the arithmetic. The result must not overlap an
// operand.
template <class T> void gemm(const Multiplier<T> &with, const Gemm<T> &what, int threads);

// Return the peak throughput of the micro-kernel on one thread with operands in the L1 cache, in
// multiplications and additions per second.
template <class T> double gemm_peak(const Multiplier<T> &with);

} // namespace qsync
