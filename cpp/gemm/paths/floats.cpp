// BF16 GEMM micro-kernel with FP32 operations: fused multiply-add on AVX2 and above, plain C++
// otherwise. Products of BF16 numbers are exact in FP32.
//
// Packed layout: FP32, [k][vector]. Compiled once per ISA variant; the macro QSYNC_BF16 names the
// result.

#include "gemm/paths/finish.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace qsync {
namespace {

constexpr std::size_t ROWS = 6, COLUMNS = 16, DEPTH = 1;

float widened(Bfloat16 value) {
    const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
}

template <std::size_t WIDTH> void pack(const Vectors<Bfloat16> &vectors, float *to) {
    const std::size_t count = vectors.count < WIDTH ? vectors.count : WIDTH;
    if (count < WIDTH) std::memset(to, 0, vectors.length * WIDTH * sizeof *to);
    for (std::size_t i = 0; i < count; ++i) {
        const Bfloat16 *from = vectors.at + static_cast<std::ptrdiff_t>(i) * vectors.apart;
        for (std::size_t k = 0; k < vectors.length; ++k, from += vectors.along) to[k * WIDTH + i] = widened(*from);
    }
}

void pack_rows(const Vectors<Bfloat16> &vectors, void *packed) { pack<ROWS>(vectors, static_cast<float *>(packed)); }

void pack_columns(const Vectors<Bfloat16> &vectors, void *packed, float *offsets) {
    pack<COLUMNS>(vectors, static_cast<float *>(packed));
    std::memset(offsets, 0, COLUMNS * sizeof *offsets);
}

#ifdef __AVX2__

constexpr const char *INSTRUCTION = "vfmadd231ps";

void multiply(const void *rows, const void *columns, const float *offsets, std::size_t length, float *tile, bool add) {
    __m256 sums[ROWS][2];
    const float *begin = add ? tile : offsets;
    const std::size_t step = add ? COLUMNS : 0;
    each<ROWS>([&](auto r) {
        sums[r][0] = _mm256_loadu_ps(begin + r * step);
        sums[r][1] = _mm256_loadu_ps(begin + r * step + 8);
    });
    const auto *a = static_cast<const float *>(rows), *b = static_cast<const float *>(columns);
    for (std::size_t k = 0; k < length; ++k, a += ROWS, b += COLUMNS) {
        const __m256 first = _mm256_loadu_ps(b), second = _mm256_loadu_ps(b + 8);
        each<ROWS>([&](auto r) {
            const __m256 value = _mm256_set1_ps(a[r]);
            sums[r][0] = _mm256_fmadd_ps(value, first, sums[r][0]);
            sums[r][1] = _mm256_fmadd_ps(value, second, sums[r][1]);
        });
    }
    each<ROWS>([&](auto r) {
        _mm256_storeu_ps(tile + r * COLUMNS, sums[r][0]);
        _mm256_storeu_ps(tile + r * COLUMNS + 8, sums[r][1]);
    });
}

#else

constexpr const char *INSTRUCTION = "none";

void multiply(const void *rows, const void *columns, const float *offsets, std::size_t length, float *tile, bool add) {
    // A local array, which the compiler knows not to alias the operands.
    float sums[ROWS][COLUMNS];
    for (std::size_t r = 0; r < ROWS; ++r) std::memcpy(sums[r], add ? tile + r * COLUMNS : offsets, sizeof sums[r]);
    const auto *a = static_cast<const float *>(rows), *b = static_cast<const float *>(columns);
    for (std::size_t k = 0; k < length; ++k, a += ROWS, b += COLUMNS)
        for (std::size_t r = 0; r < ROWS; ++r)
            for (std::size_t c = 0; c < COLUMNS; ++c) sums[r][c] += a[r] * b[c];
    std::memcpy(tile, sums, sizeof sums);
}

#endif

} // namespace

extern const Multiplier<Bfloat16> QSYNC_BF16;
const Multiplier<Bfloat16> QSYNC_BF16 = {
    INSTRUCTION, ROWS, COLUMNS, DEPTH, sizeof(float), &pack_rows, &pack_columns, &multiply, &finish<COLUMNS>, nullptr, nullptr,
};

} // namespace qsync
