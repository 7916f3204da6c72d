// CUDA kernels as functions on the CPU, without a GPU: threadblocks run one after the other, with
// threads from `threads_on_cpu.h`. Used for the kernels of cpp/cutlass/plain/quantizer.cuh and
// their launches.
#pragma once

#include <cmath>
#include <cstdint>

#define QSYNC_KERNELS
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(size) __attribute__((aligned(size)))

struct dim3 {
    unsigned x, y, z;
    explicit dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct __attribute__((aligned(8))) uint2 {
    std::uint32_t x, y;
};
struct __attribute__((aligned(16))) uint4 {
    std::uint32_t x, y, z, w;
};
inline uint2 make_uint2(std::uint32_t x, std::uint32_t y) { return {x, y}; }
inline uint4 make_uint4(std::uint32_t x, std::uint32_t y, std::uint32_t z, std::uint32_t w) { return {x, y, z, w}; }

using cudaStream_t = void *;
using cudaError_t = int;
inline const char *cudaGetErrorString(cudaError_t) { return "an error of the device"; }

static dim3 threadIdx, blockIdx, gridDim, blockDim;

#include "threads_on_cpu.h"

inline std::uint32_t __shfl_xor_sync(unsigned, std::uint32_t word, int lanes) {
    return on_cpu::exchange(word)[threadIdx.x % 32 ^ static_cast<unsigned>(lanes)];
}

namespace qsync {

template <class... Parameters, class... Given>
int launch(void (*kernel)(Parameters...), dim3 grid, unsigned threads, cudaStream_t, Given... given) {
    gridDim = grid;
    for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; ++x) {
            blockIdx = dim3(x, y);
            on_cpu::run(threads, [=] { kernel(static_cast<Parameters>(given)...); });
        }
    }
    return 0;
}

} // namespace qsync
