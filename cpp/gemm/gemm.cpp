// Blocked GEMM around the micro-kernels: packing of operands, cache blocking, distribution over
// threads.

#include "gemm/gemm.h"

#include "gemm/workspace.h"
#include "parallel.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace qsync {
namespace {

// Cache blocking. A block of packed rows and a block of packed columns that are multiplied with
// each other stay in the L2 cache of a core. SUMS_BYTES limits partial sums that wait for the next
// K block. K is one block up to LONGEST, else it is split into blocks of PART.
constexpr std::size_t ROWS_BYTES = std::size_t{1} << 18, COLUMNS_BYTES = 3 * (std::size_t{1} << 17), SUMS_BYTES = std::size_t{1} << 19,
                      LONGEST = 4096, PART = 1024;

// Products with fewer multiplications take less time than waking a thread.
constexpr std::size_t WORTH_A_THREAD = std::size_t{1} << 19;

constexpr std::size_t MOST_TILE = 32 * 32, LINE = 64;

// Return the quotient rounded up, and n rounded up to a multiple of `size`.
std::size_t parts(std::size_t n, std::size_t size) { return (n + size - 1) / size; }
std::size_t filled(std::size_t n, std::size_t size) { return parts(n, size) * size; }

// Return the vectors from `first` on, restricted to at most `length` values from k on.
template <class T> Vectors<T> part_of(const Vectors<T> &all, std::size_t first, std::size_t k, std::size_t length) {
    const auto offset = static_cast<std::ptrdiff_t>(first) * all.apart + static_cast<std::ptrdiff_t>(k) * all.along;
    return {all.at + offset, all.count - first, std::min(length, all.length - k), all.apart, all.along};
}

// Blocking of a product: tiles into blocks, blocks onto threads, K into K blocks.
struct Cut {
    std::size_t depth;                   // K, padded
    std::size_t part;                    // K block
    std::size_t row_tiles, column_tiles; // tiles of the result
    std::size_t tall, wide;              // tiles per block
    std::size_t down, across;            // blocks of the result
    std::size_t rows_bytes, sums_bytes, gathered_bytes; // memory per thread

