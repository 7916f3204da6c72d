// Convolution kernel of CUTLASS 3.x with the C interface of cpp/cutlass/abi.h, run on the CPU.
#pragma once

// Precedes wgmma.h, which uses its types.
#include "cutlass/numeric_types.h"

#include "wgmma.h"

#include "conv/conv_sm90.cuh"
#include "exports_on_cpu.h"

#include "each_cluster.h"

namespace on_cpu {

template <class Config>
struct Conv : qsync::Conv<Config> {
    using Base = qsync::Conv<Config>;
    using Kernel = typename Base::Kernel;

    static int run(qsync::ConvArguments const &x, void *workspace, cudaStream_t) {
        if (int const refused = Base::can_implement(x)) return refused;
        maps.clear();
        each_cluster<Kernel>(Kernel::to_underlying_arguments(Base::arguments(x), workspace), typename Config::Cluster{});
        return 0;
    }
};

} // namespace on_cpu

#define ON_CPU(Config, Name) EXPORTS_ON_CPU(on_cpu::Conv<Config>, qsync::ConvArguments, Name)
