// GEMM by CUTLASS 3.x on Hopper: TMA loads, warp-specialized wgmma. Compile for sm_90a with -DNDEBUG, or wgmma is serialized.
//
// `Config`, which gemm_source.py writes, has the types A, B, Accumulator, Output, LayoutA, LayoutB, Tile, Cluster, Schedule,
// EpilogueSchedule, Scheduler and the constants alignment, out_alignment, stages, swizzle, largest_k, stream_k, scaled, biased, activation.
#pragma once

#include <algorithm>

#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "epilogue_sm90.cuh"
#include "exports.cuh"
#include "gemm_checks.h"

namespace qsync {

template <class Config>
struct Gemm {
    using Fusion = Dequantize<typename Config::Tile, typename Config::Output, Config::activation, Config::scaled, Config::biased>;
    using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Config::Tile, typename Config::Cluster,
        cutlass::epilogue::collective::EpilogueTileAuto, typename Config::Accumulator, float,
        void, cutlass::layout::RowMajor, Config::out_alignment, typename Config::Output, cutlass::layout::RowMajor, Config::out_alignment,
        typename Config::EpilogueSchedule, typename Fusion::Tree>::CollectiveOp;
    using Automatic = cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>;
    using Stages = std::conditional_t<Config::stages == 0, Automatic, cutlass::gemm::collective::StageCount<Config::stages>>;
    using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Config::A, typename Config::LayoutA, Config::alignment,
        typename Config::B, typename Config::LayoutB, Config::alignment, typename Config::Accumulator, typename Config::Tile,
        typename Config::Cluster, Stages, typename Config::Schedule>::CollectiveOp;
    using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue, typename Config::Scheduler>;
    using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

    static_assert(Mainloop::DispatchPolicy::Stages >= 2, "shared memory holds no pipeline");

    // The stride that is not 1 is the leading dimension, whichever it is.
    template <class Stride>
    static Stride strides(std::int64_t leading) {
        Stride stride{};
        if constexpr (cute::is_static<std::remove_reference_t<decltype(cute::get<0>(stride))>>::value) {
            cute::get<1>(stride) = leading;
        } else {
            cute::get<0>(stride) = leading;
        }
        return stride;
    }

    static typename Device::Arguments arguments(GemmArguments const &x) {
        cutlass::KernelHardwareInfo hardware;
        hardware.device_id = x.device;
        hardware.sm_count = x.multiprocessors;
        auto const d = strides<typename Kernel::StrideD>(x.ldd);
        typename Device::Arguments made{
            cutlass::gemm::GemmUniversalMode::kGemm,
            {x.m, x.n, x.k, 1},
            {static_cast<typename Config::A const *>(x.a), strides<typename Kernel::StrideA>(x.lda),
             static_cast<typename Config::B const *>(x.b), strides<typename Kernel::StrideB>(x.ldb)},
            {Fusion::arguments(x), nullptr, d, static_cast<typename Config::Output *>(x.d), d},
            hardware};
        made.scheduler.max_swizzle_size = Config::swizzle;
        if constexpr (Config::stream_k) {
            made.scheduler.splits = std::max(x.split, 1);
        }
        return made;
    }

    static int can_implement(GemmArguments const &x) {
        cutlass::Status const status = gemm_status<Config>(x);
        return static_cast<int>(status == cutlass::Status::kSuccess ? Device::can_implement(arguments(x)) : status);
    }

    static std::int64_t workspace(GemmArguments const &x) { return static_cast<std::int64_t>(Device::get_workspace_size(arguments(x))); }

    static int run(GemmArguments const &x, void *workspace, cudaStream_t stream) {
        int const refused = can_implement(x);
        if (refused != 0) {
            return refused;
        }
        Device device;
        cutlass::Status const status = device.initialize(arguments(x), workspace, stream);
        return static_cast<int>(status == cutlass::Status::kSuccess ? device.run(stream) : status);
    }

    static int shared_memory() { return static_cast<int>(Kernel::SharedStorageSize); }
};

} // namespace qsync

#define QSYNC_GEMM(Config, Name) QSYNC_LIBRARY(qsync::Gemm<Config>, qsync::GemmArguments, Name)
