// Truncation, AQGB's, for the path that a file is compiled for. What it computes is said in qsync_fx/_C.pyi.
//
// Invariant: as in kernels.cpp: equal bits on every path, nothing inline and external.
#pragma once

#include "codecs/bytes.h"
#include "lanes/lanes.h"

namespace qsync {
namespace {

// How many values are written to all of their planes before others are read: they stay in the first cache, and what is written to a plane at
// once is a few of its lines. With 4096 of them what memory takes is a third more.
constexpr size_t TRUNCATED = 256;

// Bytes of words from the bits at `shift` on.
inline void to_plane(const uint32_t *__restrict words, size_t n, int shift, uint8_t *__restrict plane) {
    for (size_t i = 0; i < n; ++i) plane[i] = static_cast<uint8_t>(words[i] >> shift);
}

void truncate_encode(const float *x, float *residual, size_t n, int bits, uint8_t *planes) {
    const uint32_t mask = 0xFFFFFFFFu << (32 - bits);
    const int bytes = bits / 8, shift = 28 - 8 * bytes;
    // The first half of the values have the lower halves of bytes.
    const size_t half = bits % 8 != 0 ? (n + 1) / 2 : n;
    uint8_t *nibbles = planes + static_cast<size_t>(bytes) * n;
    uint32_t words[TRUNCATED];
    for (size_t begin = 0; begin < n;) {
        const size_t size = smaller(TRUNCATED, (begin < half ? half : n) - begin);
        const float *values = x + begin;
        float *left_over = residual == nullptr ? nullptr : residual + begin;
        for (size_t i = 0; i < size; ++i) {
            const float v = left_over == nullptr ? values[i] : values[i] + left_over[i];
            uint32_t word;
            std::memcpy(&word, &v, sizeof word);
            // What makes a NaN one may lie in its low bits alone: a bit that is kept is set.
            const uint32_t quiet = (word & 0x7FFFFFFFu) > INFINITE ? 0x00400000u : 0u;
            words[i] = (word & mask) | quiet;
        }
        if (left_over != nullptr)
            for (size_t i = 0; i < size; ++i) {
                float kept;
                std::memcpy(&kept, &words[i], sizeof kept);
                left_over[i] = (words[i] & INFINITE) == INFINITE ? left_over[i] : values[i] + left_over[i] - kept;
            }
        for (int k = 0; k < bytes; ++k) to_plane(words, size, 24 - 8 * k, planes + static_cast<size_t>(k) * n + begin);
        if (begin >= half) {
            uint8_t *to = nibbles + begin - half;
            for (size_t i = 0; i < size; ++i) to[i] = static_cast<uint8_t>(to[i] | (words[i] >> shift & 15u) << 4);
        } else if (bits % 8 != 0) {
            for (size_t i = 0; i < size; ++i) nibbles[begin + i] = static_cast<uint8_t>(words[i] >> shift & 15u);
        }
        begin += size;
    }
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
