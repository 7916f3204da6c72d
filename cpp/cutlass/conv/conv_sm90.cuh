// 2D convolution with CUTLASS 3.x for Hopper: TMA im2col loads and warp-specialized wgmma,
// channels-last. Compile for sm_90a with -DNDEBUG, otherwise wgmma is serialized.
//
// `Config`, which `conv_source` (backend/cuda/codegen.py) generates, has the types A, B,
// Accumulator, Output, Tile, Cluster, Schedule, EpilogueSchedule and the constants operation,
// alignment, out_alignment, stages, strided, splits, scaled, biased.
#pragma once

#include "cute/tensor.hpp"
// The order matters: these headers do not include all their dependencies.
#include "cute/atom/mma_atom.hpp"
#include "cute/atom/copy_traits_sm90_im2col.hpp"
#include "cutlass/kernel_hardware_info.hpp"
#include "cutlass/conv/convolution.h"
#include "cutlass/conv/convnd_problem_shape.hpp"
#include "cutlass/conv/collective/collective_builder.hpp"
#include "cutlass/conv/kernel/conv_universal.hpp"
#include "cutlass/conv/device/conv_universal_adapter.hpp"
#include "cutlass/conv/dispatch_policy.hpp"
#include "adapter_sm90.cuh"
#include "conv/conv_checks.h"
#include "epilogue/epilogue_sm90.cuh"
#include "exports.cuh"

namespace qsync {

// Variant of `Dequantize` for convolutions: rows are pixels and have no individual scales, and only
// fprop has one scale per channel.
template <class Tile, class Output, Operator operation, bool scaled, bool biased>
struct DequantizeConv {
    static constexpr bool fprop = operation == Operator::kFprop;
    using Scalar = cutlass::epilogue::fusion::Sm90ScalarBroadcast<float>;
    template <class Stride>
    using Row = cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, float, float, Stride, 1>;
    using AScale = std::conditional_t<scaled, Scalar, Nothing>;
    using BScale = std::conditional_t<scaled, std::conditional_t<fprop, Row<cute::Stride<cute::_0, bool, cute::_0>>, Scalar>, Nothing>;
    using Bias = std::conditional_t<fprop && biased, Row<cute::Stride<cute::_0, cute::_1, cute::_0>>, Nothing>;
    using Node = cutlass::epilogue::fusion::Sm90Compute<
        Finish<scaled, fprop && biased>::template Apply, Output, float, cutlass::FloatRoundStyle::round_to_nearest>;
    using Tree = cutlass::epilogue::fusion::Sm90EVT<Node, cutlass::epilogue::fusion::Sm90AccFetch, AScale, BScale, Bias>;

    static typename Tree::Arguments arguments(ConvArguments const &x) {
        typename AScale::Arguments a_scale{};
        typename BScale::Arguments b_scale{};
        typename Bias::Arguments bias{};
        if constexpr (scaled) {
            a_scale = {{1.f}, {x.a_scale}, {}};
            if constexpr (fprop) {
                b_scale = {x.b_scale, 1.f, {cute::_0{}, x.b_scale_per_channel != 0, cute::_0{}}};
            } else {
                b_scale = {{1.f}, {x.b_scale}, {}};
            }
        }
        if constexpr (fprop && biased) {
            bias = {x.bias, 0.f, {}};
        }
        return {{}, a_scale, b_scale, bias, {}};
    }
};

template <class Config>
struct Conv : AdapterSm90<Conv<Config>, ConvArguments> {
    static constexpr Operator operation = Config::operation;
    static constexpr bool wgrad = operation == Operator::kWgrad;

    using Nhwc = cutlass::layout::TensorNHWC;
    // The weight gradient is a matrix of output channels by (input channel, filter column, filter
    // row).
    using OutputLayout = std::conditional_t<wgrad, cutlass::layout::TensorKCSR, Nhwc>;
    using Fusion = DequantizeConv<
        typename Config::Tile, typename Config::Output, operation, Config::scaled, Config::biased>;
    using Epilogue = EpilogueSm90<Config, OutputLayout, typename Fusion::Tree>;
    using Automatic = cutlass::conv::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>;
    using Stages = std::conditional_t<Config::stages == 0, Automatic, cutlass::conv::collective::StageCount<Config::stages>>;
    using Mainloop = typename cutlass::conv::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, operation, typename Config::A, Nhwc, Config::alignment,
        typename Config::B, Nhwc, Config::alignment, typename Config::Accumulator, typename Config::Tile, typename Config::Cluster,
        Stages, typename Config::Schedule>::CollectiveOp;
    using Shape = cutlass::conv::ConvProblemShape<operation, Mainloop::DispatchPolicy::NumSpatialDimensions>;
    using Kernel = cutlass::conv::kernel::ConvUniversal<Shape, Mainloop, Epilogue>;
    using Device = cutlass::conv::device::ConvUniversalAdapter<Kernel>;

    static_assert(Mainloop::DispatchPolicy::Stages >= 2, "shared memory holds no pipeline");

    static typename Kernel::StrideD strides(Shape const &shape) {
        typename Kernel::StrideD stride{};
        if constexpr (wgrad) {
            // Strides of k, then of channel (1), filter column and filter row. shape.stride_C is
            // ordered k, r, s, c.
            cute::get<0>(stride) = shape.stride_C[0];
            cute::get<1, 1>(stride) = shape.stride_C[2];
            cute::get<1, 2>(stride) = shape.stride_C[1];
        } else {
            cute::get<0, 0>(stride) = shape.stride_C[2];
            cute::get<0, 1>(stride) = shape.stride_C[1];
            cute::get<0, 2>(stride) = shape.stride_C[0];
        }
        return stride;
    }

    static typename Device::Arguments arguments(ConvArguments const &x) {
        Shape const shape(
            cutlass::conv::Mode::kCrossCorrelation, {x.n, x.h, x.w, x.c}, {x.k, x.r, x.s, x.c}, {x.pad_h, x.pad_w}, {x.pad_h, x.pad_w},
            {x.stride_h, x.stride_w}, {x.dilation_h, x.dilation_w}, 1);
        typename Device::Arguments made{
            shape,
            {static_cast<typename Config::A const *>(x.a), static_cast<typename Config::B const *>(x.b)},
            {Fusion::arguments(x), nullptr, {}, static_cast<typename Config::Output *>(x.d), strides(shape)},
            hardware(x)};
        return made;
    }

    static cutlass::Status status(ConvArguments const &x) { return conv_status<Config>(x); }
};

} // namespace qsync

#define QSYNC_CONV(Config, Name) QSYNC_LIBRARY(qsync::Conv<Config>, qsync::ConvArguments, Name)
