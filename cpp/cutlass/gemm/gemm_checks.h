// Argument checks of the GEMM kernels. CUTLASS checks sizes only: a misaligned pointer would pass
// there and fail on the device.
#pragma once

#include <cstdint>

#include "abi.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

namespace qsync {

inline bool aligned(const void *pointer, std::int64_t bytes) { return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0; }

// Check a matrix whose contiguous dimension has `extent` elements and is read in vectors of
// `alignment` elements. `stride` is the leading dimension in elements.
template <class Element, int alignment>
cutlass::Status matrix_status(const void *pointer, std::int64_t stride, std::int64_t extent) {
    if (pointer == nullptr || stride < extent) {
        return cutlass::Status::kErrorInvalidProblem;
    }
    bool const suits = aligned(pointer, alignment * cutlass::sizeof_bits<Element>::value / 8) && stride % alignment == 0 && extent % alignment == 0;
    return suits ? cutlass::Status::kSuccess : cutlass::Status::kErrorMisalignedOperand;
}

// Check a vector of scales or a bias. `wanted`: null is an error; `known`: the kernel supports it.
inline cutlass::Status vector_status(const float *pointer, bool wanted, bool known) {
    if (pointer == nullptr) {
        return wanted ? cutlass::Status::kErrorInvalidProblem : cutlass::Status::kSuccess;
    }
    if (!known) {
        return cutlass::Status::kErrorNotSupported;
    }
    return aligned(pointer, sizeof(float)) ? cutlass::Status::kSuccess : cutlass::Status::kErrorMisalignedOperand;
}

// `Config` is the structure that `gemm_source` (backend/cuda/codegen.py) generates.
template <class Config>
cutlass::Status gemm_status(GemmArguments const &x) {
    if (x.m < 1 || x.n < 1 || x.k < 1 || x.k > Config::largest_k || x.split < 0 || (x.split > 1 && !Config::stream_k)) {
        return cutlass::Status::kErrorInvalidProblem;
    }
    using Row = cutlass::layout::RowMajor;
    constexpr bool a_by_rows = std::is_same<typename Config::LayoutA, Row>::value;
    constexpr bool b_by_rows = std::is_same<typename Config::LayoutB, Row>::value;
    cutlass::Status const found[] = {
        matrix_status<typename Config::A, Config::alignment>(x.a, x.lda, a_by_rows ? x.k : x.m),
        matrix_status<typename Config::B, Config::alignment>(x.b, x.ldb, b_by_rows ? x.n : x.k),
        matrix_status<typename Config::Output, Config::out_alignment>(x.d, x.ldd, x.n),
        vector_status(x.a_scale, x.a_scale_per_row, Config::scaled),
        vector_status(x.b_scale, x.b_scale_per_column, Config::scaled),
        vector_status(x.bias, false, Config::biased),
    };
    for (cutlass::Status status : found) {
        if (status != cutlass::Status::kSuccess) {
            return status;
        }
    }
    return cutlass::Status::kSuccess;
}

} // namespace qsync
