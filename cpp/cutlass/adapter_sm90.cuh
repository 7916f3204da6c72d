// Common parts of the CUTLASS 3.x kernels for Hopper: the collective epilogue, hardware
// information, and the exported functions on top of a CUTLASS device adapter.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "cutlass/arch/mma.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/kernel_hardware_info.hpp"

namespace qsync {

// Epilogue that applies `Tree` (scales and bias) and stores the result. `Layout` is the layout of
// the result.
template <class Config, class Layout, class Tree>
using EpilogueSm90 = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Config::Tile, typename Config::Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, typename Config::Accumulator, float,
    void, Layout, Config::out_alignment, typename Config::Output, Layout, Config::out_alignment,
    typename Config::EpilogueSchedule, Tree>::CollectiveOp;

template <class Arguments>
cutlass::KernelHardwareInfo hardware(Arguments const &x) {
    cutlass::KernelHardwareInfo found;
    found.device_id = x.device;
    found.sm_count = x.multiprocessors;
    return found;
}

// Exported functions of a library. `Own` provides the types Kernel and Device (the CUTLASS adapter)
// and the static members
//     cutlass::Status status(Arguments const &)      checks that CUTLASS omits
//     Device::Arguments arguments(Arguments const &)
template <class Own, class Arguments>
struct AdapterSm90 {
    static int can_implement(Arguments const &x) {
        cutlass::Status const status = Own::status(x);
        return static_cast<int>(status == cutlass::Status::kSuccess ? Own::Device::can_implement(Own::arguments(x)) : status);
    }

    static std::int64_t workspace(Arguments const &x) {
        return static_cast<std::int64_t>(Own::Device::get_workspace_size(Own::arguments(x)));
    }

    static int run(Arguments const &x, void *workspace, cudaStream_t stream) {
        int const refused = can_implement(x);
        if (refused != 0) {
            return refused;
        }
        typename Own::Device device;
        cutlass::Status const status = device.initialize(Own::arguments(x), workspace, stream);
        return static_cast<int>(status == cutlass::Status::kSuccess ? device.run(stream) : status);
    }

    static int shared_memory() { return static_cast<int>(Own::Kernel::SharedStorageSize); }
};

} // namespace qsync
