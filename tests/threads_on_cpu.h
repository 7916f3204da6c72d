// The threads of a threadblock on the CPU: each is a context of its own that gives way at barriers and at what a warp does together, one
// runs at a time. What it cannot show: races between threads.
//
// Included after `threadIdx` and `blockDim` are declared, which it sets.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <utility>
#include <vector>

namespace on_cpu {

constexpr std::size_t STACK = 256 << 10;

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
    block.given.resize(size);
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
            threadIdx.x = i;
            swapcontext(&block.caller, &block.threads[i]);
            if (block.done[i]) --left;
        }
    }
}

// Every thread of a warp gives a value and gets those of all 32.
template <class Value>
std::vector<Value> exchange(Value const &value) {
    unsigned const mine = block.running, warp = mine / 32;
    block.given[mine].resize(sizeof(Value));
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
