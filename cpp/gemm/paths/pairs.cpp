// INT8 GEMM micro-kernel with pairs of 16-bit numbers: vpmaddwd on AVX2 and above, plain C++
// otherwise. The byte instruction vpmaddubsw saturates at 16 bits, which two products of INT8
// exceed.
//
// Packed layout: int16, [k / 2][vector][2]. Compiled once per ISA variant; the macro QSYNC_INT8
// names the result.

#include "gemm/paths/finish.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace qsync {
namespace {

constexpr std::size_t ROWS = 6, COLUMNS = 16, DEPTH = 2;

template <std::size_t WIDTH> void pack(const Vectors<Int8> &vectors, std::int16_t *to) {
    const std::size_t length = (vectors.length + 1) / 2 * 2;
    const std::size_t count = vectors.count < WIDTH ? vectors.count : WIDTH;
    if (count < WIDTH) std::memset(to, 0, length * WIDTH * sizeof *to);
    for (std::size_t i = 0; i < count; ++i) {
        const std::int8_t *from = vectors.at + static_cast<std::ptrdiff_t>(i) * vectors.apart;
        std::int16_t *pair = to + 2 * i;
        for (std::size_t k = 0; k + 1 < vectors.length; k += 2, pair += 2 * WIDTH, from += 2 * vectors.along) {
            pair[0] = from[0];
            pair[1] = from[vectors.along];
        }
        if (vectors.length % 2 != 0) {
            pair[0] = from[0];
            pair[1] = 0;
        }
    }
}

void pack_rows(const Vectors<Int8> &vectors, void *packed) { pack<ROWS>(vectors, static_cast<std::int16_t *>(packed)); }

void pack_columns(const Vectors<Int8> &vectors, void *packed, std::int32_t *offsets) {
    pack<COLUMNS>(vectors, static_cast<std::int16_t *>(packed));
    std::memset(offsets, 0, COLUMNS * sizeof *offsets);
}

#ifdef __AVX2__

constexpr const char *INSTRUCTION = "vpmaddwd";

void multiply(const void *rows, const void *columns, const std::int32_t *offsets, std::size_t length, std::int32_t *tile, bool add) {
    __m256i sums[ROWS][2];
    const std::int32_t *begin = add ? tile : offsets;
    const std::size_t step = add ? COLUMNS : 0;
    each<ROWS>([&](auto r) {
        sums[r][0] = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(begin + r * step));
        sums[r][1] = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(begin + r * step + 8));
    });
    const auto *a = static_cast<const std::int32_t *>(rows);
    const auto *b = static_cast<const __m256i *>(columns);
    for (std::size_t k = 0; k < length; k += DEPTH, a += ROWS, b += 2) {
        const __m256i first = _mm256_loadu_si256(b), second = _mm256_loadu_si256(b + 1);
        each<ROWS>([&](auto r) {
            const __m256i pair = _mm256_set1_epi32(a[r]);
            sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(pair, first));
            sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(pair, second));
        });
    }
    each<ROWS>([&](auto r) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(tile + r * COLUMNS), sums[r][0]);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(tile + r * COLUMNS + 8), sums[r][1]);
    });
}

#else

constexpr const char *INSTRUCTION = "none";

void multiply(const void *rows, const void *columns, const std::int32_t *offsets, std::size_t length, std::int32_t *tile, bool add) {
    if (!add)
        for (std::size_t r = 0; r < ROWS; ++r) std::memcpy(tile + r * COLUMNS, offsets, COLUMNS * sizeof *tile);
    const auto *a = static_cast<const std::int16_t *>(rows), *b = static_cast<const std::int16_t *>(columns);
    for (std::size_t k = 0; k < length; k += DEPTH, a += 2 * ROWS, b += 2 * COLUMNS)
        for (std::size_t r = 0; r < ROWS; ++r)
            for (std::size_t c = 0; c < COLUMNS; ++c) tile[r * COLUMNS + c] += a[2 * r] * b[2 * c] + a[2 * r + 1] * b[2 * c + 1];
}

#endif

} // namespace

extern const Multiplier<Int8> QSYNC_INT8;
const Multiplier<Int8> QSYNC_INT8 = {
    INSTRUCTION, ROWS, COLUMNS, DEPTH, sizeof(std::int16_t), &pack_rows, &pack_columns, &multiply, &finish<COLUMNS>, nullptr, nullptr,
};

} // namespace qsync
