// Convolution kernel of CUTLASS 2.x with the C interface of cpp/cutlass/abi.h, run on the CPU.
#pragma once

#include "conv/conv_sm75_sm89.cuh"
#include "exports_on_cpu.h"

namespace on_cpu {

template <class Config>
struct Conv : qsync::Conv<Config> {
    using Base = qsync::Conv<Config>;
    using Gradient = typename Base::BaseKernel;

    template <class Kernel>
    static void each_threadblock(typename Kernel::Params const &params, dim3 grid) {
        std::vector<unsigned char> memory(sizeof(typename Kernel::SharedStorage) + 1024);
        auto const start = (reinterpret_cast<std::uintptr_t>(memory.data()) + 1023) / 1024 * 1024;
        auto *storage = reinterpret_cast<typename Kernel::SharedStorage *>(start);
        gridDim = grid;
        for (unsigned z = 0; z < grid.z; ++z) {
            for (unsigned y = 0; y < grid.y; ++y) {
                for (unsigned x = 0; x < grid.x; ++x) {
                    blockIdx = uint3{x, y, z};
                    // NaN in every float format, to detect reads of unwritten memory.
                    std::memset(static_cast<void *>(storage), 0xff, sizeof(*storage));
                    on_cpu::run(Kernel::kThreadCount, [&] { Kernel{}(params, *storage); });
                }
            }
        }
    }

    static int run(qsync::ConvArguments const &x, void *workspace, cudaStream_t) {
        if (int const refused = Base::can_implement(x)) return refused;
        if constexpr (Base::fprop) {
            auto const params = Base::visited(x);
            each_threadblock<typename Base::Visited>(params, Base::Visited::Swizzle::get_grid_shape(params.tiles));
        } else {
            auto const given = Base::stock(x);
            if (std::int64_t const bytes = Base::workspace(x)) std::memset(workspace, 0, static_cast<std::size_t>(bytes));
            typename Gradient::Params const params(given, static_cast<int *>(workspace));
            each_threadblock<Gradient>(params, typename Gradient::ThreadblockSwizzle{}.get_grid_shape(params.grid_tiled_shape));
        }
        return 0;
    }
};

} // namespace on_cpu

#define ON_CPU(Config, Name) EXPORTS_ON_CPU(on_cpu::Conv<Config>, qsync::ConvArguments, Name)
