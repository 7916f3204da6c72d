// Truncation codec of AQGB, for the ISA variant that the including file is compiled for.
// qsync_fx/_C.pyi specifies the encoding.
//
// Layout of the retained bits: planes of the most significant bytes of all values, then the next
// bytes, and finally, if needed, a plane of half bytes: the low nibbles belong to the first half of
// the values, the high nibbles to the second half.
//
// Invariant: as in quantizer/kernels.cpp, identical bits in every ISA variant and no inline
// function with external linkage.
#pragma once

#include "codecs/bytes.h"
#include "lanes/planes.h"

namespace qsync {
namespace {

template <size_t N> struct Constant { static constexpr size_t value = N; };

// Call work(bytes, halved, i, half) for i = 0, PLANE, ... below `half`. `bytes` is the number of
// full bytes retained per value and `halved` whether half a byte is retained as well; if so, the
// call also processes the values from half + i on. Meanwhile prefetch the next partition: its
// planes are too many streams for the hardware.
template <class Work>
void by_planes(const float *values, const float *left_over, const uint8_t *planes, size_t n, int bits, const Work &work) {
    const auto all_of = [&](auto bytes, auto halved) {
        constexpr size_t BLOCK = (1 + decltype(halved)::value) * PLANE;
        const size_t half = decltype(halved)::value ? (n + 1) / 2 : n, kept = BLOCK * static_cast<size_t>(bits) / 8;
        const uint8_t *next = planes + decltype(bytes)::value * n + decltype(halved)::value * half;
        for (size_t i = 0; i < half; i += PLANE) {
            const size_t block = i / PLANE;
            ask(values + n + block * BLOCK, BLOCK * sizeof(float));
            if (left_over != nullptr) ask(left_over + n + block * BLOCK, BLOCK * sizeof(float));
            ask(next + block * kept, kept);
            work(bytes, halved, i, half);
        }
    };
    switch (bits) {
    case 12: return all_of(Constant<1>{}, Constant<1>{});
    case 16: return all_of(Constant<2>{}, Constant<0>{});
    case 20: return all_of(Constant<2>{}, Constant<1>{});
    case 24: return all_of(Constant<3>{}, Constant<0>{});
    case 28: return all_of(Constant<3>{}, Constant<1>{});
    default: return all_of(Constant<4>{}, Constant<0>{});
    }
}

// Truncate PLANE values plus their error feedback. Write the retained bits to planes and the
// discarded remainder to `left_over`, which is unchanged for values that are not finite.
inline void keep(const float *values, float *left_over, const I &mask, Plane (&planes)[4]) {
    I words[4];
    for (size_t k = 0; k < 4; ++k) {
        const F own = load(values + k * LANES), left = left_over == nullptr ? own : load(left_over + k * LANES);
        const F v = left_over == nullptr ? own : own + left;
        // A NaN may have only low mantissa bits, and would be truncated to infinity: set the quiet
        // bit, which is always retained. Only for a NaN does this sum carry into the sign bit.
        const I sign = (bits(v) & all(int32_t{0x7FFFFFFF})) + all(int32_t{0x007FFFFF});
        words[k] = merged(right<9>(sign) & all(int32_t{0x00400000}), bits(v), mask);
        if (left_over != nullptr) {
            const F kept = as_float(words[k]);
            store(left_over + k * LANES, chosen(not_negative(kept - kept), v - kept, left));
        }
    }
    to_planes(words, planes);
}

void truncate_encode(const float *x, float *residual, size_t n, int bits, uint8_t *planes) {
    const I mask = all(static_cast<int32_t>(0xFFFFFFFFu << (32 - bits)));
    // Encode `count` values from `at` on into their planes.
    const auto part = [&](size_t at, size_t count, auto bytes, Plane (&found)[4]) {
        const float *values = x + at;
        float *left_over = residual == nullptr ? nullptr : residual + at;
        if (count >= PLANE) {
            keep(values, left_over, mask, found);
        } else {
            float padded[PLANE] = {}, left[PLANE] = {};
            std::memcpy(padded, values, count * sizeof(float));
            if (left_over != nullptr) std::memcpy(left, left_over, count * sizeof(float));
            keep(padded, left_over == nullptr ? nullptr : left, mask, found);
            if (left_over != nullptr) std::memcpy(left_over, left, count * sizeof(float));
        }
        for (size_t k = 0; k < decltype(bytes)::value; ++k) store_some(planes + k * n + at, found[k], count);
    };
    by_planes(x, residual, planes, n, bits, [&](auto bytes, auto halved, size_t i, size_t half) {
        constexpr size_t BYTES = decltype(bytes)::value;
        Plane low[4], high[4];
        part(i, half - i, bytes, low);
        if constexpr (decltype(halved)::value) {
            part(half + i, n - half - i, bytes, high);
            store_some(planes + BYTES * n + i, halves(low[BYTES], high[BYTES]), half - i);
        }
    });
}

void truncate_decode(const uint8_t *planes, size_t n, int bits, float *y, bool add) {
    // Decode `count` values from `at` on. `last` contains their half bytes.
    const auto part = [&](size_t at, size_t count, auto bytes, const Plane &last) {
        Plane found[4] = {last, last, last, last};
        for (size_t k = 0; k < decltype(bytes)::value; ++k) found[k] = load_some(planes + k * n + at, count);
        for (size_t k = decltype(bytes)::value + 1; k < 4; ++k) found[k] = no_plane();
        I words[4];
        from_planes(found, words);
        for (size_t k = 0; k < 4 && k * LANES < count; ++k) {
            float *to = y + at + k * LANES;
            const size_t rest = count - k * LANES;
            store_some(to, add ? load_some(to, rest) + as_float(words[k]) : as_float(words[k]), rest);
        }
    };
    by_planes(y, nullptr, planes, n, bits, [&](auto bytes, auto halved, size_t i, size_t half) {
        if constexpr (decltype(halved)::value) {
            const Plane both = load_some(planes + decltype(bytes)::value * n + i, half - i);
            part(i, half - i, bytes, of_lower(both));
            if (n - half > i) part(half + i, n - half - i, bytes, of_higher(both));
        } else {
            part(i, n - i, bytes, no_plane());
        }
    });
}

} // namespace
} // namespace qsync
