// INT8 and BF16 GEMM micro-kernels for AMX: tiles of 16 x 16 sums over 64 bytes of each vector.
//
// Packed layout: rows as AMX tiles, 64 consecutive bytes per vector; columns in words, as for VNNI
// (words.h).

#include "gemm/paths/words.h"

#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace qsync {
namespace {

constexpr std::size_t ROWS = 32, COLUMNS = 32, SIDE = 16;

template <class T> void pack_rows(const Vectors<T> &vectors, void *packed) {
    auto *to = static_cast<std::byte *>(packed);
    for (std::size_t k = 0; k < vectors.length; k += A_CHUNK<T>) {
        for (std::size_t first = 0; first < ROWS; first += SIDE, to += SIDE * CHUNK) {
            const std::size_t have = vectors.count > first ? vectors.count - first : 0, count = have < SIDE ? have : SIDE;
            __m512i x[LANES];
            if (vectors.apart == 1 && vectors.along != 1) {
                // Words of sixteen vectors are the transposed tile.
                Vectors<T> part = vectors;
                part.at += static_cast<std::ptrdiff_t>(first) + static_cast<std::ptrdiff_t>(k) * vectors.along;
                part.count = count;
                part.length = vectors.length - k < A_CHUNK<T> ? vectors.length - k : A_CHUNK<T>;
                alignas(64) std::byte turned[SIDE * CHUNK] = {};
                pack_words<SIDE>(part, _mm512_setzero_si512(), turned);
                for (std::size_t i = 0; i < LANES; ++i) x[i] = _mm512_load_si512(turned + CHUNK * i);
                turn(x);
            } else {
                load(vectors, first, count, k, x);
            }
            for (std::size_t i = 0; i < LANES; ++i) _mm512_storeu_si512(to + CHUNK * i, x[i]);
        }
    }
}

template <class T> void pack_columns(const Vectors<T> &vectors, void *packed, Sum<T> *offsets) {
    pack_words<COLUMNS>(vectors, _mm512_setzero_si512(), packed);
    const std::size_t have = words(vectors), whole = (have + LANES - 1) / LANES * LANES;
    std::memset(static_cast<std::byte *>(packed) + have * COLUMNS * WORD, 0, (whole - have) * COLUMNS * WORD);
    std::memset(offsets, 0, COLUMNS * sizeof *offsets);
}

// Accumulate the products of tiles. GCC requires tile numbers as literals.
#define QSYNC_DOT(SUMS, FIRST, SECOND)                                                                                                     \
    if constexpr (std::is_same_v<T, Int8>)                                                                                                 \
        _tile_dpbssd(SUMS, FIRST, SECOND);                                                                                                 \
    else                                                                                                                                   \
        _tile_dpbf16ps(SUMS, FIRST, SECOND)

// Tiles 0 to 3 are the sums, 4 and 5 the rows, 6 and 7 the columns.
template <class T>
void multiply(const void *rows, const void *columns, const Sum<T> *, std::size_t length, Sum<T> *tile, bool add) {
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
    const auto *a = static_cast<const std::byte *>(rows), *b = static_cast<const std::byte *>(columns);
    for (std::size_t k = 0; k < length; k += A_CHUNK<T>, a += ROWS * CHUNK, b += COLUMNS * CHUNK) {
        _tile_loadd(6, b, COLUMNS * WORD);
        _tile_loadd(4, a, CHUNK);
        QSYNC_DOT(0, 4, 6);
        _tile_loadd(7, b + SIDE * WORD, COLUMNS * WORD);
        QSYNC_DOT(1, 4, 7);
        _tile_loadd(5, a + SIDE * CHUNK, CHUNK);
        QSYNC_DOT(2, 5, 6);
        QSYNC_DOT(3, 5, 7);
    }
    _tile_stored(0, tile, LINE);
    _tile_stored(1, tile + SIDE, LINE);
    _tile_stored(2, tile + SIDE * COLUMNS, LINE);
    _tile_stored(3, tile + SIDE * COLUMNS + SIDE, LINE);
}

// Tile configuration, as static data: GCC before 12.4 and 13.3 assumes that _tile_loadconfig reads
// only the first 8 bytes (PR 114098) and omits stores to the remaining bytes of a configuration on
// the stack.
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
    constexpr unsigned TILES = 1u << 22 | 1u << 24 | 1u << 25; // AMX-BF16, AMX-TILE, AMX-INT8
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & TILES) != TILES) return false;
    // A process must request memory for the tile state: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
#else
    return false;
#endif
}

const Multiplier<Int8> amx_int8 = {
    "tdpbssd", ROWS, COLUMNS, A_CHUNK<Int8>, sizeof(Int8), &pack_rows, &pack_columns, &multiply<Int8>, &finish<COLUMNS>, &enter, &leave,
};

const Multiplier<Bfloat16> amx_bf16 = {
    "tdpbf16ps",         ROWS,             COLUMNS, A_CHUNK<Bfloat16>, sizeof(Bfloat16), &pack_rows, &pack_columns,
    &multiply<Bfloat16>, &finish<COLUMNS>, &enter,  &leave,
};

} // namespace qsync
