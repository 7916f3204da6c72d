// Dequantization epilogue as an epilogue visitor tree of CUTLASS 3.x: accumulator, row scale,
// column scale and bias -> qsync::Finish.
#pragma once

#include <type_traits>

#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "epilogue/epilogue.cuh"

namespace qsync {

// Placeholder node for absent scales or bias. `finished` ignores its value, and the compiler
// removes it.
struct Nothing : cutlass::epilogue::fusion::Sm90VisitorImpl<> {
    using cutlass::epilogue::fusion::Sm90VisitorImpl<>::Sm90VisitorImpl;

    struct ConsumerStoreCallbacks : cutlass::epilogue::fusion::detail::EmptyConsumerStoreCallbacks {
        template <class Sum, int width>
        CUTLASS_DEVICE cutlass::Array<float, width> visit(cutlass::Array<Sum, width> const &, int, int, int) {
            cutlass::Array<float, width> values;
            values.clear();
            return values;
        }
    };

    template <bool reference_source, class... Args>
    CUTLASS_DEVICE auto get_consumer_store_callbacks(cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const &) {
        return ConsumerStoreCallbacks{};
    }
};

template <class Tile, class Output, bool scaled, bool biased>
struct Dequantize {
    // The stride of type bool is 1 for one scale per row (column) and 0 for one scale in total,
    // depending on the arguments.
    using RowScale = std::conditional_t<
        scaled, cutlass::epilogue::fusion::Sm90ColBroadcast<0, Tile, float, float, cute::Stride<bool, cute::_0, cute::_0>, 1>, Nothing>;
    using ColumnScale = std::conditional_t<
        scaled, cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, float, float, cute::Stride<cute::_0, bool, cute::_0>, 1>, Nothing>;
    using Bias = std::conditional_t<
        biased, cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, float, float, cute::Stride<cute::_0, cute::_1, cute::_0>, 1>, Nothing>;
    using Node = cutlass::epilogue::fusion::Sm90Compute<
        Finish<scaled, biased>::template Apply, Output, float, cutlass::FloatRoundStyle::round_to_nearest>;
    using Tree = cutlass::epilogue::fusion::Sm90EVT<Node, cutlass::epilogue::fusion::Sm90AccFetch, RowScale, ColumnScale, Bias>;

    template <class Arguments>
    static typename Tree::Arguments arguments(Arguments const &x) {
        typename RowScale::Arguments row{};
        typename ColumnScale::Arguments column{};
        typename Bias::Arguments bias{};
        if constexpr (scaled) {
            row = {x.a_scale, 1.f, {x.a_scale_per_row != 0, cute::_0{}, cute::_0{}}};
            column = {x.b_scale, 1.f, {cute::_0{}, x.b_scale_per_column != 0, cute::_0{}}};
        }
        if constexpr (biased) {
            bias = {x.bias, 0.f, {}};
        }
        return {{}, row, column, bias, {}};
    }
};

} // namespace qsync
