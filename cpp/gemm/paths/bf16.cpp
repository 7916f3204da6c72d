// BF16 GEMM micro-kernel for AVX512-BF16. The instruction vdpbf16ps adds the two products of a word
// one after the other, rounding each sum to nearest. It flushes denormal operands and sums to zero.

#include "gemm/paths/words.h"

namespace qsync {
namespace {

constexpr std::size_t ROWS = 12, COLUMNS = 2 * LANES;

void pack_rows(const Vectors<Bfloat16> &vectors, void *packed) { pack_words<ROWS>(vectors, _mm512_setzero_si512(), packed); }

void pack_columns(const Vectors<Bfloat16> &vectors, void *packed, float *offsets) {
    pack_words<COLUMNS>(vectors, _mm512_setzero_si512(), packed);
    std::memset(offsets, 0, COLUMNS * sizeof *offsets);
}

void multiply(const void *rows, const void *columns, const float *offsets, std::size_t length, float *tile, bool add) {
    multiply_words<ROWS>(rows, columns, offsets, length / A_WORD<Bfloat16>, tile, add, [](__m512i sums, __m512i a, __m512i b) {
        return _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(sums), (__m512bh)a, (__m512bh)b));
    });
}

} // namespace

const Multiplier<Bfloat16> avx512_vnni_bf16 = {
    "vdpbf16ps", ROWS, COLUMNS, A_WORD<Bfloat16>, sizeof(Bfloat16), &pack_rows, &pack_columns, &multiply, &finish<COLUMNS>, nullptr, nullptr,
};

} // namespace qsync
