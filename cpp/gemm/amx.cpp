// INT8 products by AMX: signed by signed bytes in tiles of 16 by 16 sums over 64 values.
// Rows are packed as tiles lie, 64 values of a vector together; columns in quads, as VNNI's.

#include "gemm/finish.h"
#include "gemm/quads.h"

#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace qsync {
namespace {

constexpr std::size_t ROWS = 32, COLUMNS = 32, DEPTH = 64, SIDE = 16;

void pack_rows(const Vectors &vectors, void *packed) {
    auto *to = static_cast<std::int8_t *>(packed);
    for (std::size_t k = 0; k < vectors.length; k += DEPTH) {
        for (std::size_t first = 0; first < ROWS; first += SIDE, to += SIDE * DEPTH) {
            const std::size_t have = vectors.count > first ? vectors.count - first : 0, count = have < SIDE ? have : SIDE;
            __m512i x[LANES];
            if (vectors.apart == 1 && vectors.along != 1) {
                // Quads of sixteen vectors are the turned tile.
                Vectors part = vectors;
                part.at += static_cast<std::ptrdiff_t>(first) + static_cast<std::ptrdiff_t>(k) * vectors.along;
                part.count = count;
                part.length = vectors.length - k < DEPTH ? vectors.length - k : DEPTH;
                alignas(64) std::int8_t quads[SIDE * DEPTH] = {};
                pack_quads<SIDE>(part, _mm512_setzero_si512(), quads);
                for (std::size_t i = 0; i < LANES; ++i) x[i] = _mm512_load_si512(quads + 64 * i);
                turn(x);
            } else {
                load(vectors, first, count, k, x);
            }
            for (std::size_t i = 0; i < LANES; ++i) _mm512_storeu_si512(to + DEPTH * i, x[i]);
        }
    }
}

void pack_columns(const Vectors &vectors, void *packed, std::int32_t *offsets) {
    pack_quads<COLUMNS>(vectors, _mm512_setzero_si512(), packed);
    const std::size_t packed_quads = (vectors.length + QUAD - 1) / QUAD, quads = (vectors.length + DEPTH - 1) / DEPTH * (DEPTH / QUAD);
    std::memset(static_cast<std::int8_t *>(packed) + packed_quads * COLUMNS * QUAD, 0, (quads - packed_quads) * COLUMNS * QUAD);
    std::memset(offsets, 0, COLUMNS * sizeof *offsets);
}

// Tiles 0 to 3 are the sums, 4 and 5 the rows, 6 and 7 the columns.
void multiply(const void *rows, const void *columns, const std::int32_t *, std::size_t length, std::int32_t *tile, bool add) {
    constexpr std::size_t LINE = COLUMNS * sizeof *tile;
    if (add) {
        _tile_loadd(0, tile, LINE);
        _tile_loadd(1, tile + SIDE, LINE);
        _tile_loadd(2, tile + SIDE * COLUMNS, LINE);
        _tile_loadd(3, tile + SIDE * COLUMNS + SIDE, LINE);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const auto *a = static_cast<const std::int8_t *>(rows), *b = static_cast<const std::int8_t *>(columns);
    for (std::size_t k = 0; k < length; k += DEPTH, a += ROWS * DEPTH, b += COLUMNS * DEPTH) {
        _tile_loadd(6, b, COLUMNS * QUAD);
        _tile_loadd(4, a, DEPTH);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, b + SIDE * QUAD, COLUMNS * QUAD);
        _tile_dpbssd(1, 4, 7);
        _tile_loadd(5, a + SIDE * DEPTH, DEPTH);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, tile, LINE);
    _tile_stored(1, tile + SIDE, LINE);
    _tile_stored(2, tile + SIDE * COLUMNS, LINE);
    _tile_stored(3, tile + SIDE * COLUMNS + SIDE, LINE);
}

// What tiles are: kept as data, since GCC before 12.4 and 13.3 takes _tile_loadconfig to read its first 8 bytes only (PR 114098), and leaves
// out what was to be written behind them on the stack.
struct Shapes {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
};
static_assert(sizeof(Shapes) == 64);
alignas(64) constexpr Shapes SHAPES;

void enter() { _tile_loadconfig(&SHAPES); }

void leave() { _tile_release(); }

} // namespace

bool amx_usable() {
#ifdef __linux__
    unsigned a, b, c, d;
    constexpr unsigned TILES = 1u << 24 | 1u << 25; // AMX-TILE and AMX-INT8
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & TILES) != TILES) return false;
    // Memory for the tiles is given to processes that ask for it: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
#else
    return false;
#endif
}

const Multiplier amx_multiplier = {
    ROWS, COLUMNS, DEPTH, sizeof(std::int8_t), &pack_rows, &pack_columns, &multiply, &finish<COLUMNS>, &enter, &leave,
};

} // namespace qsync
