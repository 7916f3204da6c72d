// Activation functions of the GEMM epilogue, in float32. The formulas have no branch and no call,
// so that the compiler vectorizes them, and only operations that all ISA variants round
// identically.
#pragma once

#include "gemm/gemm.h"

namespace qsync {
namespace {

inline float clamped(float x, float most) {
    const float low = x < -most ? -most : x; // NaN passes through
    return low > most ? most : low;
}

// erf and tanh as rational approximations in FP32 (coefficients from Eigen's float functions), with
// an absolute error of at most 5e-7. Beyond +-MOST they are +-1.
inline float erf_of(float x) {
    constexpr float MOST = 4.0f;
    const float z = clamped(x, MOST), s = z * z;
    float p = -2.72614225801306e-10f;
    p = p * s + 2.77068142495902e-08f;
    p = p * s - 2.10102402082508e-06f;
    p = p * s - 5.69250639462346e-05f;
    p = p * s - 7.34990630326855e-04f;
    p = p * s - 2.95459980854025e-03f;
    p = p * s - 1.60960333262415e-02f;
    float q = -1.45660718464996e-05f;
    q = q * s - 2.13374055278905e-04f;
    q = q * s - 1.68282697438203e-03f;
    q = q * s - 7.37332916720468e-03f;
    q = q * s - 1.42647390514189e-02f;
    const float found = z * p / q;
    return x >= MOST ? 1.0f : x <= -MOST ? -1.0f : found;
}

inline float tanh_of(float x) {
    constexpr float MOST = 7.90531110763549805f;
    const float z = clamped(x, MOST), s = z * z;
    float p = -2.76076847742355e-16f;
    p = p * s + 2.00018790482477e-13f;
    p = p * s - 8.60467152213735e-11f;
    p = p * s + 5.12229709037114e-08f;
    p = p * s + 1.48572235717979e-05f;
    p = p * s + 6.37261928875436e-04f;
    p = p * s + 4.89352455891786e-03f;
    float q = 1.19825839466702e-06f;
    q = q * s + 1.18534705686654e-04f;
    q = q * s + 2.26843463243900e-03f;
    q = q * s + 4.89352518554385e-03f;
    const float found = z * p / q;
    return x >= MOST ? 1.0f : x <= -MOST ? -1.0f : found;
}

template <std::size_t COUNT> void activate(float (&x)[COUNT], Activation how) {
    switch (how) {
    case RELU:
        for (std::size_t i = 0; i < COUNT; ++i) x[i] = x[i] < 0.0f ? 0.0f : x[i];
        break;
    case GELU:
        for (std::size_t i = 0; i < COUNT; ++i) x[i] = 0.5f * x[i] * (1.0f + erf_of(x[i] * 0.70710678118654752f));
        break;
    case GELU_TANH:
        for (std::size_t i = 0; i < COUNT; ++i)
            x[i] = 0.5f * x[i] * (1.0f + tanh_of(0.79788456080286536f * (x[i] + 0.044715f * (x[i] * x[i] * x[i]))));
        break;
    default:
        break;
    }
}

} // namespace
} // namespace qsync
