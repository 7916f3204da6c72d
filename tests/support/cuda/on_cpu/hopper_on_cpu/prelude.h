// First include of CUTLASS 3.x kernels: threads on the CPU, as for 2.x, and Hopper's additions. The
// macros enable the instructions of sm_90a in CUTLASS's headers, which `hopper_cpu.py` replaces by
// calls.
#pragma once

#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define __CUDA_ARCH_FEAT_SM90_ALL
#define CUTLASS_ARCH_MMA_SM90_ENABLED
#define CUTLASS_ARCH_MMA_SM90A_ENABLED
#define CUTE_ARCH_MMA_SM90A_ENABLED
#define CUTE_ARCH_TMA_SM90_ENABLED
#define CUTE_ARCH_STSM_SM90_ENABLED
#define CUTE_ARCH_CLUSTER_SM90_ENABLED
#define CUTE_ARCH_ELECT_ONE_SM90_ENABLED
#define CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL 1
#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1

#include "../cutlass_on_cpu/prelude.h"
#include "cluster.h"
#include "tma.h"

inline void __threadfence() {}

extern "C" inline cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
extern "C" inline cudaError_t cudaDeviceGetAttribute(int *, cudaDeviceAttr, int) { on_cpu::fail("a device is asked what it has"); }
