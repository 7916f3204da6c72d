// Dequantization epilogue of GEMM and convolution: scales, bias, cast.
//
// Invariant: identical roundings in identical order on every architecture, written with intrinsics
// so that compiler flags do not change them:
//     y = fma(float(sum) * a_scale, b_scale, bias)
// with the product and the fma each rounded to FP32, followed by one rounding to the output dtype.
// tests/support/cuda/on_cpu/cuda_emulation.py emulates it on the CPU.
#pragma once

#include "cutlass/array.h"
#include "cutlass/cutlass.h"

namespace qsync {

template <bool scaled, bool biased>
CUTLASS_DEVICE float finished(float sum, float a_scale, float b_scale, float bias) {
    float y = sum;
    if constexpr (scaled && biased) {
        y = __fmaf_rn(__fmul_rn(sum, a_scale), b_scale, bias);
    } else if constexpr (scaled) {
        y = __fmul_rn(__fmul_rn(sum, a_scale), b_scale);
    } else if constexpr (biased) {
        y = __fadd_rn(sum, bias);
    }
    return y;
}

// `finished` on arrays, in the form that CUTLASS 3.x requires of functors.
template <bool scaled, bool biased>
struct Finish {
    // Sm90Compute looks for hyperparameters in the functor of a single element; there are none.
    template <class T>
    struct Apply {};

    template <int count>
    struct Apply<cutlass::Array<float, count>> {
        using Values = cutlass::Array<float, count>;
        CUTLASS_DEVICE Values operator()(Values const &sum, Values const &a_scale, Values const &b_scale, Values const &bias) const {
            Values y;
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < count; ++i) {
                y[i] = finished<scaled, biased>(sum[i], a_scale[i], b_scale[i], bias[i]);
            }
            return y;
        }
    };
};

} // namespace qsync