    template <class T> Cut(const Multiplier<T> &with, const Gemm<T> &what, std::size_t threads) {
        depth = filled(what.a.length, with.depth);
        part = depth <= LONGEST ? depth : PART;
        row_tiles = parts(what.a.count, with.rows);
        column_tiles = parts(what.b.count, with.columns);
        const std::size_t tile_bytes = std::max<std::size_t>(1, with.rows * part * with.value);
        tall = std::clamp<std::size_t>(ROWS_BYTES / tile_bytes, 1, row_tiles);
        // Distribute the row blocks evenly over the threads if there are enough rows.
        down = std::min(filled(parts(row_tiles, tall), threads), row_tiles);
        tall = parts(row_tiles, down);
        down = parts(row_tiles, tall);
        const bool waits = part < depth;
        const std::size_t sums = tall * with.rows * with.columns * sizeof(Sum<T>);
        const std::size_t column_bytes = std::max<std::size_t>(1, with.columns * part * with.value);
        wide = std::clamp<std::size_t>(COLUMNS_BYTES / column_bytes, 1, column_tiles);
        if (waits) wide = std::clamp<std::size_t>(SUMS_BYTES / sums, 1, wide);
        if (down % threads != 0) wide = std::min(wide, parts(column_tiles, threads));
        across = parts(column_tiles, wide);
        rows_bytes = filled(tall * with.rows * part * with.value, LINE);
        sums_bytes = waits ? filled(wide * sums, LINE) : 0;
        gathered_bytes = what.windows != nullptr ? filled(tall * with.rows * part, LINE) : 0;
    }
};

template <class T> struct Product {
    const Multiplier<T> &with;
    const Gemm<T> &what;
    const Cut &cut;
    std::byte *columns; // packed columns: consecutive tiles
    Sum<T> *offsets;    // one per column
    Target target;
    std::size_t value; // bytes per value of the result

    std::byte *column_tile(std::size_t tile) const { return columns + tile * cut.depth * with.columns * with.value; }

    // Pack columns of tiles [begin, end), over the full K.
    void pack_columns(std::size_t begin, std::size_t end) const {
        for (std::size_t tile = begin; tile < end; ++tile) {
            const Vectors<T> some = part_of(what.b, tile * with.columns, 0, what.b.length);
            with.pack_columns(some, column_tile(tile), offsets + tile * with.columns);
        }
    }

    // Return the rows of a block, values [k, k + part): a view of the operand or, for a
    // convolution, of im2col values that are gathered into `memory`.
    Vectors<T> block_rows(std::size_t block, std::size_t k, std::byte *memory) const {
        const std::size_t first = block * cut.tall * with.rows;
        Vectors<T> rows = part_of(what.a, first, k, cut.part);
        rows.count = std::min(rows.count, cut.tall * with.rows);
        if constexpr (std::is_same_v<T, Int8>) {
            if (what.windows == nullptr) return rows;
            auto *to = reinterpret_cast<std::int8_t *>(memory);
            if (what.taps)
                gather(*what.windows, what.a.at, k, rows.length, first, rows.count, to);
            else
                gather(*what.windows, what.a.at, first, rows.count, k, rows.length, to);
            const auto line = static_cast<std::ptrdiff_t>(what.taps ? rows.count : rows.length);
            return {to, rows.count, rows.length, what.taps ? 1 : line, what.taps ? line : 1};
        }
        return rows;
    }

    void pack_rows(std::size_t block, std::size_t k, std::byte *packed, std::byte *memory) const {
        const Vectors<T> rows = block_rows(block, k, memory);
        for (std::size_t row = 0; row < rows.count; row += with.rows, packed += with.rows * cut.part * with.value)
            with.pack_rows(part_of(rows, row, 0, rows.length), packed);
    }

    void finish(const Sum<T> *sums, std::size_t row, std::size_t column) const {
        Target to = target;
        to.to = static_cast<std::byte *>(target.to) + (row * target.stride + column) * value;
        to.row_scales += row * target.row_step;
        to.column_scales += column;
        to.bias += column;
        with.finish(sums, std::min(with.rows, what.a.count - row), std::min(with.columns, what.b.count - column), to);
    }

    // Multiply one block of the result by one K block, tile by tile along a row, in the memory
    // order of the result.
    void multiply(std::size_t down, std::size_t across, std::size_t k, const std::byte *rows, Sum<T> *sums) const {
        const std::size_t length = std::min(cut.part, cut.depth - k), tile_sums = with.rows * with.columns;
        const bool first = k == 0, last = k + length == cut.depth;
        const std::size_t row_end = std::min((down + 1) * cut.tall, cut.row_tiles);
        const std::size_t column_end = std::min((across + 1) * cut.wide, cut.column_tiles);
        for (std::size_t row = down * cut.tall; row < row_end; ++row, rows += with.rows * cut.part * with.value) {
            for (std::size_t column = across * cut.wide; column < column_end; ++column) {
                const std::byte *tile_columns = column_tile(column) + k * with.columns * with.value;
                alignas(LINE) Sum<T> here[MOST_TILE];
                Sum<T> *tile = first && last ? here : sums;
                with.multiply(rows, tile_columns, offsets + column * with.columns, length, tile, !first);
                if (last) finish(tile, row * with.rows, column * with.columns);
                if (tile == sums) sums += tile_sums;
            }
        }
    }

    // Compute blocks [begin, end) of the result with one thread. `memory` stores its packed rows,
    // partial sums and gathered windows.
    void run(std::size_t begin, std::size_t end, std::byte *memory) const {
        std::byte *rows = memory;
        auto *sums = reinterpret_cast<Sum<T> *>(memory + cut.rows_bytes);
        std::size_t packed = SIZE_MAX; // row block that is packed over the full K
        for (std::size_t block = begin; block < end; ++block) {
            const std::size_t down = block / cut.across, across = block % cut.across;
            std::size_t k = 0;
            do {
                if (packed != down) pack_rows(down, k, rows, memory + cut.rows_bytes + cut.sums_bytes);
                if (cut.part >= cut.depth) packed = down;
                multiply(down, across, k, rows, sums);
                k += cut.part;
            } while (k < cut.depth);
        }
    }
};

// Write one value per column to `to`, padded to `whole` columns: the given scales, one scale for
// all, or `otherwise`.
const float *each_column(const Scales &given, float otherwise, std::size_t count, std::size_t whole, float *to) {
    const bool each = given.at != nullptr && given.each;
    if (each) std::memcpy(to, given.at, count * sizeof *to);
    std::fill(each ? to + count : to, to + whole, given.at != nullptr && !each ? *given.at : otherwise);
    return to;
}

} // namespace

