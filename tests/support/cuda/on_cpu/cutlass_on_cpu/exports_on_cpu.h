// C interface of cpp/cutlass/abi.h for kernels on the CPU. One library has several, so that headers
// are compiled once; function names end with `Name`. `Own` is the kernel's structure.
#pragma once

#define EXPORTS_ON_CPU(Own, Arguments, Name)                                                                           \
    extern "C" {                                                                                                       \
    int can_implement_##Name(Arguments const *x) { return Own::can_implement(*x); }                                    \
    std::int64_t workspace_##Name(Arguments const *x) { return Own::workspace(*x); }                                   \
    int run_##Name(Arguments const *x, void *workspace, void *) { return Own::run(*x, workspace, nullptr); }           \
    int shared_memory_##Name() { return Own::shared_memory(); }                                                        \
    char const *error_##Name(int status) { return cutlass::cutlassGetStatusString(static_cast<cutlass::Status>(status)); } \
    }
