// CPU replacement of CUTLASS's header of this name: flags between threadblocks. Threadblocks run
// one after the other, so a flag is already set or never will be.
#pragma once

#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "cutlass/functional.h"

// Keeps the types of newer kernels, which do not run with this header.
#define Barrier DeviceBarrier
#include_next "cutlass/barrier.h"
#undef Barrier

namespace cutlass {

template <>
struct atomic_add<float> {
    void operator()(float *pointer, float const &value) { *pointer += value; }
};

template <>
struct atomic_add<int> {
    void operator()(int *pointer, int const &value) { *pointer += value; }
};

struct Barrier {
    using T = int;

    static int &flag(void *flags, int index) { return static_cast<int *>(flags)[index]; }

    static void check(bool met) {
        if (!met) std::abort();
        __syncthreads();
    }

    static void wait_lt(void *flags, int, int index, int count) { check(flag(flags, index) >= count); }
    static void wait_eq(void *flags, int, int index, T value = 1) { check(flag(flags, index) == value); }

    static void wait_eq_reset(void *flags, int thread, int index, T value = 1) {
        check(flag(flags, index) == value);
        if (thread == 0) flag(flags, index) = 0;
        __syncthreads();
    }

    static void arrive_inc(void *flags, int thread, int index, int value = 1) {
        __syncthreads();
        if (thread == 0) flag(flags, index) += value;
    }

    static void arrive_range_inc(void *flags, int thread, int first, int count = 1, int value = 1) {
        __syncthreads();
        if (thread < count) flag(flags, first + thread) += value;
    }
};

} // namespace cutlass
