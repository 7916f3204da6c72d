// GEMM for sm_70 by CUTLASS 2.x: FP16 on Volta's tensor cores, INT8 by dp4a and FP32 on the ordinary units.
//
// nvcc 13 has no sm_70, so the text of a kernel is compiled twice and the parts are joined (see backend/cuda/toolchain.py):
// NVRTC of CUDA 12 makes the machine code of `qsync_kernel` from it, and the host compiler all functions of the C interface, with the
// machine code as bytes in the library. nvcc of CUDA 12 compiles it as it does those of later architectures.
//
// Invariant: both parts take the kernel's type, hence the layout of its parameters, from the same `Config` and gemm_2x.cuh.
#pragma once

#if defined(__CUDACC_RTC__)

#include "gemm/gemm_2x.cuh"

#define QSYNC_GEMM(Config, Name)                                                                                       \
    extern "C" __global__ void __launch_bounds__(qsync::GemmKernel<Config>::Kernel::kThreadCount)                      \
        qsync_kernel(__grid_constant__ qsync::GemmKernel<Config>::Kernel::Params const parameters) {                   \
        using Kernel = qsync::GemmKernel<Config>::Kernel;                                                              \
        extern __shared__ int qsync_storage[];                                                                         \
        Kernel::invoke(parameters, *reinterpret_cast<Kernel::SharedStorage *>(qsync_storage));                         \
    }

#elif defined(__CUDACC__)

#include "gemm/gemm_sm75_sm89.cuh"

#else

#include "gemm/host_half.h"

#include "gemm/driver.h"
#include "exports.cuh"
#include "gemm/gemm_2x.cuh"

namespace qsync {

template <class Config>
struct HostGemm : GemmKernel<Config> {
    using typename GemmKernel<Config>::Kernel;
    using GemmKernel<Config>::arguments;

    static int load(int device, Loaded &loaded) {
        return qsync::load(device, Kernel::kThreadCount, HostGemm::shared_memory(), loaded);
    }

    static typename Kernel::Params parameters(GemmArguments const &x, Loaded const &loaded) {
        return typename Kernel::Params(arguments(x), loaded.multiprocessors, loaded.resident);
    }

    static std::int64_t workspace(GemmArguments const &x) {
        Loaded loaded;
        if (load(x.device, loaded) != 0) {
            // Without a device: what one threadblock a multiprocessor would take, for tests.
            loaded.multiprocessors = x.multiprocessors > 0 ? x.multiprocessors : 1;
            loaded.resident = 1;
        }
        return static_cast<std::int64_t>(parameters(x, loaded).get_workspace_size());
    }

    static int run(GemmArguments const &x, void *workspace, cudaStream_t stream) {
        if (int const refused = HostGemm::can_implement(x)) {
            return refused;
        }
        Loaded loaded;
        if (int const status = load(x.device, loaded)) {
            return status;
        }
        typename Kernel::Params given = parameters(x, loaded);
        if (workspace == nullptr && given.get_workspace_size() != 0) {
            return static_cast<int>(cutlass::Status::kErrorWorkspaceNull);
        }
        Current const current(loaded.context);
        if (current.status != 0) {
            return current.status;
        }
        if (given.get_workspace_size() != 0) {
            cutlass::Status const status = given.init_workspace(workspace, stream);
            if (status != cutlass::Status::kSuccess) {
                return static_cast<int>(status);
            }
        }
        return launch(loaded, given.get_grid_dims(), Kernel::kThreadCount, HostGemm::shared_memory(), stream, &given);
    }
};

} // namespace qsync

// How many bytes of parameters the host's half passes: the machine code says what its half takes.
#define QSYNC_GEMM(Config, Name)                                                                                       \
    QSYNC_EXPORT int qsync_parameters() { return sizeof(qsync::GemmKernel<Config>::Kernel::Params); }                  \
    QSYNC_FUNCTIONS(qsync::HostGemm<Config>, qsync::GemmArguments, Name, qsync::driver_text)

#endif
