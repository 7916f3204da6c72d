// 2D convolution as implicit GEMM with CUTLASS 2.x: fprop, dgrad and wgrad, channels-last. For
// sm_75 to sm_89, and on sm_90 for the cases that CUTLASS 3.x does not cover: strided dgrad and
// split-K wgrad.
//
// `Config`, which `conv_source` (backend/cuda/codegen.py) generates, has the types A, B,
// Accumulator, Output, Arch, Unit, Operator, Tile, Warp, Instruction, Swizzle and the constants
// operation, alignment, out_alignment, stages, strided, splits, scaled, biased.
#pragma once

#include <algorithm>

#include "cutlass/conv/conv2d_problem_size.h"
#include "cutlass/conv/device/implicit_gemm_convolution.h"
#include "cutlass/conv/kernel/default_conv2d_dgrad.h"
#include "cutlass/conv/kernel/default_conv2d_fprop.h"
#include "cutlass/conv/kernel/default_conv2d_wgrad.h"
#include "cutlass/epilogue/thread/linear_combination.h"
// Must follow the kernel headers, since it does not include its dependencies.
#include "cutlass/epilogue/threadblock/epilogue_with_visitor_callbacks.h"
#include "conv/conv_checks.h"
#include "epilogue/epilogue_sm75_sm89.cuh"
#include "exports.cuh"

namespace qsync {

using Nhwc = cutlass::layout::TensorNHWC;
using Problem = cutlass::conv::Conv2dProblemSize;

// Epilogue of dgrad and wgrad: both scales, then one rounding. With serial split-K, each part adds
// its scaled sum to the output that the previous part wrote.
template <class Output_, int count, class Sum, bool scaled>
struct Scaled {
    using ElementOutput = Output_;
    using ElementSource = Output_;
    using ElementC = Output_;
    using ElementD = Output_;
    using ElementAccumulator = Sum;
    using ElementCompute = float;
    using ElementScalar = float;
    static int const kCount = count;
    static cutlass::epilogue::thread::ScaleType::Kind const kScale = cutlass::epilogue::thread::ScaleType::Default;
    static cutlass::FloatRoundStyle const kRound = cutlass::FloatRoundStyle::round_to_nearest;
    using FragmentOutput = cutlass::Array<Output_, count>;
    using FragmentSource = FragmentOutput;
    using FragmentAccumulator = cutlass::Array<Sum, count>;
    using FragmentCompute = cutlass::Array<float, count>;

    struct Params {
        float const *a_scale = nullptr, *b_scale = nullptr;
    };

    float a_scale, b_scale;
    bool adds = false;

    CUTLASS_HOST_DEVICE explicit Scaled(Params const &params)
        : a_scale(scaled && params.a_scale ? *params.a_scale : 1.f), b_scale(scaled && params.b_scale ? *params.b_scale : 1.f) {}

    CUTLASS_HOST_DEVICE bool is_source_needed() const { return adds; }
    CUTLASS_HOST_DEVICE void set_k_partition(int part, int) { adds = part != 0; }

    CUTLASS_DEVICE FragmentOutput operator()(FragmentAccumulator const &sums) const {
        FragmentCompute y;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < count; ++i) {
            y[i] = finished<scaled, false>(static_cast<float>(sums[i]), a_scale, b_scale, 0.f);
        }
        return cutlass::NumericArrayConverter<Output_, float, count>{}(y);
    }

    CUTLASS_DEVICE FragmentOutput operator()(FragmentAccumulator const &sums, FragmentSource const &before) const {
        FragmentCompute y = cutlass::NumericArrayConverter<float, Output_, count>{}(before);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < count; ++i) {
            y[i] = __fadd_rn(y[i], finished<scaled, false>(static_cast<float>(sums[i]), a_scale, b_scale, 0.f));
        }
        return cutlass::NumericArrayConverter<Output_, float, count>{}(y);
    }
};

