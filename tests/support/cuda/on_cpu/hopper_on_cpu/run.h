// GEMM kernel of CUTLASS 3.x with the C interface of cpp/cutlass/abi.h, run on the CPU.
#pragma once

#include "cutlass/numeric_types.h"

// Required by the adapter for kernels of both versions.
#include "cutlass/gemm/gemm.h"
#include "cutlass/epilogue/threadblock/epilogue_base_streamk.h"

#include "wgmma.h"

#include "gemm/gemm_sm90.cuh"
#include "exports_on_cpu.h"

#include "each_cluster.h"

namespace on_cpu {

template <class Config>
struct Gemm : qsync::Gemm<Config> {
    using Base = qsync::Gemm<Config>;
    using Kernel = typename Base::Kernel;

    static int run(qsync::GemmArguments const &x, void *workspace, cudaStream_t stream) {
        if (int const refused = Base::can_implement(x)) return refused;
        maps.clear();
        auto const given = Base::arguments(x);
        if (Kernel::initialize_workspace(given, workspace, stream) != cutlass::Status::kSuccess) fail("the workspace");
        each_cluster<Kernel>(Kernel::to_underlying_arguments(given, workspace), typename Config::Cluster{});
        return 0;
    }
};

} // namespace on_cpu

#define ON_CPU(Config, Name) EXPORTS_ON_CPU(on_cpu::Gemm<Config>, qsync::GemmArguments, Name)
