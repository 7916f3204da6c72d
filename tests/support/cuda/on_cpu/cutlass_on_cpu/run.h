// GEMM kernel of CUTLASS 2.x with the C interface of cpp/cutlass/abi.h, run on the CPU.
#pragma once

#include "gemm/gemm_sm75_sm89.cuh"
#include "exports_on_cpu.h"

namespace on_cpu {

template <class Config>
struct Gemm : qsync::Gemm<Config> {
    using Base = qsync::Gemm<Config>;
    using Kernel = typename Base::Kernel;

    static typename Kernel::Params params(qsync::GemmArguments const &x) {
        return typename Kernel::Params(Base::arguments(x), std::max(x.multiprocessors, 1), 1);
    }

    static std::int64_t workspace(qsync::GemmArguments const &x) { return static_cast<std::int64_t>(params(x).get_workspace_size()); }

    static int run(qsync::GemmArguments const &x, void *workspace, cudaStream_t) {
        if (int const refused = Base::can_implement(x)) return refused;
        auto given = params(x);
        if (given.init_workspace(workspace) != cutlass::Status::kSuccess) std::abort();
        std::vector<unsigned char> memory(sizeof(typename Kernel::SharedStorage) + 1024);
        auto const start = (reinterpret_cast<std::uintptr_t>(memory.data()) + 1023) / 1024 * 1024;
        auto *storage = reinterpret_cast<typename Kernel::SharedStorage *>(start);
        gridDim = given.get_grid_dims();
        for (unsigned z = 0; z < gridDim.z; ++z) {
            for (unsigned y = 0; y < gridDim.y; ++y) {
                for (unsigned i = 0; i < gridDim.x; ++i) {
                    blockIdx = uint3{i, y, z};
                    // NaN in every float format, to detect reads of unwritten memory.
                    std::memset(static_cast<void *>(storage), 0xff, sizeof(*storage));
                    on_cpu::run(Kernel::kThreadCount, [&] { Kernel::invoke(given, *storage); });
                }
            }
        }
        return 0;
    }
};

} // namespace on_cpu

#define ON_CPU(Config, Name) EXPORTS_ON_CPU(on_cpu::Gemm<Config>, qsync::GemmArguments, Name)