template <class T> void gemm(const Multiplier<T> &with, const Gemm<T> &what, int threads) {
    const std::size_t m = what.a.count, n = what.b.count;
    if (m == 0 || n == 0) return;
    const std::size_t tiles = parts(m, with.rows) * parts(n, with.columns);
    const bool small = m * n < WORTH_A_THREAD && m * n * what.a.length < WORTH_A_THREAD;
    const std::size_t team = small ? 1 : std::min(static_cast<std::size_t>(threads), tiles);
    const Cut cut(with, what, team);
    const std::size_t whole = cut.column_tiles * with.columns;
    const std::size_t columns_bytes = filled(cut.depth * whole * with.value, LINE), vector = filled(whole * sizeof(float), LINE);
    const std::size_t own = cut.rows_bytes + cut.sums_bytes + cut.gathered_bytes;
    const Workspace memory(columns_bytes + 3 * vector + team * own);
    std::byte *const vectors = memory.get() + columns_bytes;
    auto *offsets = reinterpret_cast<Sum<T> *>(vectors);
    const float *scales = each_column(what.b_scale, 1.0f, n, whole, reinterpret_cast<float *>(vectors + vector));
    const float *bias = each_column({what.bias, true}, 0.0f, n, whole, reinterpret_cast<float *>(vectors + 2 * vector));
    static const float one = 1.0f;
    const Target target{what.result, n,    what.output, what.a_scale.at != nullptr ? what.a_scale.at : &one,
                        what.a_scale.at != nullptr && what.a_scale.each, scales, bias, what.activation};
    constexpr std::size_t VALUES[OUTPUTS] = {4, 2, 4};
    const Product<T> product{with, what, cut, memory.get(), offsets, target, VALUES[what.output]};
    const int most = static_cast<int>(team);
    parallel(cut.column_tiles, 1, most, [&](std::size_t begin, std::size_t end, std::size_t) { product.pack_columns(begin, end); });
    parallel(cut.down * cut.across, 1, most, [&](std::size_t begin, std::size_t end, std::size_t thread) {
        if (with.enter != nullptr) with.enter();
        product.run(begin, end, vectors + 3 * vector + thread * own);
        if (with.leave != nullptr) with.leave();
    });
}

template <class T> double gemm_peak(const Multiplier<T> &with) {
    constexpr std::size_t LENGTH = 256;
    constexpr int CALLS = 1000, TRIES = 20;
    const std::size_t rows = filled(with.rows * LENGTH * with.value, LINE), columns = filled(with.columns * LENGTH * with.value, LINE);
    const Workspace memory(rows + columns + with.columns * sizeof(Sum<T>));
    std::memset(memory.get(), 0, rows + columns + with.columns * sizeof(Sum<T>));
    const auto *offsets = reinterpret_cast<const Sum<T> *>(memory.get() + rows + columns);
    alignas(LINE) Sum<T> tile[MOST_TILE];
    using Clock = std::chrono::steady_clock;
    double best = 0;
    if (with.enter != nullptr) with.enter();
    for (int attempt = 0; attempt < TRIES; ++attempt) {
        const auto begin = Clock::now();
        for (int call = 0; call < CALLS; ++call) with.multiply(memory.get(), memory.get() + rows, offsets, LENGTH, tile, call != 0);
        const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
        best = std::max(best, 2.0 * CALLS * static_cast<double>(with.rows * with.columns * LENGTH) / seconds);
    }
    if (with.leave != nullptr) with.leave();
    return best;
}

template void gemm(const Multiplier<Int8> &, const Gemm<Int8> &, int);
template void gemm(const Multiplier<Bfloat16> &, const Gemm<Bfloat16> &, int);
template double gemm_peak(const Multiplier<Int8> &);
template double gemm_peak(const Multiplier<Bfloat16> &);

} // namespace qsync
