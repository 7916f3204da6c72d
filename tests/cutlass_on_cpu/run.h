// Runs a GEMM kernel of CUTLASS 2.x on the CPU, with the arguments of cpp/cutlass/abi.h.
#pragma once

#include "gemm_sm75_sm89.cuh"

namespace on_cpu {

template <class Config>
int gemm(qsync::GemmArguments const &x, int multiprocessors) {
    using Gemm = qsync::Gemm<Config>;
    using Kernel = typename Gemm::Kernel;
    if (int const refused = Gemm::can_implement(x)) return refused;
    typename Kernel::Params params(Gemm::arguments(x), multiprocessors, 1);
    std::vector<unsigned char> workspace(params.get_workspace_size() + 16, 0);
    if constexpr (Config::stream_k) params.init_workspace(workspace.data(), nullptr);
    // Bytes that are NaN in every format: what is read before it was written shows.
    std::vector<unsigned char> memory(sizeof(typename Kernel::SharedStorage) + 1024);
    auto const start = (reinterpret_cast<std::uintptr_t>(memory.data()) + 1023) / 1024 * 1024;
    auto *storage = reinterpret_cast<typename Kernel::SharedStorage *>(start);
    gridDim = params.get_grid_dims();
    for (unsigned z = 0; z < gridDim.z; ++z) {
        for (unsigned y = 0; y < gridDim.y; ++y) {
            for (unsigned i = 0; i < gridDim.x; ++i) {
                blockIdx = uint3{i, y, z};
                std::memset(static_cast<void *>(storage), 0xff, sizeof(*storage));
                run(Kernel::kThreadCount, [&] { Kernel::invoke(params, *storage); });
            }
        }
    }
    return 0;
}

} // namespace on_cpu
