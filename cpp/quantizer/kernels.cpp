// Quantizer kernels, compiled once per ISA variant: plain loops that the compiler vectorizes. For
// AVX-512, stochastic quantization also has a fixed-point version (fixed_point.h).
//
// Invariant: only IEEE operations that every instruction set rounds identically (no reciprocal, no
// contraction), hence identical bits. No function may be inline with external linkage (such as a
// template of the standard library): the linker would use the code of one ISA variant for all.

#include "ahead.h"
#include "quantizer/kernels.h"
#include "random.h"

#if defined(__AVX512DQ__)
#include "quantizer/fixed_point.h"
#endif

namespace qsync {
namespace {

using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

template <class To, class From> inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "a change of type, not of size");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}

template <Type> struct Element;

template <> struct Element<FLOAT32> {
    using Stored = uint32_t;
    static constexpr Stored MAGNITUDE = 0x7FFFFFFFu;
    static float value(Stored x) { return bits_as<float>(x); }
    static uint32_t magnitude(Stored x) { return x; }
};

template <> struct Element<BFLOAT16> {
    using Stored = uint16_t;
    static constexpr Stored MAGNITUDE = 0x7FFFu;
    static float value(Stored x) { return bits_as<float>(static_cast<uint32_t>(x) << 16); }
    static uint32_t magnitude(Stored x) { return static_cast<uint32_t>(x) << 16; }
};

template <> struct Element<FLOAT16> {
    using Stored = uint16_t;
    static constexpr Stored MAGNITUDE = 0x7FFFu;
    // After the shift, the exponent is too small by 112. The multiplication corrects it, for
    // denormals too.
    static float value(Stored x) {
        const float wide = bits_as<float>(static_cast<uint32_t>(x & MAGNITUDE) << 13) * 0x1p112f;
        return bits_as<float>(bits_as<uint32_t>(wide) | static_cast<uint32_t>(x & 0x8000u) << 16);
    }
    static uint32_t magnitude(Stored x) { return x >= 0x7C00u ? 0x7F800000u | x : bits_as<uint32_t>(value(x)); }
};

// Return the bits of the largest magnitude as float32. Magnitudes compare like their bit patterns,
// with infinities and NaN last, so an integer maximum also detects these.
template <Type T> uint32_t absmax(const void *source, size_t n) {
    using Stored = typename Element<T>::Stored;
    const auto *x = static_cast<const Stored *>(source);
    const auto larger = [](Stored most, Stored value) {
        const Stored magnitude = value & Element<T>::MAGNITUDE;
        return magnitude > most ? magnitude : most;
    };
    constexpr size_t PART = 128 / sizeof(Stored);
    Stored each[PART] = {}, most = 0;
    size_t i = 0;
    for (; i + PART <= n; i += PART) {
        ask_ahead(x + i, sizeof each);
        for (size_t k = 0; k < PART; ++k) each[k] = larger(each[k], x[i + k]);
    }
    for (; i < n; ++i) most = larger(most, x[i]);
    for (const Stored found : each) most = larger(most, found);
    return Element<T>::magnitude(most);
}

// Compute floor(u) + (r < u - floor(u)). The alternative floor(u + r) is biased for large |u|,
// since the sum is rounded.
template <Rounding R> inline float rounded(float u, uint32_t counter) {
    if (R == NEAREST) return __builtin_rintf(u);
    const float below = __builtin_floorf(u);
    if (R == FLOOR) return below;
    return below + (uniform(counter) < u - below ? 1.0f : 0.0f);
}

template <Rounding R> inline double rounded(double u, uint32_t counter) {
    if (R == NEAREST) return __builtin_rint(u);
    const double below = __builtin_floor(u);
    if (R == FLOOR) return below;
    return below + (static_cast<double>(uniform(counter)) < u - below ? 1.0 : 0.0);
}

template <Type T, Rounding R>
void quantize(const void *source, int8_t *target, size_t n, float scale, float levels, uint32_t counter, const void *next) {
    const auto *x = static_cast<const typename Element<T>::Stored *>(source);
    size_t i = 0;
#if defined(__AVX512DQ__)
    if constexpr (R == STOCHASTIC && T != FLOAT16) i = quantize_in_fixed_point(x, target, n, scale, levels, counter, next);
    counter += static_cast<uint32_t>(i) * WEYL;
#endif
    // In blocks: the compiler does not vectorize a loop that contains prefetches.
    constexpr size_t PART = 256;
    while (i < n) {
        const size_t end = n - i < PART ? n : i + PART;
        ask(static_cast<const typename Element<T>::Stored *>(next) + i, PART * sizeof *x);
        for (; i < end; ++i, counter += WEYL) {
            float q = rounded<R>(Element<T>::value(x[i]) / scale, counter);
            q = q > levels ? levels : q;
            q = q < -levels ? -levels : q;
            target[i] = static_cast<int8_t>(static_cast<int32_t>(q));
        }
    }
}

// In double, where both the grid spacing (at least 2**-149) and its inverse are exact.
inline double power_of_two(int32_t exponent) { return bits_as<double>(static_cast<int64_t>(exponent + 1023) << 52); }

template <Rounding R> void round_float(const float *source, float *target, size_t n, Grid grid, uint32_t counter) {
    for (size_t i = 0; i < n; ++i, counter += WEYL) {
        const uint32_t bits = bits_as<uint32_t>(source[i]);
        const int32_t own = static_cast<int32_t>(bits >> 23 & 0xFFu) - 127;
        const int32_t exponent = own > grid.e_min ? own : grid.e_min;
        const double u = static_cast<double>(source[i]) * power_of_two(grid.mantissa_bits - exponent);
        double y = rounded<R>(u, counter) * power_of_two(exponent - grid.mantissa_bits);
        y = y > grid.max ? grid.max : y;
        y = y < -grid.max ? -grid.max : y;
        // Use the sign of the source: -0.0 and values that round to zero retain their sign.
        const uint32_t signed_bits = (bits_as<uint32_t>(static_cast<float>(y)) & 0x7FFFFFFFu) | (bits & 0x80000000u);
        target[i] = bits_as<float>(own == 128 ? bits : signed_bits);
    }
}

void keep(uint8_t *target, size_t n, uint32_t least, uint32_t counter) {
    for (size_t i = 0; i < n; ++i, counter += WEYL) target[i] = mix(counter) >> 8 >= least ? 1 : 0;
}

} // namespace

extern const Kernels QSYNC_KERNELS;
const Kernels QSYNC_KERNELS = {
    {absmax<FLOAT32>, absmax<BFLOAT16>, absmax<FLOAT16>},
    {{quantize<FLOAT32, STOCHASTIC>, quantize<FLOAT32, NEAREST>, quantize<FLOAT32, FLOOR>},
     {quantize<BFLOAT16, STOCHASTIC>, quantize<BFLOAT16, NEAREST>, quantize<BFLOAT16, FLOOR>},
     {quantize<FLOAT16, STOCHASTIC>, quantize<FLOAT16, NEAREST>, quantize<FLOAT16, FLOOR>}},
    {round_float<STOCHASTIC>, round_float<NEAREST>, round_float<FLOOR>},
    keep,
};

} // namespace qsync
