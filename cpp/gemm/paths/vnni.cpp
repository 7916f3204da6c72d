// INT8 GEMM micro-kernel for AVX512-VNNI. Its instruction vpdpbusd multiplies unsigned by signed
// bytes: rows are packed with 128 added, and the initial value of the sums of a column is -128
// times the column sum. The instruction does not saturate: an intermediate overflow of INT32 wraps
// around and cancels.

#include "gemm/paths/words.h"

namespace qsync {
namespace {

constexpr std::size_t ROWS = 12, COLUMNS = 2 * LANES;

void pack_rows(const Vectors<Int8> &vectors, void *packed) { pack_words<ROWS>(vectors, _mm512_set1_epi8(-128), packed); }

void pack_columns(const Vectors<Int8> &vectors, void *packed, std::int32_t *offsets) {
    pack_words<COLUMNS>(vectors, _mm512_setzero_si512(), packed);
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    const auto *at = static_cast<const std::byte *>(packed);
    for (std::size_t word = 0; word < words(vectors); ++word, at += COLUMNS * WORD)
        for (std::size_t h = 0; h < 2; ++h) sums[h] = _mm512_dpbusd_epi32(sums[h], _mm512_set1_epi8(1), _mm512_loadu_si512(at + CHUNK * h));
    for (std::size_t h = 0; h < 2; ++h)
        _mm512_storeu_si512(offsets + LANES * h, _mm512_mullo_epi32(sums[h], _mm512_set1_epi32(-128)));
}

void multiply(const void *rows, const void *columns, const std::int32_t *offsets, std::size_t length, std::int32_t *tile, bool add) {
    multiply_words<ROWS>(rows, columns, offsets, length / A_WORD<Int8>, tile, add,
                         [](__m512i sums, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(sums, a, b); });
}

} // namespace

const Multiplier<Int8> avx512_vnni_int8 = {
    "vpdpbusd", ROWS, COLUMNS, A_WORD<Int8>, sizeof(Int8), &pack_rows, &pack_columns, &multiply, &finish<COLUMNS>, nullptr, nullptr,
};

} // namespace qsync
