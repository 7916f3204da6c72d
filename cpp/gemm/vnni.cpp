// INT8 products by AVX512-VNNI. Its instruction multiplies unsigned by signed bytes: rows are packed with 128 added, which takes as much as
// 128 times the sum of a column from each of its results. Nothing saturates: what leaves INT32 on the way wraps, and comes back.

#include "gemm/finish.h"
#include "gemm/quads.h"

namespace qsync {
namespace {

constexpr std::size_t ROWS = 12, COLUMNS = 32;

void pack_rows(const Vectors &vectors, void *packed) { pack_quads<ROWS>(vectors, _mm512_set1_epi8(-128), packed); }

void pack_columns(const Vectors &vectors, void *packed, std::int32_t *offsets) {
    pack_quads<COLUMNS>(vectors, _mm512_setzero_si512(), packed);
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    const auto *at = static_cast<const std::int8_t *>(packed);
    for (std::size_t k = 0; k < vectors.length; k += QUAD, at += COLUMNS * QUAD)
        for (std::size_t h = 0; h < 2; ++h) sums[h] = _mm512_dpbusd_epi32(sums[h], _mm512_set1_epi8(1), _mm512_loadu_si512(at + 64 * h));
    for (std::size_t h = 0; h < 2; ++h)
        _mm512_storeu_si512(offsets + 16 * h, _mm512_mullo_epi32(sums[h], _mm512_set1_epi32(-128)));
}

void multiply(const void *rows, const void *columns, const std::int32_t *offsets, std::size_t length, std::int32_t *tile, bool add) {
    __m512i sums[ROWS][2];
    const std::int32_t *begin = add ? tile : offsets;
    const std::size_t step = add ? COLUMNS : 0;
    each<ROWS>([&](auto r) {
        sums[r][0] = _mm512_loadu_si512(begin + r * step);
        sums[r][1] = _mm512_loadu_si512(begin + r * step + 16);
    });
    const auto *a = static_cast<const std::int32_t *>(rows);
    const auto *b = static_cast<const std::int8_t *>(columns);
    for (std::size_t k = 0; k < length; k += QUAD, a += ROWS, b += COLUMNS * QUAD) {
        const __m512i first = _mm512_loadu_si512(b), second = _mm512_loadu_si512(b + 64);
        each<ROWS>([&](auto r) {
            const __m512i quad = _mm512_set1_epi32(a[r]);
            sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], quad, first);
            sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], quad, second);
        });
    }
    each<ROWS>([&](auto r) {
        _mm512_storeu_si512(tile + r * COLUMNS, sums[r][0]);
        _mm512_storeu_si512(tile + r * COLUMNS + 16, sums[r][1]);
    });
}

} // namespace

const Multiplier avx512_vnni_multiplier = {
    ROWS, COLUMNS, QUAD, sizeof(std::int8_t), &pack_rows, &pack_columns, &multiply, &finish<COLUMNS>, nullptr, nullptr,
};

} // namespace qsync
