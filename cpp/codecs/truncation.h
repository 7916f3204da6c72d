// Truncation, AQGB's, for the path that a file is compiled for. What it computes is said in qsync_fx/_C.pyi.
//
// Invariant: as in kernels.cpp: equal bits on every path, nothing inline and external.
#pragma once

#include "codecs/bytes.h"
#include "lanes/lanes.h"

namespace qsync {
namespace {

void truncate_encode(const float *x, float *residual, size_t n, int bits, uint8_t *planes, uint32_t *scratch) {
    const uint32_t mask = 0xFFFFFFFFu << (32 - bits);
    for (size_t i = 0; i < n; ++i) {
        const float v = residual == nullptr ? x[i] : x[i] + residual[i];
        uint32_t word;
        std::memcpy(&word, &v, sizeof word);
        // What makes a NaN one may lie in its low bits alone: a bit that is kept is set.
        const uint32_t quiet = (word & 0x7FFFFFFFu) > INFINITE ? 0x00400000u : 0u;
        scratch[i] = (word & mask) | quiet;
    }
    if (residual != nullptr)
        for (size_t i = 0; i < n; ++i) {
            float kept;
            std::memcpy(&kept, &scratch[i], sizeof kept);
            residual[i] = (scratch[i] & INFINITE) == INFINITE ? residual[i] : x[i] + residual[i] - kept;
        }
    const int bytes = bits / 8;
    for (int k = 0; k < bytes; ++k, planes += n)
        for (size_t i = 0; i < n; ++i) planes[i] = static_cast<uint8_t>(scratch[i] >> (24 - 8 * k));
    if (bits % 8 == 0) return;
    const int shift = 28 - 8 * bytes;
    const size_t half = (n + 1) / 2;
    for (size_t i = 0; i < n / 2; ++i)
        planes[i] = static_cast<uint8_t>((scratch[i] >> shift & 15u) | (scratch[i + half] >> shift & 15u) << 4);
    if (n % 2 != 0) planes[n / 2] = static_cast<uint8_t>(scratch[n / 2] >> shift & 15u);
}

template <bool B> struct Constant { static constexpr bool value = B; };

template <int BYTES, bool HALF> void join_planes(const uint8_t *planes, size_t n, float *y, bool add) {
    const size_t half = (n + 1) / 2;
    const auto part = [&](size_t begin, size_t end, auto high) {
        const uint8_t *nibbles = planes + BYTES * n;
        size_t i = begin;
        for (; i + LANES <= end; i += LANES) {
            I word = left<24>(load_bytes(planes + i));
            if constexpr (BYTES > 1) word = word | left<16>(load_bytes(planes + n + i));
            if constexpr (BYTES > 2) word = word | left<8>(load_bytes(planes + 2 * n + i));
            if constexpr (BYTES > 3) word = word | load_bytes(planes + 3 * n + i);
            if constexpr (HALF) {
                const I both = load_bytes(nibbles + i - begin);
                word = word | left<28 - 8 * BYTES>(decltype(high)::value ? right<4>(both) : both & all(15));
            }
            store(y + i, add ? load(y + i) + as_float(word) : as_float(word));
        }
        for (; i < end; ++i) {
            uint32_t word = 0;
            for (int k = 0; k < BYTES; ++k) word |= static_cast<uint32_t>(planes[static_cast<size_t>(k) * n + i]) << (24 - 8 * k);
            if constexpr (HALF) word |= (nibbles[i - begin] >> (decltype(high)::value ? 4 : 0) & 15u) << (28 - 8 * BYTES);
            float found;
            std::memcpy(&found, &word, sizeof found);
            y[i] = add ? y[i] + found : found;
        }
    };
    part(0, half, Constant<false>{});
    part(half, n, Constant<true>{});
}

void truncate_decode(const uint8_t *planes, size_t n, int bits, float *y, bool add) {
    switch (bits) {
    case 12: return join_planes<1, true>(planes, n, y, add);
    case 16: return join_planes<2, false>(planes, n, y, add);
    case 20: return join_planes<2, true>(planes, n, y, add);
    case 24: return join_planes<3, false>(planes, n, y, add);
    case 28: return join_planes<3, true>(planes, n, y, add);
    default: return join_planes<4, false>(planes, n, y, add);
    }
}

} // namespace
} // namespace qsync
