// QSGD codec, for the ISA variant that the including file is compiled for. qsync_fx/_C.pyi
// specifies the encoding.
//
// Invariant: as in quantizer/kernels.cpp, identical bits in every ISA variant and no inline
// function with external linkage.
#pragma once

#include "codecs/bytes.h"
#include "codecs/codecs.h"
#include "codecs/scales.h"
#include "lanes/lanes.h"
#include "random.h"

namespace qsync {
namespace {

// Return random integers r < 2**24, one per lane: `uniform` of random.h, times 2**24.
inline F random_lanes(const I &counter) {
    I x = counter;
    x = x ^ right<16>(x);
    x = x * all(static_cast<int32_t>(0x7FEB352Du));
    x = x ^ right<15>(x);
    x = x * all(static_cast<int32_t>(0x846CA68Bu));
    x = x ^ right<16>(x);
    return to_float(right<8>(x));
}

// Return the counters of sixteen consecutive values. `counter` belongs to the first.
inline I counters(uint32_t counter) {
    float words[LANES];
    for (uint32_t i = 0; i < LANES; ++i) {
        const uint32_t own = i * WEYL;
        std::memcpy(words + i, &own, sizeof own);
    }
    return all(static_cast<int32_t>(counter)) + bits(load(words));
}

// Sign-magnitude code with 2**(B-1) - 1 steps.
template <int B, Layout L> struct Code {
    static constexpr int32_t LEVELS = (1 << (B - 1)) - 1;
    static constexpr float SPAN = static_cast<float>(LEVELS);

    template <class Scaled> static I encode(const F &x, const Scaled &scaled, const I &counter) {
        const F u = scaled(magnitude(x));
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

// Code with 2**B points from -scale to scale, spaced by 2 * scale / (2**B - 1).
template <int B> struct Code<B, ENDPOINTS> {
    static constexpr int32_t LAST = (1 << B) - 1;
    static constexpr float SPAN = static_cast<float>(LAST);

    template <class Scaled> static I encode(const F &x, const Scaled &scaled, const I &counter) {
        const F u = scaled(x) * all(0.5f) - all(0.5f);
        const F below = floored(u);
        const F rest = (u - below) * all(0x1p24f);
        const I point = one_more(truncated(below) + all(int32_t{1} << (B - 1)), random_lanes(counter), rest);
        return most(least(point, all(LAST)), all(int32_t{0}));
    }
    static F decode(const I &code, const F &step, const F &after) {
        return to_float(left<1>(code) + all(-LAST)) * step * after;
    }
};

// Position of a value within a byte.
template <int K> struct Place {};

// Packing of B-bit codes: value k * 16 + l of a group is stored in bits k * B and up of byte l.
// Codes of 16 bits use two bytes each.
template <int B> struct Packed {
    static constexpr size_t PER_BYTE = B < 8 ? 8 / B : 1, VALUES = LANES * PER_BYTE, BYTES = B < 8 ? LANES : LANES * B / 8;

    static size_t bytes(size_t n) { return (n + VALUES - 1) / VALUES * BYTES; }
    // Store the codes that `add` accumulates for the values of a byte, in order.
    template <class Add> static void store(uint8_t *p, Add &&add) {
        I packed = add(all(int32_t{0}), Place<0>{});
        if constexpr (PER_BYTE > 1) packed = add(packed, Place<1>{});
        if constexpr (PER_BYTE > 2) packed = add(packed, Place<2>{});
        if constexpr (PER_BYTE > 2) packed = add(packed, Place<3>{});
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

// Add the code of the K-th value of a byte.
template <int B, Layout L, int K, class Scaled>
inline I with_code(const I &packed, const F &x, const Scaled &scaled, const I &counter, Place<K>) {
    if constexpr (B == 2 && L == SIGN) {
        // With one step, a value equal to the scale (or above it, through rounding) exceeds every
        // random number, so no clamping is needed.
        const I signs = merged(packed, right<30 - 2 * K>(bits(x)), all(int32_t{2} << 2 * K));
        return joined(signs, all(int32_t{1} << 2 * K), random_lanes(counter), enlarged(scaled, magnitude(x)));
    } else if constexpr (K == 0) {
        return Code<B, L>::encode(x, scaled, counter);
    } else {
        return packed | left<K * B>(Code<B, L>::encode(x, scaled, counter));
    }
}

// Encode [n] float32 of one unit. `coming`: address to prefetch from.
template <int B, Layout L, class Scaled>
inline void encode_codes(const float *x, size_t n, const float *coming, const Scaled &scaled, uint8_t *codes, uint32_t counter) {
    using P = Packed<B>;
    const I next = all(static_cast<int32_t>(WEYL * static_cast<uint32_t>(LANES)));
    I at = counters(counter);
    size_t i = 0;
    const auto add = [&](const I &packed, const F &values, auto place) {
        const I found = with_code<B, L>(packed, values, scaled, at, place);
        ask(coming + i, LANES * sizeof(float));
        at = at + next;
        i += LANES;
        return found;
    };
    const auto whole = [&](const I &packed, auto place) { return add(packed, load(x + i), place); };
    const auto some = [&](const I &packed, auto place) { return add(packed, load_some(x + smaller(i, n), n - smaller(i, n)), place); };
    for (; i + P::VALUES <= n; codes += P::BYTES) P::store(codes, whole);
    if (i < n) P::store(codes, some);
}

// Values that are encoded per iteration. After each block, the same number of values of the next
// unit is scanned for its scale: the arithmetic of one hides the memory latency of the other, and a
// unit need not fit into a cache.
constexpr size_t BLOCK = 2048;

// Return the larger of two magnitudes, or NaN if one is: its bit pattern compares largest.
inline float larger(float a, float b) {
    int32_t x, y;
    std::memcpy(&x, &a, sizeof x);
    std::memcpy(&y, &b, sizeof y);
    return x > y ? a : b;
}

template <int B, Layout L>
inline void encode_units(const float *x, size_t n, size_t unit, Norm norm, uint8_t *scales, uint8_t *codes, uint32_t counter) {
    using P = Packed<B>;
    float ahead = 0.0f;
    bool known = false;
    // Prefetch distance: the next unit, but at least BLOCK values, so that data arrives before the
    // scan.
    const size_t further = unit < BLOCK ? BLOCK : unit;
    for (size_t begin = 0; begin < n; begin += unit, scales += sizeof(float), counter += WEYL * static_cast<uint32_t>(unit)) {
        const size_t size = smaller(unit, n - begin), bytes = P::bytes(size), next = smaller(unit, n - begin - size);
        const float *values = x + begin;
        const float scale = norm == TWO_NORM ? two_norm(values, size) : known ? ahead : absmax(values, size);
        known = false;
        if (scale - scale == 0.0f) {
            put(scales, scale);
            const Scale s(scale, Code<B, L>::SPAN);
            ahead = 0.0f, known = norm == MAX_NORM;
            const auto encode = [&](const auto &scaled) {
                for (size_t at = 0; at < size; at += BLOCK) {
                    const uint32_t first = counter + WEYL * static_cast<uint32_t>(at);
                    uint8_t *to = codes + at / P::VALUES * P::BYTES;
                    encode_codes<B, L>(values + at, smaller(BLOCK, size - at), values + at + further, scaled, to, first);
                    if (known && at < next) ahead = larger(ahead, absmax(values + unit + at, smaller(BLOCK, next - at)));
                }
            };
            if (s.before == 1.0f)
                encode(Whole{all(s.inverse())});
            else
                encode(Moved{all(s.before), all(s.inverse())});
        } else {
            put(scales, uint32_t{0x7FC00000u});
            std::memset(codes, 0, bytes);
        }
        codes += bytes;
    }
}

// Fast path for one-step codes and short units: process TOGETHER units at once. The first pass
// computes all scales, which loads the values into the L1 cache; the second pass encodes. Each pass
// is set up once. Return false without writing if a scale is not finite or requires a power of two
// (see `Scale`).
constexpr size_t TOGETHER = 16, SHORT = BLOCK / TOGETHER;

inline bool encode_together(const float *x, size_t unit, uint8_t *scales, uint8_t *codes, uint32_t counter) {
    float found[TOGETHER];
    bool below = true;
    for (size_t k = 0; k < TOGETHER; ++k) {
        found[k] = absmax(x + k * unit, unit);
        if (found[k] != 0.0f && !(found[k] >= 0x1p-64f && found[k] <= 0x1p64f)) return false;
        below = below && found[k] <= 1.0f;
    }
    std::memcpy(scales, found, sizeof found);
    const auto encode = [&](const auto &scaled) {
        for (size_t k = 0; k < TOGETHER; ++k, codes += Packed<2>::bytes(unit), counter += WEYL * static_cast<uint32_t>(unit)) {
            const float inverse = found[k] > 0.0f ? 1.0f / found[k] : 0.0f;
            encode_codes<2, SIGN>(x + k * unit, unit, x + (TOGETHER + k) * unit, scaled(inverse), codes, counter);
        }
    };
    if (below)
        encode([](float inverse) { return Enlarged{all(inverse * 0x1p24f)}; });
    else
        encode([](float inverse) { return Whole{all(inverse)}; });
    return true;
}

template <int B, Layout L>
void qsgd_encode(const float *x, size_t n, size_t unit, Norm norm, uint8_t *scales, uint8_t *codes, uint32_t counter) {
    const bool together = B == 2 && L == SIGN && norm == MAX_NORM && unit <= SHORT;
    const size_t step = together ? TOGETHER * unit : n;
    for (size_t begin = 0; begin < n; begin += step) {
        const size_t size = smaller(step, n - begin), units = begin / unit;
        const uint32_t first = counter + WEYL * static_cast<uint32_t>(begin);
        uint8_t *to_scales = scales + units * sizeof(float), *to_codes = codes + units * Packed<B>::bytes(unit);
        if (!together || size < step || !encode_together(x + begin, unit, to_scales, to_codes, first))
            encode_units<B, L>(x + begin, size, unit, norm, to_scales, to_codes, first);
    }
}

template <int B, Layout L>
void qsgd_decode(const uint8_t *scales, const uint8_t *codes, size_t n, size_t unit, float *y, bool add, bool last) {
    using P = Packed<B>;
    const bool past = last && !add && goes_past(y, n, unit);
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
                if (past) {
                    store_past(to, found);
                } else {
                    ask_ahead(to, LANES * sizeof(float));
                    store(to, add ? load(to) + found : found);
                }
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
    if (past) written_past();
}

} // namespace
} // namespace qsync
