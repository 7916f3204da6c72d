// GEMM by CUTLASS 2.x, launched by CUDA's runtime: tensor cores of sm_75 to sm_89 (sm_90 runs them too, slower than its own), and the
// ordinary units everywhere.
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

    // The fields of the base class that say how many threadblocks fit, which need a device.
    struct Device : cutlass::gemm::device::GemmUniversalBase<Kernel> {
        using Parent = cutlass::gemm::device::GemmUniversalBase<Kernel>;
        static bool ready() { return Parent::init_device_props() == cutlass::Status::kSuccess; }
    };

    static std::int64_t workspace(GemmArguments const &x) {
        if (Device::ready()) {
            return static_cast<std::int64_t>(Device::get_workspace_size(arguments(x)));
        }
        // Without a device: what one threadblock a multiprocessor would take, for tests.
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