template <class Config>
struct ConvBase {
    static constexpr bool fprop = Config::operation == Operator::kFprop;
    static constexpr auto strides =
        Config::operation == Operator::kDgrad && !Config::strided ? cutlass::conv::StrideSupport::kUnity : cutlass::conv::StrideSupport::kStrided;
    static constexpr auto iterator = cutlass::conv::IteratorAlgorithm::kOptimized;

    // gemm_2x.cuh explains the type that sums have in shared memory.
    using Stored = std::conditional_t<!fprop || Config::out_alignment == 8, typename Config::Output, float>;
    using Plain = cutlass::epilogue::thread::LinearCombination<Stored, Config::out_alignment, typename Config::Accumulator, float>;
    using Gradient = Scaled<typename Config::Output, Config::out_alignment, typename Config::Accumulator, Config::scaled>;

    template <Operator operation, class = void>
    struct Choice {
        using Kernel = typename cutlass::conv::kernel::DefaultConv2dFprop<
            typename Config::A, Nhwc, typename Config::B, Nhwc, Stored, Nhwc, typename Config::Accumulator, typename Config::Unit,
            typename Config::Arch, typename Config::Tile, typename Config::Warp, typename Config::Instruction, Plain, typename Config::Swizzle,
            Config::stages, typename Config::Operator, iterator, strides, Config::alignment, Config::alignment>::Kernel;
    };
    template <class Nothing>
    struct Choice<Operator::kDgrad, Nothing> {
        using Kernel = typename cutlass::conv::kernel::DefaultConv2dDgrad<
            typename Config::A, Nhwc, typename Config::B, Nhwc, Stored, Nhwc, typename Config::Accumulator, typename Config::Unit,
            typename Config::Arch, typename Config::Tile, typename Config::Warp, typename Config::Instruction, Gradient, typename Config::Swizzle,
            Config::stages, typename Config::Operator, iterator, strides, Config::alignment, Config::alignment>::Kernel;
    };
    template <class Nothing>
    struct Choice<Operator::kWgrad, Nothing> {
        using Kernel = typename cutlass::conv::kernel::DefaultConv2dWgrad<
            typename Config::A, Nhwc, typename Config::B, Nhwc, Stored, Nhwc, typename Config::Accumulator, typename Config::Unit,
            typename Config::Arch, typename Config::Tile, typename Config::Warp, typename Config::Instruction, Gradient, typename Config::Swizzle,
            Config::stages, typename Config::Operator, iterator, strides, Config::alignment, Config::alignment>::Kernel;
    };
    using Kernel = typename Choice<Config::operation>::Kernel;
};

// cutlass::conv::kernel::ImplicitGemmConvolution with the GEMM epilogue visitor: the packed output
// is a row-major matrix with one row per pixel and one column per channel.
template <class Base, class Visitor>
struct VisitedFprop {
    using Mma = typename Base::Mma;
    using Swizzle = typename Base::ThreadblockSwizzle;
    using Tile = typename Mma::Shape;
    using Epilogue = cutlass::epilogue::threadblock::EpilogueWithVisitorCallbacks<typename Base::Epilogue, Visitor, 1>;
    static int const kThreadCount = Base::kThreadCount;

    struct Params {
        Problem problem;
        cutlass::gemm::GemmCoord gemm, tiles;
        int log_tile, iterations, channel_iterations;
        typename Mma::IteratorA::Params a;
        typename Mma::IteratorB::Params b;
        typename Mma::IteratorA::Element const *ptr_a;
        typename Mma::IteratorB::Element const *ptr_b;
        typename Epilogue::Params epilogue;

