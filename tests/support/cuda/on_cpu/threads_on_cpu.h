// Threads of one or several threadblocks on the CPU: each is a context that yields at barriers and
// warp-level operations; one runs at a time. It cannot detect races between threads.
//
// Include after the declarations of `threadIdx` and `blockDim`, which it sets.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
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
    std::vector<char> done;
    std::unique_ptr<char[]> stacks; // left uninitialized
    std::size_t room = 0;
    std::vector<Barrier> warps;
    std::vector<std::vector<unsigned char>> given; // values of each thread in `exchange`
    std::vector<Barrier> all;                      // per threadblock
    ucontext_t caller;
    std::function<void()> body;
    unsigned running = 0, size = 0;
};

static Block block;

[[noreturn]] inline void fail(char const *what) {
    std::fprintf(stderr, "on the CPU: %s\n", what);
    std::abort();
}

// Index of the running thread's threadblock.
inline unsigned current() { return block.running / block.size; }

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

// Runs `body` in the threads of `blocks` concurrent threadblocks; `enter(number)` is called before
// a thread of another threadblock continues.
inline void run(unsigned size, std::function<void()> body, unsigned blocks = 1, std::function<void(unsigned)> const &enter = {}) {
    unsigned const count = size * blocks;
    block.threads.assign(count, ucontext_t{});
    block.done.assign(count, 0);
    if (block.room < count * STACK) block.stacks.reset(new char[block.room = count * STACK]);
    block.warps.assign(count / 32, Barrier{});
    block.given.resize(count);
    block.all.assign(blocks, Barrier{});
    block.body = std::move(body);
    block.size = size;
    blockDim = dim3(size);
    for (unsigned i = 0; i < count; ++i) {
        getcontext(&block.threads[i]);
        block.threads[i].uc_stack.ss_sp = block.stacks.get() + i * STACK;
        block.threads[i].uc_stack.ss_size = STACK;
        block.threads[i].uc_link = nullptr;
        makecontext(&block.threads[i], start, 0);
    }
    unsigned entered = blocks;
    for (unsigned left = count, passes = 0; left; ++passes) {
        if (passes > 10000000) fail("threads wait for each other");
        // Reverse order detects code that relies on thread 0 to run first.
        for (unsigned i = count; i-- > 0;) {
            if (block.done[i]) continue;
            block.running = i;
            threadIdx.x = i % size;
            if (enter && i / size != entered) enter(entered = i / size);
            swapcontext(&block.caller, &block.threads[i]);
            if (block.done[i]) --left;
        }
    }
}

// Returns the values of all 32 threads of the warp.
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

inline void __syncthreads() { on_cpu::wait(on_cpu::block.all[on_cpu::current()], blockDim.x); }
