// GEMM kernel type of CUTLASS 2.x and its arguments, without the launch: see gemm_sm75_sm89.cuh.
//
// `Config`, which `gemm_source` (backend/cuda/codegen.py) generates, has the types A, B,
// Accumulator, Output, LayoutA, LayoutB, Arch, Unit, Operator, Tile, Warp, Instruction, Swizzle and
// the constants alignment, out_alignment, stages, largest_k, stream_k, scaled, biased.
#pragma once

#include <limits>

#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/kernel/default_gemm_universal.h"
#include "cutlass/gemm/kernel/gemm_universal_with_visitor.h"
#include "cutlass/gemm/kernel/gemm_universal_with_visitor_streamk.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle_streamk.h"
// Must follow the kernel headers, since it does not include its dependencies.
#include "cutlass/epilogue/threadblock/epilogue_with_visitor_callbacks.h"
#include "epilogue/epilogue_sm75_sm89.cuh"
#include "gemm/gemm_checks.h"

namespace qsync {

template <class Config>
struct GemmKernel {
    // The exchange of 32-bit sums through shared memory has no bank conflicts for accesses of 8
    // narrow or 4 wide output values.
    using Stored = std::conditional_t<Config::out_alignment == 8, typename Config::Output, float>;
    using Plain = cutlass::epilogue::thread::LinearCombination<Stored, Config::out_alignment, typename Config::Accumulator, float>;
    using Base = typename cutlass::gemm::kernel::DefaultGemmUniversal<
        typename Config::A, typename Config::LayoutA, cutlass::ComplexTransform::kNone, Config::alignment,
        typename Config::B, typename Config::LayoutB, cutlass::ComplexTransform::kNone, Config::alignment,
        Stored, cutlass::layout::RowMajor, typename Config::Accumulator, typename Config::Unit, typename Config::Arch,
        typename Config::Tile, typename Config::Warp, typename Config::Instruction, Plain, typename Config::Swizzle,
        Config::stages, typename Config::Operator>::GemmKernel;
    using Map = typename Base::Epilogue::OutputTileIterator::ThreadMap;
    using Visitor = Dequantize<Map, typename Config::Tile, typename Config::Output, Config::scaled, Config::biased>;
    using Epilogue = cutlass::epilogue::threadblock::EpilogueWithVisitorCallbacks<typename Base::Epilogue, Visitor, 1>;
    using Kernel = std::conditional_t<
        Config::stream_k, cutlass::gemm::kernel::GemmWithEpilogueVisitorStreamk<typename Base::Mma, Epilogue, typename Config::Swizzle>,
        cutlass::gemm::kernel::GemmWithEpilogueVisitor<typename Base::Mma, Epilogue, typename Config::Swizzle>>;

    static typename Kernel::Arguments arguments(GemmArguments const &x) {
        typename Visitor::Arguments const epilogue{
            static_cast<typename Config::Output *>(x.d), x.ldd, x.a_scale, x.b_scale, x.bias, x.a_scale_per_row != 0, x.b_scale_per_column != 0};
        typename Kernel::Arguments made(
            cutlass::gemm::GemmUniversalMode::kGemm, {x.m, x.n, x.k}, x.split > 1 ? x.split : 1, epilogue, x.a, x.b, nullptr, nullptr,
            0, 0, 0, 0, x.lda, x.ldb, 0, 0);
        if constexpr (Config::stream_k) {
            made.avail_sms = x.multiprocessors > 0 ? x.multiprocessors : -1;
        }
        return made;
    }

    static int can_implement(GemmArguments const &x) {
        cutlass::Status status = gemm_status<Config>(x);
        std::int64_t const down = (std::int64_t(x.m) + Config::Tile::kM - 1) / Config::Tile::kM;
        std::int64_t const across = (std::int64_t(x.n) + Config::Tile::kN - 1) / Config::Tile::kN;
        // The swizzle may multiply the first grid dimension by 8.
        bool const fits = down <= std::numeric_limits<std::int32_t>::max() / 8 && across <= std::numeric_limits<std::uint16_t>::max();
        if (status == cutlass::Status::kSuccess) {
            status = fits ? Kernel::can_implement(arguments(x)) : cutlass::Status::kErrorInvalidProblem;
        }
        return static_cast<int>(status);
    }

    static int shared_memory() { return static_cast<int>(sizeof(typename Kernel::SharedStorage)); }
};

} // namespace qsync
