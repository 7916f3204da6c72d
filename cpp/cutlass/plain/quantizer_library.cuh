// C interface of the quantizer: argument checks, workspace size and launch configuration. See
// backend/cuda/kernel_build/library.py.
//
// No function allocates memory, synchronizes with the device or reads its memory, so every call can
// be captured in a CUDA graph.
#pragma once

#ifdef __CUDACC__
#define QSYNC_KERNELS
#endif

#include "abi.h"
#include "plain/launches.cuh"
#include "plain/quantizer.cuh"

namespace qsync {

// Launch configuration for one input type and format. It depends on the arguments only.
template <Type X, Format F> struct Quantizer {
    const QuantizeArguments &given;
    const std::int64_t multiprocessors;

    explicit Quantizer(const QuantizeArguments &given) : given(given), multiprocessors(most(given.multiprocessors, 1)) {}

    std::int64_t groups() const { return given.group == 0 ? 1 : given.group == 1 ? given.rows : given.columns; }
    bool empty() const { return given.rows == 0 || given.columns == 0; }
    // One scale and contiguous rows: treat the matrix as a single row, so that only its end is a
    // partial vector.
    bool flat() const { return given.group == 0 && !given.qt && (given.ldx == given.columns || given.rows == 1); }

    Status check() const {
        constexpr std::int64_t LIMIT = (std::int64_t{1} << 31) - 1;
        const auto size = static_cast<std::uintptr_t>(X == FLOAT32 ? 4 : 2);
        if (given.x_type != X || given.format != F || given.rounding < 0 || given.rounding > FLOOR) return WRONG_TYPE;
        if (given.group < 0 || given.group > 2) return WRONG_TYPE;
        if (given.rows < 0 || given.columns < 0 || given.ldx < given.columns) return WRONG_SIZE;
        if (given.rows > LIMIT || given.columns > LIMIT || groups() > LIMIT - THREADS) return WRONG_SIZE;
        if (!empty() && ceiling(given.columns, 8) > LIMIT / given.rows) return WRONG_SIZE;
        if (groups() != 0 && (!given.scale || !multiple(given.scale, 4))) return WRONG_POINTER;
        if (empty()) return OK;
        if (!given.x || !given.q || !multiple(given.x, size)) return WRONG_POINTER;
        if (given.rounding == STOCHASTIC && (!given.seed || !multiple(given.seed, 8))) return WRONG_POINTER;
        return OK;
    }

    Matrix<X> matrix() const {
        const std::int64_t columns = flat() ? given.rows * given.columns : given.columns;
        const std::int64_t size = X == FLOAT32 ? 4 : 2;
        Matrix<X> found;
        found.data = static_cast<const typename Matrix<X>::Element *>(given.x);
        found.stride = given.ldx;
        found.rows = static_cast<std::uint32_t>(flat() ? 1 : given.rows);
        found.columns = columns;
        found.row_eighths = static_cast<std::uint32_t>(ceiling(columns, 8));
        found.by_row = Division(found.row_eighths);
        found.dense = found.rows == 1 || given.ldx == columns;
        found.aligned = multiple(given.x, 16) && (found.rows == 1 || given.ldx * size % 16 == 0);
        return found;
    }

    // Return the number of threadblocks: as many as the device can run concurrently (`together` per
    // multiprocessor), but not more than the work requires.
    std::int64_t blocks(std::int64_t work, std::int64_t together) const { return most(1, least(work, together * multiprocessors)); }

    std::int64_t parts() const {
        const Matrix<X> x = matrix();
        if (given.group == 0) return blocks(ceiling(x.eighths(), THREADS), 4);
        // Enough warps (threadblocks) to fill the device, each with at least about a kilobyte to
        // read.
        const std::int64_t wanted = ceiling(4 * multiprocessors, given.group == 1 ? ceiling(x.rows, WARPS) : ceiling(x.columns, 256));
        return most(1, least(wanted, given.group == 1 ? x.row_eighths / 64 : x.rows / 32));
    }

    std::int64_t workspace() const {
        if (empty() || check() != OK || (given.group == 1 && parts() == 1)) return 0;
        return 4 * groups() * parts();
    }

    int absmax(std::uint32_t *partial, cudaStream_t stream) const {
        const Matrix<X> x = matrix();
        const std::int64_t number = parts();
        const auto part = static_cast<std::uint32_t>(number);
        if (given.group == 0) return launch(x.whole_eighths() ? absmax_all<X, true> : absmax_all<X, false>, dim3(part), THREADS, stream, x, partial);
        int status = OK;
        if (given.group == 1) {
            const std::int64_t tasks = ceiling(x.rows * number, WARPS);
            status = launch(absmax_rows<X, F>, dim3(static_cast<unsigned>(blocks(tasks, 32))), THREADS, stream, x, partial, given.scale, part);
            if (number == 1) return status;
        } else {
            status = launch(absmax_columns<X>, dim3(static_cast<unsigned>(ceiling(x.columns, 256)), part), THREADS, stream, x, partial);
        }
        if (status != OK) return status;
        const auto grid = static_cast<unsigned>(ceiling(groups(), THREADS));
        return launch(scales_of_parts<X, F>, dim3(grid), THREADS, stream, partial, given.scale, static_cast<std::uint32_t>(groups()), part);
    }

    template <Rounding R> int round(const std::uint32_t *partial, cudaStream_t stream) const {
        const Matrix<X> x = matrix();
        Outputs to;
        to.q = static_cast<std::uint8_t *>(given.q), to.qt = static_cast<std::uint8_t *>(given.qt);
        to.scale = given.scale, to.seed = given.seed, to.stream = given.stream;
        to.parts = given.group == 0 ? partial : nullptr;
        to.number_of_parts = given.group == 0 ? static_cast<std::uint32_t>(parts()) : 0;
        to.by_row = given.group == 1;
        to.q_aligned = multiple(given.q, 8) && (x.rows == 1 || x.columns % 8 == 0);
        to.qt_aligned = multiple(given.qt, 16) && x.rows % 16 == 0;
        // Rounding down is not performance-critical, so it has no specialized kernel.
        if constexpr (R != FLOOR) {
            if (x.whole_eighths() && to.q_aligned) return round<R, true>(x, to, stream);
        }
        return round<R, false>(x, to, stream);
    }

    template <Rounding R, bool WHOLE> int round(const Matrix<X> &x, const Outputs &to, cudaStream_t stream) const {
        if (!to.qt && given.group != 2) {
            const std::int64_t work = ceiling(x.eighths(), THREADS * (X == FLOAT32 ? 2 : 4));
            return launch(round_rows<X, F, R, WHOLE>, dim3(static_cast<unsigned>(blocks(work, 8))), THREADS, stream, x, to);
        }
        const std::int64_t tiles_a_row = ceiling(x.columns, TILE), tiles = tiles_a_row * ceiling(x.rows, TILE);
        const dim3 grid(static_cast<unsigned>(blocks(tiles, 12)));
        const auto a_row = static_cast<std::uint32_t>(tiles_a_row);
        const auto all = static_cast<std::uint64_t>(tiles);
        if (!to.qt) return launch(round_tiles<X, F, R, false, true, WHOLE>, grid, THREADS, stream, x, to, a_row, all);
        if (given.group == 2) return launch(round_tiles<X, F, R, true, true, WHOLE>, grid, THREADS, stream, x, to, a_row, all);
        return launch(round_tiles<X, F, R, true, false, WHOLE>, grid, THREADS, stream, x, to, a_row, all);
    }

    int run(void *workspace_, cudaStream_t stream) const {
        if (const Status status = check(); status != OK) return status;
        if (groups() == 0) return OK;
        if (empty()) {
            const auto number = static_cast<std::uint32_t>(groups());
            return launch(ones, dim3(static_cast<unsigned>(ceiling(number, THREADS))), THREADS, stream, given.scale, number);
        }
        if (workspace() != 0 && (!workspace_ || !multiple(workspace_, 4))) return WRONG_POINTER;
        auto *partial = static_cast<std::uint32_t *>(workspace_);
        if (const int status = absmax(partial, stream); status != OK) return status;
        if (given.rounding == NEAREST) return round<NEAREST>(partial, stream);
        if (given.rounding == STOCHASTIC) return round<STOCHASTIC>(partial, stream);
        return round<FLOOR>(partial, stream);
    }
};

} // namespace qsync