        Params(Problem const &problem, typename Base::TensorRefA const &from_a, typename Base::TensorRefB const &from_b,
               typename Visitor::Arguments const &epilogue)
            : problem(problem), gemm(cutlass::conv::implicit_gemm_problem_size(Operator::kFprop, problem)),
              tiles(Swizzle::get_tiled_shape(gemm, {Tile::kM, Tile::kN, Tile::kK}, 1)), log_tile(Swizzle::get_log_tile(tiles)),
              iterations(cutlass::conv::implicit_gemm_k_iterations(
                  Operator::kFprop, Tile::kK, problem, Base::kIteratorAlgorithm, Base::kGroupMode, Tile::kN)),
              channel_iterations(cutlass::conv::implicit_gemm_k_iterations_per_channel(Operator::kFprop, problem, Base::kIteratorAlgorithm)),
              a(Mma::IteratorA::getParams(problem, from_a.layout())), b(problem, from_b.layout()), ptr_a(from_a.data()), ptr_b(from_b.data()),
              epilogue(epilogue) {}
    };

    union SharedStorage {
        typename Mma::SharedStorage main_loop;
        typename Epilogue::SharedStorage epilogue;
    };

    CUTLASS_DEVICE void operator()(Params const &params, SharedStorage &shared) {
        cutlass::gemm::GemmCoord const tile = Swizzle{}.get_tile_offset(params.log_tile);
        if (params.tiles.m() <= tile.m() || params.tiles.n() <= tile.n()) {
            return;
        }
        int const thread = threadIdx.x, warp = cutlass::canonical_warp_idx_sync(), lane = threadIdx.x % 32;
        typename Mma::IteratorA a(params.a, params.problem, params.ptr_a, thread, {tile.m() * Tile::kM, 0});
        typename Mma::IteratorB b(params.b, params.problem, params.ptr_b, thread, {0, tile.n() * Tile::kN});
        Mma mma(shared.main_loop, thread, warp, lane);
        typename Mma::FragmentC sums;
        sums.clear();
        mma(params.iterations, sums, a, b, sums, params.channel_iterations);
        Epilogue epilogue(params.epilogue, shared.epilogue, thread, warp, lane);
        epilogue(sums, tile, cute::make_shape(params.gemm.m(), params.gemm.n(), cute::_1{}), thread);
    }
};

template <class Config>
struct Conv {
    using Base = ConvBase<Config>;
    using BaseKernel = typename Base::Kernel;
    using Stock = cutlass::conv::device::ImplicitGemmConvolution<BaseKernel>;
    static constexpr bool fprop = Base::fprop;

    using Map = typename BaseKernel::Epilogue::OutputTileIterator::ThreadMap;
    using Visitor = Dequantize<Map, typename Config::Tile, typename Config::Output, Config::scaled, Config::biased>;
    using Visited = VisitedFprop<BaseKernel, Visitor>;

    // Return the number of split-K parts: x.split if set, else a heuristic for wgrad, whose output
    // has few tiles, each a sum over all pixels. The parts run concurrently and add their sums
    // serially. The heuristic yields about two threadblocks per multiprocessor, at least eight
    // main-loop iterations per part, and at most 64 parts.
    static int parts(ConvArguments const &x) {
        if (!Config::splits || x.split > 1) {
            return std::max(x.split, 1);
        }
        using Tile = typename Config::Tile;
        std::int64_t const columns = std::int64_t(x.r) * x.s * x.c, pixels = std::int64_t(x.n) * x.p * x.q;
        std::int64_t const tiles = ((x.k + Tile::kM - 1) / Tile::kM) * ((columns + Tile::kN - 1) / Tile::kN);
        std::int64_t const wanted = 2 * std::int64_t(std::max(x.multiprocessors, 1)) / tiles;
        return static_cast<int>(std::max<std::int64_t>(1, std::min<std::int64_t>({wanted, pixels / (8 * Tile::kK), 64})));
    }

    static Problem problem(ConvArguments const &x) {
        return Problem({x.n, x.h, x.w, x.c}, {x.k, x.r, x.s, x.c}, {x.pad_h, x.pad_h, x.pad_w, x.pad_w}, {x.stride_h, x.stride_w},
                       {x.dilation_h, x.dilation_w}, {x.n, x.p, x.q, x.k}, cutlass::conv::Mode::kCrossCorrelation, parts(x), 1);
    }

