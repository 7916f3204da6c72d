// Quantization, rounding to a floating-point grid, and dropout masks for entire tensors: per-row
// scales, random numbers by element index, multithreading.
#pragma once

#include "quantizer/kernels.h"

namespace qsync {

struct Random {
    std::uint64_t seed;
    std::uint32_t stream;
    std::uint64_t first; // index of the first element
};

// Quantize each row of `source` to INT8 with its own scale. qsync_fx/_C.pyi specifies the
// arithmetic.
//
// source: [rows, columns] of `type`, contiguous; target: [rows, columns] int8; scales: [rows]
// float32. The buffers must not overlap.
void quantize(const Kernels &kernels, const void *source, std::int8_t *target, float *scales, std::size_t rows, std::size_t columns,
              Type type, Rounding rounding, int levels, Random random, int threads);

// Round n float32 of `source` to `grid`. `target` ([n] float32) may be `source`.
void round_float(const Kernels &kernels, const float *source, float *target, std::size_t n, Grid grid, Rounding rounding, Random random,
                 int threads);

// Write a dropout mask of n bytes: 0 with probability p, else 1.
void keep(const Kernels &kernels, std::uint8_t *target, std::size_t n, double p, Random random, int threads);

} // namespace qsync
