// Declarations of CUDA device intrinsics for the host compiler. CUTLASS templates name them, but
// the host part of a library never calls them: it only queries sizes, parameters and grids of
// kernels.
//
// Include before CUTLASS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>

extern uint3 const threadIdx, blockIdx;
extern dim3 const blockDim, gridDim;

void __syncthreads();
void __syncwarp(unsigned = ~0u);
int __syncthreads_and(int);
int __shfl_sync(unsigned, int, int, int = 32);
float __fmaf_rn(float, float, float);
float __fmul_rn(float, float);
float __fadd_rn(float, float);
template <class Value>
Value __ldg(Value const *);

namespace cutlass {
namespace arch {
int LaneId();
int SmId();
} // namespace arch
} // namespace cutlass
