// Kernel table of the quantizer for one ISA variant. Invariant: all tables compute identical bits
// from identical arguments.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qsync {

enum Type { FLOAT32, BFLOAT16, FLOAT16, TYPES };
enum Rounding { STOCHASTIC, NEAREST, FLOOR, ROUNDINGS };

// Floating-point grid: multiples of 2**(max(exponent, e_min) - mantissa_bits), saturated at +-max.
struct Grid {
    std::int32_t mantissa_bits;
    std::int32_t e_min;
    double max;
};

// Pointers need only the alignment of their elements; sources and targets have n elements.
struct Kernels {
    // Return the bits of the largest |x| as float32. The result is 0x7f800000 or more if there is a
    // NaN or an infinity.
    std::uint32_t (*absmax[TYPES])(const void *source, std::size_t n);
    // Quantize n finite values to int8 with a scale of at least 2**-126. `counter` is the low half
    // of the first index times WEYL, plus the key. The kernel prefetches n values from `next` on,
    // which may be any address.
    void (*quantize[TYPES][ROUNDINGS])(const void *source, std::int8_t *target, std::size_t n, float scale, float levels,
                                       std::uint32_t counter, const void *next);
    // Round to a floating-point grid. `target` may be `source`.
    void (*round_float[ROUNDINGS])(const float *source, float *target, std::size_t n, Grid grid, std::uint32_t counter);
    // Write 1 if the 24-bit random number is at least `least`, else 0.
    void (*keep)(std::uint8_t *target, std::size_t n, std::uint32_t least, std::uint32_t counter);
};

extern const Kernels scalar_kernels;
#ifdef QSYNC_X86
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

} // namespace qsync
