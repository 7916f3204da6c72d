// Gradient codec kernels, compiled once per ISA variant. qsync_fx/_C.pyi specifies the encodings.
//
// Invariant: as in quantizer/kernels.cpp, identical bits in every ISA variant and no inline
// function with external linkage.

#include "codecs/hadamard.h"
#include "codecs/qsgd.h"
#include "codecs/truncation.h"

namespace qsync {
namespace {

// Sums of the values of a unit by sign, and the number of non-negative ones.
struct Signs {
    F above = all(0.0f), below = above;
    uint32_t count = 0;

    // Add the first `there` of sixteen values and write a bit mask of the non-negative ones.
    void add(const F &v, size_t there, uint8_t *words) {
        const uint32_t valid = there >= LANES ? 0xFFFFu : (1u << there) - 1u, which = not_negative(v) & valid;
        above = with(above, which, v);
        below = with(below, ~which & valid, v);
        count += static_cast<uint32_t>(__builtin_popcount(which));
        put(words, static_cast<std::uint16_t>(which));
    }
};

void onebit_encode(const float *x, float *residual, size_t n, size_t unit, uint8_t *means, uint8_t *words) {
    constexpr size_t HELD = 4;
    for (size_t begin = 0; begin < n; begin += unit, means += 2 * sizeof(float)) {
        const size_t size = smaller(unit, n - begin);
        const float *values = x + begin;
        float *left_over = residual == nullptr ? nullptr : residual + begin;
        const auto value = [&](size_t i) {
            const F v = load_some(values + i, size - i);
            return left_over == nullptr ? v : v + load_some(left_over + i, size - i);
        };
        Signs signs;
        const auto add = [&](size_t i, const F &v) {
            ask_ahead(values + i, LANES * sizeof(float));
            if (left_over != nullptr) ask_ahead(left_over + i, LANES * sizeof(float));
            signs.add(v, size - i, words + i / 8);
        };
        // The common unit size: values are read once and stay in registers.
        const bool whole = size == HELD * LANES;
        F held[HELD];
        if (whole) {
            for (size_t k = 0; k < HELD; ++k) add(k * LANES, held[k] = value(k * LANES));
        } else {
            for (size_t i = 0; i < size; i += LANES) add(i, value(i));
            if ((size + LANES - 1) / LANES % 2 != 0) put(words + (size + LANES - 1) / LANES * 2, std::uint16_t{0});
        }
        float high = signs.count != 0 ? folded(signs.above) / static_cast<float>(signs.count) : 0.0f;
        float low = signs.count != size ? folded(signs.below) / static_cast<float>(size - signs.count) : 0.0f;
        const bool finite = high - high == 0.0f && low - low == 0.0f;
        put(means, finite ? high : __builtin_nanf(""));
        put(means + sizeof(float), finite ? low : __builtin_nanf(""));
        if (finite && left_over != nullptr) {
            const F a = all(high), b = all(low);
            if (whole)
                for (size_t k = 0; k < HELD; ++k)
                    store(left_over + k * LANES, held[k] - chosen(get<std::uint16_t>(words + k * LANES / 8), a, b));
            else
                for (size_t i = 0; i < size; i += LANES)
                    store_some(left_over + i, value(i) - chosen(get<std::uint16_t>(words + i / 8), a, b), size - i);
        }
        words += (size + 31) / 32 * 4;
    }
}

void onebit_decode(const uint8_t *means, const uint8_t *words, size_t n, size_t unit, float *y, bool add, bool last) {
    const bool past = last && !add && goes_past(y, n, unit);
    for (size_t begin = 0; begin < n; begin += unit, means += 2 * sizeof(float)) {
        const size_t size = smaller(unit, n - begin);
        float *values = y + begin;
        const F high = all(get<float>(means)), low = all(get<float>(means + sizeof(float)));
        for (size_t i = 0; i < size; i += LANES) {
            const F found = chosen(get<std::uint16_t>(words + i / 8), high, low);
            if (past && size - i >= LANES) {
                store_past(values + i, found);
            } else {
                ask_ahead(values + i, LANES * sizeof(float));
                store_some(values + i, add ? load_some(values + i, size - i) + found : found, size - i);
            }
        }
        words += (size + 31) / 32 * 4;
    }
    if (past) written_past();
}

} // namespace

extern const Codecs QSYNC_CODECS;
const Codecs QSYNC_CODECS = {
    {{qsgd_encode<2, SIGN>, qsgd_encode<2, ENDPOINTS>},
     {qsgd_encode<4, SIGN>, qsgd_encode<4, ENDPOINTS>},
     {qsgd_encode<8, SIGN>, qsgd_encode<8, ENDPOINTS>},
     {qsgd_encode<16, SIGN>, qsgd_encode<16, ENDPOINTS>}},
    {{qsgd_decode<2, SIGN>, qsgd_decode<2, ENDPOINTS>},
     {qsgd_decode<4, SIGN>, qsgd_decode<4, ENDPOINTS>},
     {qsgd_decode<8, SIGN>, qsgd_decode<8, ENDPOINTS>},
     {qsgd_decode<16, SIGN>, qsgd_decode<16, ENDPOINTS>}},
    onebit_encode,
    onebit_decode,
    truncate_encode,
    truncate_decode,
    rotate,
    rotate_back,
};

} // namespace qsync
