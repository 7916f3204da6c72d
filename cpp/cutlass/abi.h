// C interface (ABI) of compiled GPU kernel libraries. Mirrors the ctypes structures in
// backend/cuda/kernel_build/library.py, which documents every field; a test compares sizes and
// offsets.
#pragma once

#include <cstdint>

#define QSYNC_ABI_VERSION 1

namespace qsync {

// d = a @ b * a_scale * b_scale + bias, with a [m, k], b [k, n], d [m, n]. lda, ldb and ldd are the
// strides of the non-contiguous dimension, in elements. Scales and bias are FP32 or null.
struct GemmArguments {
    const void *a, *b;
    void *d;
    const float *a_scale, *b_scale, *bias;
    std::int64_t lda, ldb, ldd;
    std::int32_t m, n, k;
    std::int32_t a_scale_per_row, b_scale_per_column;
    std::int32_t split, device, multiprocessors;
};

// Convolution over packed channels-last tensors: x [n, h, w, c], weight [k, r, s, c], y
// [n, p, q, k]. (a, b, d) are (x, weight, y) for the output, (grad_y, weight, grad_x) for the input
// gradient, and (grad_y, x, grad_weight) for the weight gradient.
struct ConvArguments {
    const void *a, *b;
    void *d;
    const float *a_scale, *b_scale, *bias;
    std::int32_t n, h, w, c, k, r, s, p, q;
    std::int32_t pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w;
    std::int32_t b_scale_per_channel;
    std::int32_t split, device, multiprocessors;
};

// Quantization of x [rows, columns] with row stride ldx to q [rows, columns] and, unless null, qt
// [columns, rows], both contiguous. `seed` points to one int64 in device memory.
struct QuantizeArguments {
    const void *x;
    void *q, *qt;
    float *scale;
    const std::int64_t *seed;
    std::int64_t rows, columns, ldx;
    std::uint32_t stream;
    std::int32_t x_type, format, rounding, group;
    std::int32_t device, multiprocessors;
};

// Copy with optional transposition, zero padding and conversion of `batches` matrices x
// [rows, columns] to y [y_batches, y_rows, y_columns], contiguous. `scale` points to one FP32 in
// device memory or is null.
struct ConvertArguments {
    const void *x;
    void *y;
    const float *scale;
    std::int64_t batches, rows, columns, ldx, batch_stride;
    std::int64_t y_batches, y_rows, y_columns;
    std::int32_t x_type, y_type, turned;
    std::int32_t device, multiprocessors;
};

} // namespace qsync
