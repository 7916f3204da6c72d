// Kernels of CUTLASS 2.x as functions on the CPU: threadblocks run one after the other. Each thread
// is a context that yields at barriers and warp-level operations. The host compiler compiles
// CUTLASS's device code as ordinary functions; headers under cutlass/arch replace those with PTX
// (loads, ldmatrix, mma) and precede CUTLASS's own.
//
// Tiles, layouts, predicates, pipelines and epilogues thus compute real numbers without a GPU. It
// cannot detect races, since one thread runs at a time, or deviations of the hardware's fragments
// from the PTX ISA.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;

#include "../threads_on_cpu.h"

inline void __syncwarp(unsigned = ~0u) { on_cpu::wait(on_cpu::block.warps[on_cpu::block.running / 32], 32); }
inline int __syncthreads_and(int) { std::abort(); }
inline int __shfl_sync(unsigned, int value, int lane, int = 32) { return on_cpu::exchange(value)[lane]; }

inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
template <class Value>
Value __ldg(Value const *pointer) { return *pointer; }

namespace cutlass {
namespace arch {
inline int LaneId() { return static_cast<int>(threadIdx.x % 32); }
inline int SmId() { return 0; }
} // namespace arch
} // namespace cutlass

extern "C" inline cudaError_t cudaMemsetAsync(void *pointer, int value, std::size_t bytes, cudaStream_t) {
    std::memset(pointer, value, bytes);
    return cudaSuccess;
}
