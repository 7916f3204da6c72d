// QSGD for the path that a file is compiled for. What it computes is said in qsync_fx/_C.pyi.
//
// Invariant: as in kernels.cpp: equal bits on every path, nothing inline and external.
#pragma once

#include "codecs/bytes.h"
#include "codecs/codecs.h"
#include "lanes/lanes.h"
#include "random.h"

#include <cfloat>

namespace qsync {
namespace {

// r < 2**24, one a lane: what random.h calls `uniform`, times 2**24.
inline F random_lanes(const I &counter) {
    I x = counter;
    x = x ^ right<16>(x);
    x = x * all(static_cast<int32_t>(0x7FEB352Du));
    x = x ^ right<15>(x);
    x = x * all(static_cast<int32_t>(0x846CA68Bu));
    x = x ^ right<16>(x);
    return to_float(right<8>(x));
}

inline I first_counters(uint32_t counter) {
    uint32_t lanes[LANES];
    for (uint32_t i = 0; i < LANES; ++i) lanes[i] = counter + i * WEYL;
    float words[LANES];
    std::memcpy(words, lanes, sizeof words);
    return bits(load(words));
}

// The largest magnitude; NaN or infinite where a value is: as bits they come last.
inline float absmax(const float *x, size_t n) {
    I a = all(int32_t{0}), b = a;
    const I mask = all(int32_t{0x7FFFFFFF});
    size_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        a = most(a, bits(load(x + i)) & mask);
        b = most(b, bits(load(x + i + LANES)) & mask);
    }
    for (; i < n; i += LANES) a = most(a, bits(load_some(x + i, n - i)) & mask);
    const int32_t word = highest(most(a, b));
    float found;
    std::memcpy(&found, &word, sizeof found);
    return found;
}

// Squares of FP32 are far from what FP64 ends at: the sum is finite where all values are.
inline float two_norm(const float *x, size_t n) {
    Squares sum;
    for (size_t i = 0; i < n; i += LANES) sum.add(load_some(x + i, n - i));
    const double norm = __builtin_sqrt(folded(sum));
    return norm - norm == 0.0 && norm > static_cast<double>(FLT_MAX) ? FLT_MAX : static_cast<float>(norm);
}

// The scale of a unit, moved to where neither it nor its inverse is a denormal number: levels * x / scale = (x * before) * inverse.
struct Scale {
    float before = 1.0f, after = 1.0f, moved, levels;

