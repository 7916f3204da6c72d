// CUDA kernels as functions on the CPU, one threadblock after the other, one thread at a time: each thread is a context of its own that gives
// way at barriers and shuffles. So that the kernels of cpp/cutlass/quantizer.cuh, and how they are launched, run where no GPU is.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <ucontext.h>
#include <vector>

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
struct uint2 {
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

namespace on_cpu {

constexpr std::size_t STACK = 256 << 10;

struct Barrier {
    unsigned arrived = 0, generation = 0;
};

struct Block {
    std::vector<ucontext_t> threads;
    std::vector<char> done, stacks;
    std::vector<Barrier> warps;
    std::vector<std::uint32_t> words;
    Barrier all;
    ucontext_t caller;
    std::function<void()> body;
    unsigned running = 0;
};

static Block block;

inline void give_way() {
    const unsigned before = block.running;
    swapcontext(&block.threads[before], &block.caller);
    block.running = before;
    threadIdx.x = before;
}

inline void wait(Barrier &barrier, unsigned number) {
    const unsigned generation = barrier.generation;
    if (++barrier.arrived == number) {
        barrier.arrived = 0;
        ++barrier.generation;
        return;
    }
    while (barrier.generation == generation) give_way();
}

inline void start() {
    block.body();
    block.done[block.running] = 1;
    swapcontext(&block.threads[block.running], &block.caller);
}

inline void run(unsigned size) {
    block.threads.assign(size, ucontext_t{});
    block.done.assign(size, 0);
    block.stacks.resize(size * STACK);
    block.warps.assign(size / 32, Barrier{});
    block.words.assign(size, 0);
    block.all = Barrier{};
    for (unsigned i = 0; i < size; ++i) {
        getcontext(&block.threads[i]);
        block.threads[i].uc_stack.ss_sp = block.stacks.data() + i * STACK;
        block.threads[i].uc_stack.ss_size = STACK;
        block.threads[i].uc_link = nullptr;
        makecontext(&block.threads[i], start, 0);
    }
    for (unsigned left = size, passes = 0; left; ++passes) {
        if (passes > 1000000) std::abort(); // threads that wait for each other
        // Backwards, so that nothing works only because thread 0 came first.
        for (unsigned i = size; i-- > 0;) {
            if (block.done[i]) continue;
            block.running = i;
            threadIdx.x = i;
            swapcontext(&block.caller, &block.threads[i]);
            if (block.done[i]) --left;
        }
    }
}

} // namespace on_cpu

inline void __syncthreads() { on_cpu::wait(on_cpu::block.all, blockDim.x); }

inline std::uint32_t __shfl_xor_sync(unsigned, std::uint32_t word, int lanes) {
    const unsigned mine = threadIdx.x;
    on_cpu::block.words[mine] = word;
    on_cpu::wait(on_cpu::block.warps[mine / 32], 32);
    const std::uint32_t other = on_cpu::block.words[mine ^ static_cast<unsigned>(lanes)];
    on_cpu::wait(on_cpu::block.warps[mine / 32], 32);
    return other;
}

namespace qsync {

template <class... Parameters, class... Given>
int launch(void (*kernel)(Parameters...), dim3 grid, unsigned threads, cudaStream_t, Given... given) {
    gridDim = grid;
    blockDim = dim3(threads);
    for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; ++x) {
            blockIdx = dim3(x, y);
            on_cpu::block.body = [=] { kernel(static_cast<Parameters>(given)...); };
            on_cpu::run(threads);
        }
    }
    return 0;
}

} // namespace qsync
