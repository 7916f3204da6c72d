// Random products by AMX's kernel beside the scalar one: whatever sizes, layouts, scales and outputs, the bits are the same.
// "unconfigured" as an argument multiplies without configuring tiles, which is to end the process.

#include "gemm/gemm.h"

#include <algorithm>
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

// Values of vectors that lie one after the other, side by side, or with gaps.
struct Operand {
    std::vector<std::int8_t> values;
    qsync::Vectors vectors;

    Operand(std::size_t count, std::size_t length, int layout) {
        const auto across = static_cast<std::ptrdiff_t>(count), along = static_cast<std::ptrdiff_t>(length);
        const std::ptrdiff_t apart = layout == 0 ? along : layout == 1 ? 1 : 2 * along + 3, step = layout == 0 ? 1 : layout == 1 ? across : 2;
        // As large as what is read, and no larger: tools that look for reads beyond it then see them.
        values.resize(layout == 2 ? count * (2 * length + 3) : count * length);
        for (std::int8_t &value : values) value = static_cast<std::int8_t>(drawn());
        // The largest in magnitude throughout, now and then: sums are at their largest then.
        if (drawn() % 8 == 0) std::fill(values.begin(), values.end(), std::int8_t{-128});
        vectors = {values.data(), count, length, apart, step};
    }
};

std::vector<float> floats(std::size_t count, float least, float step) {
    std::vector<float> found(count);
    for (float &value : found) value = least + step * static_cast<float>(drawn() % 1000);
    return found;
}

bool same(std::size_t m, std::size_t n, std::size_t k, int rows, int columns, qsync::Output output) {
    const Operand a(m, k, rows), b(n, k, columns);
    const std::vector<float> a_scales = floats(m + 1, 0.01f, 0.003f), b_scales = floats(n + 1, 0.02f, 0.001f), bias = floats(n + 1, -99.0f, 7.0f);
    const qsync::Scales each{a_scales.data(), true}, one{b_scales.data(), false}, none{nullptr, false};
    const qsync::Scales b_each{b_scales.data(), true}, ways[] = {none, one, b_each};
    std::vector<std::uint32_t> found(m * n + 1, 1), expected(m * n + 1, 1);
    qsync::Gemm what{a.vectors, b.vectors, drawn() % 2 ? each : none, ways[drawn() % 3], drawn() % 2 ? bias.data() : nullptr, output, found.data()};
    qsync::gemm(qsync::amx_multiplier, what, 1);
    what.result = expected.data();
    qsync::gemm(qsync::scalar_multiplier, what, 1);
    return found == expected;
}

} // namespace

int main(int count, char **arguments) {
    if (count > 1 && std::string(arguments[1]) == "unconfigured") {
        alignas(64) static std::int8_t operand[32 * 64];
        alignas(64) static std::int32_t tile[32 * 32];
        qsync::amx_multiplier.multiply(operand, operand, tile, 64, tile, false);
        return 0;
    }
    int products = 0, differ = 0;
    for (int round = 0; round < 40; ++round) {
        // Tails of every length, sides that are none, and sums in several parts.
        const std::size_t side = round % 5 ? 70 : 150, m = any(0, side), n = any(0, side), k = any(0, round % 10 ? 200 : 2000);
        for (int rows = 0; rows < 3; ++rows) {
            for (int columns = 0; columns < 3; ++columns) {
                for (int output = 0; output < qsync::OUTPUTS; ++output, ++products) {
                    if (same(m, n, k, rows, columns, static_cast<qsync::Output>(output))) continue;
                    if (++differ < 5) std::printf("differs: %zu x %zu x %zu, layouts %d and %d, output %d\n", m, n, k, rows, columns, output);
                }
            }
        }
    }
    std::printf("%d products, %d differ\n", products, differ);
}