    Scale(float scale, float span) : moved(scale), levels(span) {
        if (scale < 0x1p-64f) {
            before = 0x1p64f, after = 0x1p-64f;
            moved = scale * before;
        } else if (scale > 0x1p64f) {
            before = 0x1p-64f, after = 0x1p64f;
            moved = scale * before;
        }
    }
    float inverse() const { return moved > 0 ? levels / moved : 0; }
    float step() const {
        const float found = moved / levels;
        if (after <= 1.0f || levels * found * after <= FLT_MAX) return found;
        // It was rounded up, and as many as there are would go beyond what FP32 holds.
        uint32_t word;
        std::memcpy(&word, &found, sizeof word);
        --word;
        float below;
        std::memcpy(&below, &word, sizeof below);
        return below;
    }
};

// Sign and magnitude, of 2**(B-1) - 1 steps.
template <int B, Layout L> struct Code {
    static constexpr int32_t LEVELS = (1 << (B - 1)) - 1;
    static constexpr float SPAN = static_cast<float>(LEVELS);

    static I encode(const F &x, const F &before, const F &inverse, const I &counter) {
        const F u = magnitude(x) * before * inverse;
        const I below = truncated(u);
        const F rest = (u - to_float(below)) * all(0x1p24f);
        const I level = least(one_more(below, random_lanes(counter), rest), all(LEVELS));
        return level | left<B - 1>(right<31>(bits(x)));
    }
    static F decode(const I &code, const F &step, const F &after) {
        const F level = to_float(code & all(LEVELS)) * step * after;
        return as_float(bits(level) ^ left<31>(right<B - 1>(code)));
    }
};

// 2**B points from -scale to scale, 2 / (2**B - 1) of it apart.
template <int B> struct Code<B, ENDPOINTS> {
    static constexpr int32_t LAST = (1 << B) - 1;
    static constexpr float SPAN = static_cast<float>(LAST);

    static I encode(const F &x, const F &before, const F &inverse, const I &counter) {
        const F u = x * before * inverse * all(0.5f) - all(0.5f);
        const F below = floored(u);
        const F rest = (u - below) * all(0x1p24f);
        const I point = one_more(truncated(below) + all(int32_t{1} << (B - 1)), random_lanes(counter), rest);
        return most(least(point, all(LAST)), all(int32_t{0}));
    }
    static F decode(const I &code, const F &step, const F &after) {
        return to_float(left<1>(code) + all(-LAST)) * step * after;
    }
};

// How codes of B bits lie in bytes: value k * 16 + l of a group is bits k * B and up of byte l; 16 bits take two bytes each.
template <int B> struct Packed {
    static constexpr size_t PER_BYTE = B < 8 ? 8 / B : 1, VALUES = LANES * PER_BYTE, BYTES = B < 8 ? LANES : LANES * B / 8;

    static size_t bytes(size_t n) { return (n + VALUES - 1) / VALUES * BYTES; }
    // Stores what `next` returns from one call to the other.
    template <class Next> static void store(uint8_t *p, Next &&next) {
        I packed = next();
        if constexpr (PER_BYTE > 1) packed = packed | left<B>(next());
        if constexpr (PER_BYTE > 2) packed = packed | left<2 * B>(next());
        if constexpr (PER_BYTE > 2) packed = packed | left<3 * B>(next());
        if constexpr (B == 16)
            store_words(p, packed);
        else
            store_bytes(p, packed);
    }
    static void load(const uint8_t *p, I (&code)[PER_BYTE]) {
        I packed;
        if constexpr (B == 16)
            packed = load_words(p);
        else
            packed = load_bytes(p);
        const I mask = all((int32_t{1} << B) - 1);
        code[0] = PER_BYTE > 1 ? packed & mask : packed;
        if constexpr (PER_BYTE > 1) code[1] = PER_BYTE > 2 ? right<B>(packed) & mask : right<B>(packed);
        if constexpr (PER_BYTE > 2) {
            code[2] = right<2 * B>(packed) & mask;
            code[3] = right<3 * B>(packed);
        }
    }
};

template <int B, Layout L>
inline void encode_codes(const float *x, size_t n, const float *coming, F before, F inverse, uint8_t *codes, uint32_t counter) {
    using P = Packed<B>;
    const I next = all(static_cast<int32_t>(WEYL * static_cast<uint32_t>(LANES)));
    I at = first_counters(counter);
    size_t i = 0;
    const auto code = [&](F values) {
        const I found = Code<B, L>::encode(values, before, inverse, at);
        __builtin_prefetch(coming + i);
        at = at + next;
        i += LANES;
        return found;
    };
    for (; i + P::VALUES <= n; codes += P::BYTES) P::store(codes, [&] { return code(load(x + i)); });
    if (i < n) P::store(codes, [&] { return code(load_some(x + smaller(i, n), n - smaller(i, n))); });
}

// What of a unit is encoded at once. Behind each block as much of the next unit is searched for its scale: what one of them computes hides
// what the other waits for, and no unit has to lie in a cache as a whole.
constexpr size_t BLOCK = 2048;

// The larger of two magnitudes, of which one may be NaN: as bits it comes last.
inline float larger(float a, float b) {
    int32_t x, y;
    std::memcpy(&x, &a, sizeof x);
    std::memcpy(&y, &b, sizeof y);
    return x > y ? a : b;
}

template <int B, Layout L>
void qsgd_encode(const float *x, size_t n, size_t unit, Norm norm, uint8_t *scales, uint8_t *codes, uint32_t counter) {
    using P = Packed<B>;
    float ahead = 0.0f;
    bool known = false;
    for (size_t begin = 0; begin < n; begin += unit, scales += sizeof(float), counter += WEYL * static_cast<uint32_t>(unit)) {
        const size_t size = smaller(unit, n - begin), bytes = P::bytes(size), next = smaller(unit, n - begin - size);
        const float *values = x + begin;
        const float scale = norm == TWO_NORM ? two_norm(values, size) : known ? ahead : absmax(values, size);
        known = false;
        if (scale - scale == 0.0f) {
            put(scales, scale);
            const Scale s(scale, Code<B, L>::SPAN);
            const F before = all(s.before), inverse = all(s.inverse());
            ahead = 0.0f, known = norm == MAX_NORM;
            for (size_t at = 0; at < size; at += BLOCK) {
                encode_codes<B, L>(values + at, smaller(BLOCK, size - at), values + unit + at, before, inverse,
                                   codes + at / P::VALUES * P::BYTES, counter + WEYL * static_cast<uint32_t>(at));
                if (known && at < next) ahead = larger(ahead, absmax(values + unit + at, smaller(BLOCK, next - at)));
            }
        } else {
            put(scales, uint32_t{0x7FC00000u});
            std::memset(codes, 0, bytes);
        }
        codes += bytes;
    }
}

template <int B, Layout L>
void qsgd_decode(const uint8_t *scales, const uint8_t *codes, size_t n, size_t unit, float *y, bool add) {
    using P = Packed<B>;
    for (size_t begin = 0; begin < n; begin += unit, scales += sizeof(float)) {
        const size_t size = smaller(unit, n - begin);
        float *values = y + begin;
        const Scale s(get<float>(scales), Code<B, L>::SPAN);
        const F step = all(s.step()), after = all(s.after);
        size_t i = 0;
        for (; i + P::VALUES <= size; i += P::VALUES, codes += P::BYTES) {
            I code[P::PER_BYTE];
            P::load(codes, code);
            for (size_t k = 0; k < P::PER_BYTE; ++k) {
                float *to = values + i + k * LANES;
                const F found = Code<B, L>::decode(code[k], step, after);
                store(to, add ? load(to) + found : found);
            }
        }
        if (i < size) {
            I code[P::PER_BYTE];
            P::load(codes, code);
            codes += P::BYTES;
            for (size_t k = 0; k < P::PER_BYTE && i < size; ++k, i += LANES) {
                const F found = Code<B, L>::decode(code[k], step, after);
                store_some(values + i, add ? load_some(values + i, size - i) + found : found, size - i);
            }
        }
    }
}

} // namespace
} // namespace qsync
