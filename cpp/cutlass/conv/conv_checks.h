// Argument checks of the convolution kernels; gemm_checks.h explains why the checks of CUTLASS are
// not sufficient.
#pragma once

#include <cstdint>

#include "abi.h"
#include "cutlass/conv/convolution.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

namespace qsync {

using cutlass::conv::Operator;

// Return the output size of a convolution along one dimension.
inline std::int64_t convolved(std::int64_t size, std::int64_t filter, std::int64_t padding, std::int64_t stride, std::int64_t dilation) {
    return (size + 2 * padding - dilation * (filter - 1) - 1) / stride + 1;
}

inline bool geometry_fits(ConvArguments const &x) {
    std::int32_t const sizes[] = {x.n, x.h, x.w, x.c, x.k, x.r, x.s, x.p, x.q, x.stride_h, x.stride_w, x.dilation_h, x.dilation_w};
    for (std::int32_t size : sizes) {
        if (size < 1) {
            return false;
        }
    }
    return x.pad_h >= 0 && x.pad_w >= 0 && x.split >= 0 && x.p == convolved(x.h, x.r, x.pad_h, x.stride_h, x.dilation_h) &&
           x.q == convolved(x.w, x.s, x.pad_w, x.stride_w, x.dilation_w);
}

// Return whether a pointer is not null and aligned to `bytes`.
template <int bytes>
bool tensor_suits(const void *pointer) {
    return pointer != nullptr && reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

// `Config` is the structure that `conv_source` (backend/cuda/codegen.py) generates.
template <class Config>
cutlass::Status conv_status(ConvArguments const &x) {
    constexpr int operand_bytes = Config::alignment * cutlass::sizeof_bits<typename Config::A>::value / 8;
    constexpr int output_bytes = Config::out_alignment * cutlass::sizeof_bits<typename Config::Output>::value / 8;
    constexpr bool fprop = Config::operation == Operator::kFprop;
    if (!geometry_fits(x)) {
        return cutlass::Status::kErrorInvalidProblem;
    }
    if (!tensor_suits<operand_bytes>(x.a) || !tensor_suits<operand_bytes>(x.b) || !tensor_suits<output_bytes>(x.d)) {
        return cutlass::Status::kErrorMisalignedOperand;
    }
    // In dgrad and wgrad, both channel counts are the contiguous dimension of an operand. The
    // contiguous dimension of the output has its own alignment.
    if (x.c % Config::alignment != 0 || (!fprop && x.k % Config::alignment != 0) || (fprop ? x.k : x.c) % Config::out_alignment != 0) {
        return cutlass::Status::kErrorMisalignedOperand;
    }
    bool const scales = x.a_scale != nullptr || x.b_scale != nullptr;
    bool const per_channel = x.b_scale_per_channel != 0, biased = x.bias != nullptr;
    if ((scales && !Config::scaled) || (biased && !Config::biased) || ((per_channel || biased) && !fprop)) {
        return cutlass::Status::kErrorNotSupported;
    }
    if (per_channel && x.b_scale == nullptr) {
        return cutlass::Status::kErrorInvalidProblem;
    }
    bool const strided = x.stride_h != 1 || x.stride_w != 1;
    if (Config::operation == Operator::kDgrad && strided != Config::strided) {
        return cutlass::Status::kErrorNotSupported;
    }
    if (x.split > 1 && !Config::splits) {
        return cutlass::Status::kErrorNotSupported;
    }
    return cutlass::Status::kSuccess;
}

} // namespace qsync
