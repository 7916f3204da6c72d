// C interface of the copy and conversion kernels: argument checks and launch configuration. See
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
#include "plain/convert.cuh"

namespace qsync {

constexpr std::int64_t MOST = (std::int64_t{1} << 31) - 1;

inline bool within(std::int64_t number, std::int64_t most) { return number >= 0 && number <= most; }

// Launch configuration for one pair of element types. It depends on the arguments only.
template <Element X, Element Y> struct Pair {
    using T = Tile<X, Y>;

    static bool serves(const ConvertArguments &given) { return given.x_type == static_cast<int>(X) && given.y_type == static_cast<int>(Y); }

    // Work items, counted in 32 bits: vectors of rows or, for a transposed copy, tiles.
    struct Work {
        std::int64_t a_row, rows, all;
    };

    static Work work(const ConvertArguments &x) {
        if (x.turned) {
            const std::int64_t across = ceiling(x.y_rows, T::COLUMNS), down = ceiling(x.y_columns, T::ROWS);
            return counted(across, down, x.y_batches);
        }
        return counted(ceiling(x.y_columns, ELEMENTS<X, Y>), x.y_rows, x.y_batches);
    }

    static Work counted(std::int64_t a_row, std::int64_t rows, std::int64_t batches) {
        const bool fits = a_row <= MOST && rows <= MOST / most(a_row, 1) && batches <= MOST / most(a_row * rows, 1);
        return {a_row, rows, fits ? a_row * rows * batches : -1};
    }

    static Status check(const ConvertArguments &given) {
        constexpr std::int64_t FAR = std::int64_t{1} << 56; // larger sizes cannot exist in memory
        const std::int64_t rows = given.turned ? given.y_columns : given.y_rows, columns = given.turned ? given.y_rows : given.y_columns;
        for (const std::int64_t size : {given.batches, given.rows, given.columns, given.ldx, given.batch_stride, given.y_batches, given.y_rows, given.y_columns}) {
            if (!within(size, FAR)) return WRONG_SIZE;
        }
        if (given.batches > given.y_batches || given.rows > rows || given.columns > columns) return WRONG_SIZE;
        if (given.rows > 1 && given.ldx < given.columns) return WRONG_SIZE;
        if (empty(given)) return OK;
        if (work(flat(given)).all < 0) return WRONG_SIZE;
        const bool reads = given.batches && given.rows && given.columns;
        if (!given.y || !multiple(given.y, size_of(Y)) || (reads && (!given.x || !multiple(given.x, size_of(X))))) return WRONG_POINTER;
        return multiple(given.scale, 4) ? OK : WRONG_POINTER;
    }

    static bool empty(const ConvertArguments &given) { return !given.y_batches || !given.y_rows || !given.y_columns; }

    // Merge a contiguous, unpadded copy into a single row, so that only its end is a partial
    // vector.
    static ConvertArguments flat(ConvertArguments x) {
        const bool whole = x.batches == x.y_batches && x.rows == x.y_rows && x.columns == x.y_columns;
        const bool dense = (x.rows <= 1 || x.ldx == x.columns) && (x.batches <= 1 || x.batch_stride == x.rows * x.columns);
        if (x.turned || !whole || !dense) return x;
        x.columns = x.y_columns = x.batches * x.rows * x.columns;
        x.batches = x.rows = x.y_batches = x.y_rows = 1;
        x.ldx = x.batch_stride = x.columns;
        return x;
    }

    static int run(const ConvertArguments &given, cudaStream_t stream) {
        if (empty(given)) return OK;
        const ConvertArguments x = flat(given);
        const Work found = work(x);
        const int read = (x.turned ? T::EACH : ELEMENTS<X, Y>) * size_of(X), written = x.turned ? 16 : ELEMENTS<X, Y> * size_of(Y);
        const auto aligned = [](std::int64_t elements, int size, int bytes) { return elements * size % bytes == 0; };
        Copy copy;
        copy.x = static_cast<const std::uint8_t *>(x.x), copy.y = static_cast<std::uint8_t *>(x.y), copy.scale = x.scale;
        copy.batches = x.batches, copy.rows = x.rows, copy.columns = x.columns, copy.stride = x.ldx, copy.batch_stride = x.batch_stride;
        copy.y_rows = x.y_rows, copy.y_columns = x.y_columns;
        copy.a_row = static_cast<std::uint32_t>(found.a_row);
        copy.by_row = Division(copy.a_row);
        copy.by_matrix = Division(static_cast<std::uint32_t>(x.turned ? found.a_row * found.rows : found.rows));
        copy.x_aligned = multiple(x.x, read) && (x.rows <= 1 || aligned(x.ldx, size_of(X), read)) && (x.batches <= 1 || aligned(x.batch_stride, size_of(X), read));
        copy.y_aligned = multiple(x.y, written) && (x.y_batches * x.y_rows == 1 || aligned(x.y_columns, size_of(Y), written));
        const bool whole = copy.x_aligned && copy.y_aligned && aligned(x.columns, size_of(X), read) && aligned(x.y_columns, size_of(Y), written);
        const auto all = static_cast<std::uint32_t>(found.all);
        // Launch several times as many threadblocks as can run at once, to shorten the tail of the
        // last wave.
        const std::int64_t together = 32 * most(given.multiprocessors, 1);
        if (x.turned) {
            const dim3 grid(static_cast<unsigned>(least(found.all, together)));
            return launch(whole ? copy_turned<X, Y, true> : copy_turned<X, Y, false>, grid, COPYING, stream, copy, all);
        }
        const dim3 grid(static_cast<unsigned>(least(ceiling(found.all, COPYING * (whole ? 4 : 1)), together)));
        return launch(whole ? copy_rows<X, Y, true> : copy_rows<X, Y, false>, grid, COPYING, stream, copy, all);
    }
};

// Library for a list of type pairs.
template <class... Pairs> struct Converter {
    static int check(const ConvertArguments &given) {
        int status = WRONG_TYPE;
        (void)((Pairs::serves(given) && (status = Pairs::check(given), true)) || ...);
        return status;
    }

    static int run(const ConvertArguments &given, cudaStream_t stream) {
        if (const int status = check(given); status != OK) return status;
        int status = OK;
        (void)((Pairs::serves(given) && (status = Pairs::run(given, stream), true)) || ...);
        return status;
    }

    static int shared_memory() {
        int found = 0;
        ((found = Pairs::T::BYTES > found ? Pairs::T::BYTES : found), ...);
        return found;
    }
};

template <Element X> using FloatsOf = Converter<Pair<X, Element::FLOAT16>, Pair<X, Element::BFLOAT16>, Pair<X, Element::FLOAT32>>;
using Bits = Converter<Pair<Element::BITS8, Element::BITS8>, Pair<Element::BITS16, Element::BITS16>, Pair<Element::BITS32, Element::BITS32>>;

} // namespace qsync