    // Packed layouts of x, weight and y.
    static Nhwc activations(ConvArguments const &x) { return Nhwc::packed({x.n, x.h, x.w, x.c}); }
    static Nhwc filters(ConvArguments const &x) { return Nhwc::packed({x.k, x.r, x.s, x.c}); }
    static Nhwc outputs(ConvArguments const &x) { return Nhwc::packed({x.n, x.p, x.q, x.k}); }

    static typename BaseKernel::TensorRefA a(ConvArguments const &x) {
        auto *data = static_cast<typename Config::A *>(const_cast<void *>(x.a));
        return {data, fprop ? activations(x) : outputs(x)};
    }
    static typename BaseKernel::TensorRefB b(ConvArguments const &x) {
        auto *data = static_cast<typename Config::B *>(const_cast<void *>(x.b));
        return {data, Config::operation == Operator::kWgrad ? activations(x) : filters(x)};
    }

    // Arguments of the stock CUTLASS kernel: for its checks, and to run gradients.
    static typename Stock::Arguments stock(ConvArguments const &x) {
        auto *data = static_cast<typename Base::Stored *>(x.d);
        typename BaseKernel::TensorRefC const d{data, fprop ? outputs(x) : Config::operation == Operator::kDgrad ? activations(x) : filters(x)};
        typename BaseKernel::EpilogueOutputOp::Params epilogue;
        if constexpr (!fprop) {
            epilogue = {x.a_scale, x.b_scale};
        }
        return {problem(x), a(x), b(x), d, d, epilogue, cutlass::conv::SplitKMode::kSerial};
    }

    static int can_implement(ConvArguments const &x) {
        cutlass::Status status = conv_status<Config>(x);
        return static_cast<int>(status == cutlass::Status::kSuccess ? Stock::can_implement(stock(x)) : status);
    }

    static std::int64_t workspace(ConvArguments const &x) { return static_cast<std::int64_t>(Stock::get_workspace_size(stock(x))); }

    static int run(ConvArguments const &x, void *workspace, cudaStream_t stream) {
        int const refused = can_implement(x);
        if (refused != 0) {
            return refused;
        }
        if constexpr (fprop) {
            return static_cast<int>(run_visited(x, stream));
        } else {
            return static_cast<int>(Stock{}(stock(x), workspace, stream));
        }
    }

    static typename Visited::Params visited(ConvArguments const &x) {
        typename Visitor::Arguments const epilogue{
            static_cast<typename Config::Output *>(x.d), x.k, x.a_scale, x.b_scale, x.bias, 0, x.b_scale_per_channel != 0};
        return {problem(x), a(x), b(x), epilogue};
    }

    static cutlass::Status run_visited(ConvArguments const &x, cudaStream_t stream) {
        typename Visited::Params params = visited(x);
        int const bytes = shared_memory();
        auto *kernel = reinterpret_cast<void const *>(&cutlass::Kernel<Visited>);
        cudaError_t error = cudaSuccess;
        if (bytes >= 48 << 10) {
            error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        }
        if (error == cudaSuccess) {
            void *given[] = {&params};
            error = cudaLaunchKernel(kernel, Visited::Swizzle::get_grid_shape(params.tiles), dim3(Visited::kThreadCount), given, bytes, stream);
        }
        cudaGetLastError(); // clear the error, which is reported here
        return error == cudaSuccess ? cutlass::Status::kSuccess : cutlass::Status::kErrorInternal;
    }

    static int shared_memory() {
        if constexpr (fprop) {
            return static_cast<int>(sizeof(typename Visited::SharedStorage));
        } else {
            return static_cast<int>(sizeof(typename BaseKernel::SharedStorage));
        }
    }
};

} // namespace qsync

#define QSYNC_CONV(Config, Name) QSYNC_LIBRARY(qsync::Conv<Config>, qsync::ConvArguments, Name)
