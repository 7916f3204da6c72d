// GEMM with CUTLASS 3.x for Hopper: TMA loads and warp-specialized wgmma. Compile for sm_90a with
// -DNDEBUG, otherwise wgmma is serialized.
//
// `Config`, which `gemm_source` (backend/cuda/codegen.py) generates, has the types A, B,
// Accumulator, Output, LayoutA, LayoutB, Tile, Cluster, Schedule, EpilogueSchedule, Scheduler and
// the constants alignment, out_alignment, stages, swizzle, largest_k, stream_k, scaled, biased.
#pragma once

#include <algorithm>

#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "adapter_sm90.cuh"
#include "epilogue/epilogue_sm90.cuh"
#include "exports.cuh"
#include "gemm/gemm_checks.h"

namespace qsync {

template <class Config>
struct Gemm : AdapterSm90<Gemm<Config>, GemmArguments> {
    using Fusion = Dequantize<typename Config::Tile, typename Config::Output, Config::scaled, Config::biased>;
    using Epilogue = EpilogueSm90<Config, cutlass::layout::RowMajor, typename Fusion::Tree>;
    using Automatic = cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>;
    using Stages = std::conditional_t<Config::stages == 0, Automatic, cutlass::gemm::collective::StageCount<Config::stages>>;
    using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Config::A, typename Config::LayoutA, Config::alignment,
        typename Config::B, typename Config::LayoutB, Config::alignment, typename Config::Accumulator, typename Config::Tile,
        typename Config::Cluster, Stages, typename Config::Schedule>::CollectiveOp;
    using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue, typename Config::Scheduler>;
    using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

    static_assert(Mainloop::DispatchPolicy::Stages >= 2, "shared memory holds no pipeline");

    // Set the stride that is not statically 1 to the leading dimension.
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
        auto const d = strides<typename Kernel::StrideD>(x.ldd);
        typename Device::Arguments made{
            cutlass::gemm::GemmUniversalMode::kGemm,
            {x.m, x.n, x.k, 1},
            {static_cast<typename Config::A const *>(x.a), strides<typename Kernel::StrideA>(x.lda),
             static_cast<typename Config::B const *>(x.b), strides<typename Kernel::StrideB>(x.ldb)},
            {Fusion::arguments(x), nullptr, d, static_cast<typename Config::Output *>(x.d), d},
            hardware(x)};
        made.scheduler.max_swizzle_size = Config::swizzle;
        if constexpr (Config::stream_k) {
            made.scheduler.splits = std::max(x.split, 1);
        }
        return made;
    }

    static cutlass::Status status(GemmArguments const &x) { return gemm_status<Config>(x); }
};

} // namespace qsync

#define QSYNC_GEMM(Config, Name) QSYNC_LIBRARY(qsync::Gemm<Config>, qsync::GemmArguments, Name)
