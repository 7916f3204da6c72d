// What one path (instruction set) offers. Invariant: every table computes the same bits from the same arguments.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qsync {

enum Type { FLOAT32, BFLOAT16, FLOAT16, TYPES };
enum Rounding { STOCHASTIC, NEAREST, FLOOR, ROUNDINGS };

// A float format: values are multiples of 2**(max(exponent, e_min) - mantissa_bits), up to +-max.
struct Grid {
    std::int32_t mantissa_bits;
    std::int32_t e_min;
    double max;
};

struct Kernels {
    // Returns the bits of the largest |x| as a float32; 0x7f800000 or more when there is a NaN or an infinity.
    std::uint32_t (*absmax[TYPES])(const void *source, std::size_t n);
    // All values are finite and scale is at least 2**-126. `counter` is the low half of the first index times WEYL, plus the key. Memory is
    // asked for n values from `next` on, which need not be there: those that come next.
    void (*quantize[TYPES][ROUNDINGS])(const void *source, std::int8_t *target, std::size_t n, float scale, float levels,
                                       std::uint32_t counter, const void *next);
    void (*round_float[ROUNDINGS])(const float *source, float *target, std::size_t n, Grid grid, std::uint32_t counter);
    // 1 where the 24 bits of the random number are `least` or more, else 0.
    void (*keep)(std::uint8_t *target, std::size_t n, std::uint32_t least, std::uint32_t counter);
};

extern const Kernels scalar_kernels;
#ifdef QSYNC_X86
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

} // namespace qsync
