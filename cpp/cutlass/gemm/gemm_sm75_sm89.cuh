// GEMM with CUTLASS 2.x, launched by the CUDA runtime: tensor cores of sm_75 to sm_89, and SIMT
// instructions on every architecture. sm_90 also runs these tensor-core kernels, slower than its
// own.
#pragma once

#include <algorithm>

#include "cutlass/gemm/device/gemm_universal_base.h"
#include "exports.cuh"
#include "gemm/gemm_2x.cuh"

namespace qsync {

template <class Config>
struct Gemm : GemmKernel<Config> {
    using typename GemmKernel<Config>::Kernel;
    using GemmKernel<Config>::arguments;

    // Access to the occupancy fields of the base class, whose initialization needs a device.
    struct Device : cutlass::gemm::device::GemmUniversalBase<Kernel> {
        using Parent = cutlass::gemm::device::GemmUniversalBase<Kernel>;
        static bool ready() { return Parent::init_device_props() == cutlass::Status::kSuccess; }
    };

    static std::int64_t workspace(GemmArguments const &x) {
        if (Device::ready()) {
            return static_cast<std::int64_t>(Device::get_workspace_size(arguments(x)));
        }
        // Without a device, assume one threadblock per multiprocessor (for tests).
        return static_cast<std::int64_t>(typename Kernel::Params(arguments(x), std::max(x.multiprocessors, 1), 1).get_workspace_size());
    }

    static int run(GemmArguments const &x, void *workspace, cudaStream_t stream) {
        int const refused = Gemm::can_implement(x);
        if (refused != 0) {
            return refused;
        }
        Device device;
        cutlass::Status const status = device.initialize(arguments(x), workspace, stream);
        return static_cast<int>(status == cutlass::Status::kSuccess ? device.run(stream) : status);
    }
};

} // namespace qsync

#define QSYNC_GEMM(Config, Name) QSYNC_LIBRARY(qsync::Gemm<Config>, qsync::GemmArguments, Name)
