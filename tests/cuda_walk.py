"""A program that asks, on the host, which elements of a tile each thread of a kernel's epilogue stores.

Why: a wrong answer (CUTLASS's own visitors give one for FP32 on the ordinary units) compiles, has the right instructions, and writes
results to wrong places. `Walk` is what the epilogue of cpp/cutlass stores by, so it is asked itself; and what it says is held against
the thread map's own iterator as CUTLASS moves it.
"""

from __future__ import annotations

from collections.abc import Sequence

from qsync_fx.backend.cuda.config import KernelConfig
from qsync_fx.backend.cuda.gemm_source import source

_HEAD = """\
#include "gemm_sm75_sm89.cuh"

#include <cstdio>
#include <cstdlib>
#include <vector>

// PredicatedTileIterator::operator++, row by row.
template <class Map>
std::vector<int> rows_as_moved() {
    using Count = typename Map::Count;
    using Shape = typename Map::Shape;
    std::vector<int> found;
    int state[3] = {0, 0, 0}, row = 0;
    for (int step = 0; step < Count::kTile; ++step) {
        found.push_back(row);
        row += Shape::kRow;
        if (++state[0] == Count::kRow) {
            state[0] = 0;
            row += (Shape::kGroup - 1) * Shape::kRow * Count::kRow;
            if (++state[1] == Count::kGroup) {
                state[1] = 0;
                ++state[2];
                row += Count::kGroup * Shape::kGroup * Count::kRow * Shape::kRow;
            }
        }
    }
    return found;
}

template <class Config>
int check(const char *name) {
    using Map = typename qsync::Gemm<Config>::Map;
    using Steps = qsync::Walk<Map>;
    using Tile = typename Config::Tile;
    int const threads = 32 * (Tile::kM / Config::Warp::kM) * (Tile::kN / Config::Warp::kN);
    std::vector<int> stored(Tile::kM * Tile::kN, 0);
    std::vector<int> const moved = rows_as_moved<Map>();
    int wrong = threads != Map::kThreads;
    for (int thread = 0; thread < threads; ++thread) {
        auto const first = Map::initial_offset(thread);
        for (int step = 0; step < Steps::steps; ++step) {
            wrong += Steps::row_offset(step, 0) != moved[step];
            for (int row = 0; row < Steps::rows; ++row) {
                for (int column = 0; column < Steps::columns; ++column) {
                    // How an iterator's fragment is numbered, from PredicatedTileIterator::load_with_byte_offset.
                    auto const within = Map::iteration_offset(row * Steps::columns + column);
                    wrong += within.row() != Steps::row_offset(0, row) || within.column() != Steps::column_offset(column);
                    for (int i = 0; i < Steps::width; ++i) {
                        int const m = first.row() + Steps::row_offset(step, row), n = first.column() + Steps::column_offset(column) + i;
                        if (m < 0 || m >= Tile::kM || n < 0 || n >= Tile::kN) {
                            ++wrong;
                        } else {
                            ++stored[m * Tile::kN + n];
                        }
                    }
                }
            }
        }
    }
    for (int times : stored) {
        wrong += times != 1;
    }
    std::printf("%s %d\\n", name, wrong);
    return wrong;
}
"""


def program(configs: Sequence[KernelConfig]) -> str:
    """Returns the program for kernels of CUTLASS 2.x. It prints a line for each: name, number of elements not stored exactly once."""
    parts, calls = [_HEAD], []
    for index, config in enumerate(configs):
        text = source(config).source
        structure = text[text.index("struct Config") : text.index("QSYNC_GEMM")]
        parts.append(structure.replace("struct Config", f"struct Config{index}"))
        calls.append(f'    wrong += check<Config{index}>("{config.name}");')
    return "\n".join([*parts, "int main() {", "    int wrong = 0;", *calls, "    return wrong != 0;", "}", ""])
