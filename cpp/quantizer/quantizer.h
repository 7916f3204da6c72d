// The quantizer, the rounding to a float grid and what dropout keeps, over whole tensors: scales, random numbers by index, threads.
#pragma once

#include "quantizer/kernels.h"

namespace qsync {

struct Random {
    std::uint64_t seed;
    std::uint32_t stream;
    std::uint64_t first; // index of the first element
};

// Quantizes every row of `source` (rows x columns, contiguous) by its own scale. The contract is in qsync_fx/_C.pyi.
void quantize(const Kernels &kernels, const void *source, std::int8_t *target, float *scales, std::size_t rows, std::size_t columns,
              Type type, Rounding rounding, int levels, Random random, int threads);

void round_float(const Kernels &kernels, const float *source, float *target, std::size_t n, Grid grid, Rounding rounding, Random random,
                 int threads);

// Writes 0 for each of n values with probability p, else 1.
void keep(const Kernels &kernels, std::uint8_t *target, std::size_t n, double p, Random random, int threads);

} // namespace qsync
