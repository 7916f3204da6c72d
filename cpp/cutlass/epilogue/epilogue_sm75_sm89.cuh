// Dequantization epilogue as an epilogue visitor of CUTLASS 2.x.
//
// The visitor trees of CUTLASS are not used for two reasons. They assume the thread map of
// tensor-core kernels, which is wrong for FP32 SIMT kernels. They also store the scales of all rows
// of a tile in registers, which causes spills in stream-K kernels. This visitor follows the thread
// map of the kernel's own epilogue and loads row scales row by row.
#pragma once

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/arch/memory.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/matrix_coord.h"
#include "cutlass/numeric_conversion.h"
#include "epilogue/epilogue.cuh"

namespace qsync {

// Mapping from a thread to its elements of a threadblock tile: the iteration order of
// epilogue::threadblock::PredicatedTileIterator in closed form.
template <class Map>
struct Walk {
    using Count = typename Map::Count;
    using Shape = typename Map::Shape;
    using Iterations = typename Map::Iterations;
    using Delta = typename Map::Delta;

    static constexpr int steps = Count::kTile;
    static constexpr int rows = Iterations::kRow * Iterations::kGroup * Iterations::kCluster;
    static constexpr int columns = Iterations::kColumn;
    static constexpr int width = Map::kElementsPerAccess;

    // Return the row offset of `row` in `step`, relative to the first row of the thread.
    CUTLASS_HOST_DEVICE static constexpr int row_offset(int step, int row) {
        int const step_row = step % Count::kRow, step_group = step / Count::kRow % Count::kGroup;
        int const step_cluster = step / Count::kRow / Count::kGroup;
        int const group_rows = Shape::kRow * Count::kRow;
        int const start = step_row * Shape::kRow + step_group * group_rows * Shape::kGroup +
                          step_cluster * group_rows * Shape::kGroup * Count::kGroup * Shape::kCluster;
        int const inner_row = row % Iterations::kRow, group = row / Iterations::kRow % Iterations::kGroup;
        int const cluster = row / Iterations::kRow / Iterations::kGroup;
        return start + inner_row * Delta::kRow + group * Delta::kGroup + cluster * Delta::kCluster;
    }

    CUTLASS_HOST_DEVICE static constexpr int column_offset(int column) { return column * Delta::kColumn; }
};

template <class Map, class Tile, class Output, bool scaled, bool biased>
struct Dequantize {
    // d: [m, n], row-major with row stride `ldd`. Scales and bias are FP32 or null (scale 1, bias
    // 0).
    struct Arguments {
        Output *d = nullptr;
        std::int64_t ldd = 0;
        float const *a_scale = nullptr, *b_scale = nullptr, *bias = nullptr;
        std::int32_t a_scale_stride = 0, b_scale_stride = 0; // 0 or 1
    };
    using Params = Arguments;
    struct SharedStorage {};
    using Steps = Walk<Map>;

    template <class Problem>
    static Params to_underlying_arguments(Problem const &, Arguments const &arguments, void *) { return arguments; }

    template <class Problem>
    static std::size_t get_workspace_size(Problem const &, Arguments const &) { return 0; }

    CUTLASS_HOST_DEVICE Dequantize() {}
    CUTLASS_HOST_DEVICE Dequantize(Params const &params, SharedStorage const &) : params(&params) {}

    Params const *params;

    struct Callbacks {
        Params const &params;
        int rows, columns;         // of the problem
        int first_row, first_column; // of this thread
        float a_scale[Steps::rows];
        float b_scale[Steps::columns][Steps::width], bias[Steps::columns][Steps::width];

        CUTLASS_DEVICE Callbacks(Params const &params, int rows, int columns, cutlass::MatrixCoord first)
            : params(params), rows(rows), columns(columns), first_row(first.row()), first_column(first.column()) {}

        CUTLASS_DEVICE static float read(float const *values, int index, int stride, bool inside, float otherwise) {
            return values != nullptr && inside ? __ldg(values + static_cast<std::int64_t>(index) * stride) : otherwise;
        }

        CUTLASS_DEVICE void begin_epilogue() {
            CUTLASS_PRAGMA_UNROLL
            for (int column = 0; column < Steps::columns; ++column) {
                CUTLASS_PRAGMA_UNROLL
                for (int i = 0; i < Steps::width; ++i) {
                    int const n = first_column + Steps::column_offset(column) + i;
                    b_scale[column][i] = scaled ? read(params.b_scale, n, params.b_scale_stride, n < columns, 1.f) : 1.f;
                    bias[column][i] = biased ? read(params.bias, n, 1, n < columns, 0.f) : 0.f;
                }
            }
        }

        CUTLASS_DEVICE void begin_step(int step) {
            CUTLASS_PRAGMA_UNROLL
            for (int row = 0; row < Steps::rows; ++row) {
                int const m = first_row + Steps::row_offset(step, row);
                a_scale[row] = scaled ? read(params.a_scale, m, params.a_scale_stride, m < rows, 1.f) : 1.f;
            }
        }

        CUTLASS_DEVICE void begin_row(int) {}

        template <class Sum, int width>
        CUTLASS_DEVICE void visit(int step, int row, int column, int, cutlass::Array<Sum, width> const &sums) {
            cutlass::Array<float, width> y;
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < width; ++i) {
                y[i] = finished<scaled, biased>(static_cast<float>(sums[i]), a_scale[row], b_scale[column][i], bias[column][i]);
            }
            using Rounded = cutlass::Array<Output, width>;
            Rounded const rounded = cutlass::NumericArrayConverter<Output, float, width>{}(y);
            int const m = first_row + Steps::row_offset(step, row), n = first_column + Steps::column_offset(column);
            cutlass::arch::global_store<Rounded, sizeof(Rounded)>(rounded, params.d + m * params.ldd + n, m < rows && n < columns);
        }

        CUTLASS_DEVICE void end_row(int) {}
        CUTLASS_DEVICE void end_step(int) {}
        CUTLASS_DEVICE void end_epilogue() {}
    };

    template <class Problem>
    CUTLASS_DEVICE Callbacks get_callbacks(cutlass::gemm::GemmCoord tile, int thread, Problem problem) {
        cutlass::MatrixCoord const first = Map::initial_offset(thread) + cutlass::MatrixCoord{tile.m() * Tile::kM, tile.n() * Tile::kN};
        return Callbacks(*params, cute::get<0>(problem), cute::get<1>(problem), first);
    }
};

} // namespace qsync