// Libraries are compiled with hidden visibility, so that two of them in one process share no
// symbol.
#define QSYNC_CONVERT_FUNCTION extern "C" __attribute__((visibility("default")))

#define QSYNC_CONVERT(NAME, ...)                                                                                       \
    using Library = __VA_ARGS__;                                                                                       \
    using Given = qsync::ConvertArguments;                                                                             \
    QSYNC_CONVERT_FUNCTION int qsync_abi() { return QSYNC_ABI_VERSION; }                                               \
    QSYNC_CONVERT_FUNCTION const char *qsync_name() { return NAME; }                                                   \
    QSYNC_CONVERT_FUNCTION int qsync_can_implement(const Given *given) { return Library::check(*given); }              \
    QSYNC_CONVERT_FUNCTION std::int64_t qsync_workspace(const Given *) { return 0; }                                   \
    QSYNC_CONVERT_FUNCTION int qsync_run(const Given *given, void *, void *stream) {                                   \
        return Library::run(*given, static_cast<cudaStream_t>(stream));                                                \
    }                                                                                                                  \
    QSYNC_CONVERT_FUNCTION int qsync_shared_memory() { return Library::shared_memory(); }                              \
    QSYNC_CONVERT_FUNCTION const char *qsync_error(int status) { return qsync::status_text(status); }
