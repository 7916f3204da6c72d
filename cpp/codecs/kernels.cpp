// The codecs of gradients, written once and compiled once a path. What each computes is said in qsync_fx/_C.pyi.
//
// Invariant: as in kernels.cpp: equal bits on every path, nothing inline and external.

#include "codecs/qsgd.h"
#include "codecs/truncation.h"

namespace qsync {
namespace {

void onebit_encode(const float *x, float *residual, size_t n, size_t unit, uint8_t *means, uint8_t *words) {
    for (size_t begin = 0; begin < n; begin += unit, means += 2 * sizeof(float)) {
        const size_t size = smaller(unit, n - begin);
        const float *values = x + begin;
        float *left_over = residual == nullptr ? nullptr : residual + begin;
        const auto value = [&](size_t i) {
            const F v = load_some(values + i, size - i);
            return left_over == nullptr ? v : v + load_some(left_over + i, size - i);
        };
        F above = all(0.0f), below = above;
        uint32_t count = 0;
        for (size_t i = 0; i < size; i += LANES) {
            const F v = value(i);
            const uint32_t valid = size - i >= LANES ? 0xFFFFu : (1u << (size - i)) - 1u;
            const uint32_t which = not_negative(v) & valid;
            above = above + chosen(which, v, all(0.0f));
            below = below + chosen(~which & valid, v, all(0.0f));
            count += static_cast<uint32_t>(__builtin_popcount(which));
            put(words + i / 8, static_cast<std::uint16_t>(which));
        }
        if ((size + LANES - 1) / LANES % 2 != 0) put(words + (size + LANES - 1) / LANES * 2, std::uint16_t{0});
        float high = count != 0 ? folded(above) / static_cast<float>(count) : 0.0f;
        float low = count != size ? folded(below) / static_cast<float>(size - count) : 0.0f;
        const bool finite = high - high == 0.0f && low - low == 0.0f;
        put(means, finite ? high : __builtin_nanf(""));
        put(means + sizeof(float), finite ? low : __builtin_nanf(""));
        if (finite && left_over != nullptr) {
            const F a = all(high), b = all(low);
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
            if (past && size - i >= LANES)
                store_past(values + i, found);
            else
                store_some(values + i, add ? load_some(values + i, size - i) + found : found, size - i);
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
};

} // namespace qsync
