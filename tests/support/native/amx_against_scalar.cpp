// Random products by AMX kernels and scalar kernels: equal bits for all sizes, layouts, scales and
// outputs. BF16 operands are integers, whose sums are exact, or random numbers, whose results must
// be close. The argument "unconfigured" multiplies without configured tiles, which must end the
// process.

#include "gemm/gemm.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

std::mt19937 drawn(0);

std::size_t any(std::size_t least, std::size_t most) { return least + drawn() % (most - least + 1); }

void draw(qsync::Int8 &value) { value = static_cast<qsync::Int8>(drawn()); }

qsync::Bfloat16 narrowed(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return {static_cast<std::uint16_t>(bits >> 16)};
}

void draw(qsync::Bfloat16 &value) { value = narrowed(static_cast<float>(static_cast<int>(drawn() % 129) - 64)); }

qsync::Int8 largest(qsync::Int8) { return -128; }
qsync::Bfloat16 largest(qsync::Bfloat16) { return narrowed(-64.0f); }

// Values of vectors that are contiguous, interleaved, or strided with gaps.
template <class T> struct Operand {
    std::vector<T> values;
    qsync::Vectors<T> vectors;

    Operand(std::size_t count, std::size_t length, int layout) {
        const auto across = static_cast<std::ptrdiff_t>(count), along = static_cast<std::ptrdiff_t>(length);
        const std::ptrdiff_t apart = layout == 0 ? along : layout == 1 ? 1 : 2 * along + 3, step = layout == 0 ? 1 : layout == 1 ? across : 2;
        // No larger than the accessed range, so that sanitizers detect reads beyond it.
        values.resize(layout == 2 ? count * (2 * length + 3) : count * length);
        for (T &value : values) draw(value);
        // Sometimes all values have the largest magnitude, and sums are at their maximum.
        if (drawn() % 8 == 0) std::fill(values.begin(), values.end(), largest(T()));
        vectors = {values.data(), count, length, apart, step};
    }
};

std::vector<float> floats(std::size_t count, float least, float step) {
    std::vector<float> found(count);
    for (float &value : found) value = least + step * static_cast<float>(drawn() % 1000);
    return found;
}

template <class T>
bool same(const qsync::Multiplier<T> &amx, const qsync::Multiplier<T> &scalar, std::size_t m, std::size_t n, std::size_t k, int rows, int columns,
          qsync::Output output) {
    const Operand<T> a(m, k, rows), b(n, k, columns);
    const std::vector<float> a_scales = floats(m + 1, 0.01f, 0.003f), b_scales = floats(n + 1, 0.02f, 0.001f), bias = floats(n + 1, -99.0f, 7.0f);
    const qsync::Scales each{a_scales.data(), true}, one{b_scales.data(), false}, none{nullptr, false};
    const qsync::Scales b_each{b_scales.data(), true}, ways[] = {none, one, b_each};
    std::vector<std::uint32_t> found(m * n + 1, 1), expected(m * n + 1, 1);
    qsync::Gemm<T> what{a.vectors,      b.vectors, drawn() % 2 ? each : none, ways[drawn() % 3], drawn() % 2 ? bias.data() : nullptr, output,
                        found.data()};
    what.activation = static_cast<qsync::Activation>(drawn() % qsync::ACTIVATIONS);
    qsync::gemm(amx, what, 1);
    what.result = expected.data();
    qsync::gemm(scalar, what, 1);
    return found == expected;
}

// Sums of random numbers, which kernels round differently; qsync_fx/_C.pyi gives the bound for
// each.
bool near(std::size_t m, std::size_t n, std::size_t k) {
    Operand<qsync::Bfloat16> a(m, k, 0), b(n, k, 1);
    for (auto *values : {&a.values, &b.values})
        for (qsync::Bfloat16 &value : *values) value.bits = static_cast<std::uint16_t>((drawn() & 0x87FFu) + 0x3C00u);
    const auto multiply = [&](const qsync::Multiplier<qsync::Bfloat16> &with) {
        std::vector<float> found(m * n);
        const qsync::Gemm<qsync::Bfloat16> what{a.vectors, b.vectors, {nullptr, false}, {nullptr, false}, nullptr, qsync::OUT_FLOAT32, found.data()};
        qsync::gemm(with, what, 1);
        return found;
    };
    const std::vector<float> found = multiply(qsync::amx_bf16), expected = multiply(qsync::scalar_bf16);
    for (auto *values : {&a.values, &b.values})
        for (qsync::Bfloat16 &value : *values) value.bits &= 0x7FFFu;
    const std::vector<float> magnitudes = multiply(qsync::scalar_bf16);
    for (std::size_t i = 0; i < m * n; ++i)
        if (!(std::fabs(found[i] - expected[i]) <= 2.0f * static_cast<float>(k + 2) * 0x1p-24f * magnitudes[i])) return false;
    return true;
}

} // namespace

int main(int count, char **arguments) {
    if (count > 1 && std::string(arguments[1]) == "unconfigured") {
        alignas(64) static std::int8_t operand[32 * 64];
        alignas(64) static std::int32_t tile[32 * 32];
        qsync::amx_int8.multiply(operand, operand, tile, 64, tile, false);
        return 0;
    }
    int products = 0, differ = 0;
    for (int round = 0; round < 40; ++round) {
        // Tails of every length, empty sides, and sums in several parts.
        const std::size_t side = round % 5 ? 70 : 150, m = any(0, side), n = any(0, side), k = any(0, round % 10 ? 200 : 2000);
        for (int rows = 0; rows < 3; ++rows) {
            for (int columns = 0; columns < 3; ++columns) {
                for (int output = 0; output < qsync::OUTPUTS; ++output, products += 2) {
                    const auto as = static_cast<qsync::Output>(output);
                    const bool int8 = same(qsync::amx_int8, qsync::scalar_int8, m, n, k, rows, columns, as);
                    const bool bf16 = same(qsync::amx_bf16, qsync::scalar_bf16, m, n, k, rows, columns, as);
                    differ += !int8 + !bf16;
                    if (!int8 || !bf16) std::printf("differs: %zu x %zu x %zu, layouts %d and %d, output %d\n", m, n, k, rows, columns, output);
                }
            }
        }
        ++products;
        if (!near(m, n, k) && ++differ) std::printf("too far: %zu x %zu x %zu\n", m, n, k);
    }
    std::printf("%d products, %d differ\n", products, differ);
}
