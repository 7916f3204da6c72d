// Functions of cpp/cutlass/plain/rounding.cuh and philox.cuh on arrays, for
// tests/backend/cuda/codegen/test_cuda_rounding.py.
#include "plain/rounding.cuh"

using namespace qsync;

template <Format F, Rounding R> void each(std::int64_t n, const float *x, const float *scale, const std::uint16_t *sixteen_bits, std::uint8_t *out) {
    for (std::int64_t i = 0; i < n; ++i) {
        const Divisor by = divisor<R>(scale[i]);
        out[i] = static_cast<std::uint8_t>(rounded<F, R>(multiply(x[i], by.enlarged), by, sixteen_bits[i]));
    }
}

template <Format F> void each(int rounding, std::int64_t n, const float *x, const float *scale, const std::uint16_t *sixteen_bits, std::uint8_t *out) {
    if (rounding == NEAREST) each<F, NEAREST>(n, x, scale, sixteen_bits, out);
    if (rounding == STOCHASTIC) each<F, STOCHASTIC>(n, x, scale, sixteen_bits, out);
    if (rounding == FLOOR) each<F, FLOOR>(n, x, scale, sixteen_bits, out);
}

extern "C" {

void quotients(std::int64_t n, const float *x, const float *scale, float *out) {
    for (std::int64_t i = 0; i < n; ++i) {
        const Divisor by = divisor<STOCHASTIC>(scale[i]);
        out[i] = quotient<STOCHASTIC>(multiply(x[i], by.enlarged), by);
    }
}

void round_each(int format, int rounding, std::int64_t n, const float *x, const float *scale, const std::uint16_t *sixteen_bits, std::uint8_t *out) {
    if (format == INT8) each<INT8>(rounding, n, x, scale, sixteen_bits, out);
    if (format == E4M3) each<E4M3>(rounding, n, x, scale, sixteen_bits, out);
    if (format == E5M2) each<E5M2>(rounding, n, x, scale, sixteen_bits, out);
}

void widen_halves(float *out) {
    for (std::uint32_t word = 0; word < 65536; ++word) out[word] = widened<FLOAT16>(word);
}

void random_bits(std::int64_t blocks, std::int64_t first, std::int64_t seed, std::uint32_t stream, std::uint16_t *out) {
    const auto key = static_cast<std::uint64_t>(seed);
    const Random random{static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32), stream};
    for (std::int64_t i = 0; i < blocks; ++i) {
        Words words[1] = {random.counter(static_cast<std::uint64_t>(first + i))};
        random.draw(words);
        for (int j = 0; j < 8; ++j) out[8 * i + j] = static_cast<std::uint16_t>(sixteen(words[0], j));
    }
}

void philox(const std::uint32_t *counter, const std::uint32_t *key, std::uint32_t *out) {
    Words blocks[2] = {{{counter[0], counter[1], counter[2], counter[3]}}, {}};
    philox4x32(blocks, key[0], key[1]);
    for (int i = 0; i < 4; ++i) out[i] = blocks[0].word[i];
}
}
