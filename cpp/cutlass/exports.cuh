// Exported C functions of every kernel library, defined by one macro so that none is missing. See
// backend/cuda/kernel_build/library.py.
//
// `Kernel` has the static members
//     int can_implement(Arguments const &)
//     std::int64_t workspace(Arguments const &)
//     int run(Arguments const &, void *workspace, cudaStream_t)
//     int shared_memory()
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "abi.h"
#include "cutlass/cutlass.h"

// Libraries are compiled with hidden visibility, so that two of them in one process share no
// symbol.
#define QSYNC_EXPORT extern "C" __attribute__((visibility("default")))

// `Text` converts a status to a message.
#define QSYNC_FUNCTIONS(Kernel, Arguments, Name, Text)                                                                 \
    QSYNC_EXPORT int qsync_abi() { return QSYNC_ABI_VERSION; }                                                         \
    QSYNC_EXPORT const char *qsync_name() { return Name; }                                                             \
    QSYNC_EXPORT int qsync_can_implement(const Arguments *arguments) { return Kernel::can_implement(*arguments); }     \
    QSYNC_EXPORT std::int64_t qsync_workspace(const Arguments *arguments) { return Kernel::workspace(*arguments); }    \
    QSYNC_EXPORT int qsync_run(const Arguments *arguments, void *workspace, void *stream) {                            \
        return Kernel::run(*arguments, workspace, static_cast<cudaStream_t>(stream));                                  \
    }                                                                                                                  \
    QSYNC_EXPORT int qsync_shared_memory() { return Kernel::shared_memory(); }                                         \
    QSYNC_EXPORT const char *qsync_error(int status) { return Text(status); }

#define QSYNC_LIBRARY(Kernel, Arguments, Name)                                                                         \
    QSYNC_FUNCTIONS(Kernel, Arguments, Name, [](int status) {                                                          \
        return cutlass::cutlassGetStatusString(static_cast<cutlass::Status>(status));                                  \
    })