// Libraries are compiled with hidden visibility, so that two of them in one process share no
// symbol.
#define QSYNC_QUANTIZER_FUNCTION extern "C" __attribute__((visibility("default")))

#define QSYNC_QUANTIZER(NAME, X, F)                                                                                    \
    using Library = qsync::Quantizer<X, F>;                                                                            \
    using Given = qsync::QuantizeArguments;                                                                            \
    QSYNC_QUANTIZER_FUNCTION int qsync_abi() { return QSYNC_ABI_VERSION; }                                             \
    QSYNC_QUANTIZER_FUNCTION const char *qsync_name() { return NAME; }                                                 \
    QSYNC_QUANTIZER_FUNCTION int qsync_can_implement(const Given *given) { return Library(*given).check(); }           \
    QSYNC_QUANTIZER_FUNCTION std::int64_t qsync_workspace(const Given *given) { return Library(*given).workspace(); }  \
    QSYNC_QUANTIZER_FUNCTION int qsync_run(const Given *given, void *workspace, void *stream) {                        \
        return Library(*given).run(workspace, static_cast<cudaStream_t>(stream));                                      \
    }                                                                                                                  \
    QSYNC_QUANTIZER_FUNCTION int qsync_shared_memory() { return qsync::TILE * qsync::TILE + 4 * qsync::WARPS; }        \
    QSYNC_QUANTIZER_FUNCTION const char *qsync_error(int status) { return qsync::status_text(status); }
