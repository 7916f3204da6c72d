// GEMM for sm_70 with CUTLASS 2.x: FP16 on the tensor cores of Volta, INT8 with dp4a, FP32 with
// SIMT instructions.
//
// nvcc 13 does not support sm_70, so the source of a kernel is compiled twice and the parts are
// linked (see backend/cuda/toolchain.py): NVRTC of CUDA 12 compiles the machine code of
// `qsync_kernel`, and the host compiler compiles all functions of the C interface, with the machine
// code embedded in the library. nvcc of CUDA 12 compiles it in the same way as for later
// architectures.
//
// Invariant: both parts derive the kernel type, hence the layout of its parameters, from the same
// `Config` and gemm_2x.cuh.
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
            // Without a device, assume one threadblock per multiprocessor (for tests).
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

// Size of the kernel parameters in the host part, to be compared with the size in the machine code.
#define QSYNC_GEMM(Config, Name)                                                                                       \
    QSYNC_EXPORT int qsync_parameters() { return sizeof(qsync::GemmKernel<Config>::Kernel::Params); }                  \
    QSYNC_FUNCTIONS(qsync::HostGemm<Config>, qsync::GemmArguments, Name, qsync::driver_text)

#endif
