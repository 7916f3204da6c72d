// Truncation, AQGB's, for the path that a file is compiled for. What it computes is said in qsync_fx/_C.pyi.
//
// What is kept of values lies in planes: the highest byte of each, the next one of each, and last the half bytes, where there are some: the
// first half of the values have the lower halves of bytes.
//
// Invariant: as in kernels.cpp: equal bits on every path, nothing inline and external.
#pragma once

#include "codecs/bytes.h"
#include "lanes/planes.h"

namespace qsync {
namespace {

template <size_t N> struct Constant { static constexpr size_t value = N; };

// Calls work(bytes, halved, i, half) for the values from i on in steps of PLANE, up to `half` of them: how many whole bytes are kept, whether
// half a byte is, and then the values from half + i on are its work, too. Meanwhile memory is asked for as much of the partition behind this
// one, of which planes are many places at once.
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

// What is kept of PLANE values and of what is left over of the last ones, which becomes what is not kept: of finite ones, the others leave it.
inline void keep(const float *values, float *left_over, const I &mask, Plane (&planes)[4]) {
    I words[4];
    for (size_t k = 0; k < 4; ++k) {
        const F own = load(values + k * LANES), left = left_over == nullptr ? own : load(left_over + k * LANES);
        const F v = left_over == nullptr ? own : own + left;
        // What makes a NaN one may lie in its low bits alone: a bit that is kept is set. Of a NaN alone the sum reaches the sign.
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
    // `count` values from `at` on, to their planes.
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
    // `count` values from `at` on, of which `last` is the half byte.
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
