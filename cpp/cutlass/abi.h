// The C interface of compiled kernels. backend/cuda/kernel_build/library.py says the same in Python, and what each number means.
#pragma once

#include <cstdint>

#define QSYNC_ABI_VERSION 1

namespace qsync {

struct GemmArguments {
    const void *a, *b;
    void *d;
    const float *a_scale, *b_scale, *bias;
    std::int64_t lda, ldb, ldd;
    std::int32_t m, n, k;
    std::int32_t a_scale_per_row, b_scale_per_column;
    std::int32_t split, device, multiprocessors;
};

struct ConvArguments {
    const void *a, *b;
    void *d;
    const float *a_scale, *b_scale, *bias;
    std::int32_t n, h, w, c, k, r, s, p, q;
    std::int32_t pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w;
    std::int32_t b_scale_per_channel;
    std::int32_t split, device, multiprocessors;
};

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
