// Kernels of CUTLASS 2.x as functions on the CPU: one threadblock after the other, each of its threads a context of its own that gives way at
// barriers and at what a warp does together. A host compiler takes CUTLASS's device code for ordinary functions; what is PTX there
// (loads, ldmatrix, mma) is in the headers under cutlass/arch here, which are found before CUTLASS's own.
//
// So tiles, layouts, predicates, pipelines and epilogues compute real numbers where no GPU is. What it cannot show: races between
// threads, since one runs at a time, and what the hardware does with a fragment other than PTX's documents say.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;

namespace on_cpu {

constexpr std::size_t STACK = 128 << 10;

struct Barrier {
    unsigned arrived = 0, generation = 0;
};

struct Block {
    std::vector<ucontext_t> threads;
    std::vector<char> done, stacks;
    std::vector<Barrier> warps;
    std::vector<std::vector<unsigned char>> given; // by each thread, to its warp
    Barrier all;
    ucontext_t caller;
    std::function<void()> body;
    unsigned running = 0;
};

static Block block;

inline void give_way() {
    unsigned const mine = block.running;
    swapcontext(&block.threads[mine], &block.caller);
}

inline void wait(Barrier &barrier, unsigned number) {
    unsigned const generation = barrier.generation;
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
    give_way();
}

inline void run(unsigned size, std::function<void()> body) {
    block.threads.assign(size, ucontext_t{});
    block.done.assign(size, 0);
    block.stacks.resize(size * STACK);
    block.warps.assign(size / 32, Barrier{});
    block.given.assign(size, {});
    block.all = Barrier{};
    block.body = std::move(body);
    blockDim = dim3(size);
    for (unsigned i = 0; i < size; ++i) {
        getcontext(&block.threads[i]);
        block.threads[i].uc_stack.ss_sp = block.stacks.data() + i * STACK;
        block.threads[i].uc_stack.ss_size = STACK;
        block.threads[i].uc_link = nullptr;
        makecontext(&block.threads[i], start, 0);
    }
    for (unsigned left = size, passes = 0; left; ++passes) {
        if (passes > 10000000) std::abort(); // threads that wait for each other
        // Backwards, so that nothing works only because thread 0 came first.
        for (unsigned i = size; i-- > 0;) {
            if (block.done[i]) continue;
            block.running = i;
            threadIdx = uint3{i, 0, 0};
            swapcontext(&block.caller, &block.threads[i]);
            if (block.done[i]) --left;
        }
    }
}

// Every thread of a warp gives a value and gets those of all 32.
template <class Value>
std::vector<Value> exchange(Value const &value) {
    unsigned const mine = block.running, warp = mine / 32;
    block.given[mine].assign(sizeof(Value), 0);
    std::memcpy(block.given[mine].data(), &value, sizeof(Value));
    wait(block.warps[warp], 32);
    std::vector<Value> all(32);
    for (unsigned lane = 0; lane < 32; ++lane) {
        std::memcpy(static_cast<void *>(&all[lane]), block.given[warp * 32 + lane].data(), sizeof(Value));
    }
    wait(block.warps[warp], 32);
    return all;
}

} // namespace on_cpu

inline void __syncthreads() { on_cpu::wait(on_cpu::block.all, blockDim.x); }
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
