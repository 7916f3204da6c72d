// The codecs of gradients, written once and compiled once a path. What each computes is said in qsync_fx/_C.pyi.
//
// Invariant: as in kernels.cpp: equal bits on every path, nothing inline and external.

#include "codecs.h"
#include "lanes.h"
#include "random.h"

#include <cfloat>

namespace qsync {
namespace {

using std::int32_t;
using std::size_t;
using std::uint32_t;
using std::uint8_t;

constexpr uint32_t INFINITE = 0x7F800000u;

template <class T> inline T get(const uint8_t *p) {
    T x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
template <class T> inline void put(uint8_t *p, T x) { std::memcpy(p, &x, sizeof x); }

inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

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

// What of a unit is encoded at once: the last of it first, whose values are still near from the search for its scale.
constexpr size_t BLOCK = 2048;

template <int B, Layout L>
void qsgd_encode(const float *x, size_t n, size_t unit, Norm norm, uint8_t *scales, uint8_t *codes, uint32_t counter) {
    using P = Packed<B>;
    for (size_t begin = 0; begin < n; begin += unit, scales += sizeof(float), counter += WEYL * static_cast<uint32_t>(unit)) {
        const size_t size = smaller(unit, n - begin), bytes = P::bytes(size);
        const float *values = x + begin;
        const float scale = norm == TWO_NORM ? two_norm(values, size) : absmax(values, size);
        if (scale - scale == 0.0f) {
            put(scales, scale);
            const Scale s(scale, Code<B, L>::SPAN);
            const F before = all(s.before), inverse = all(s.inverse());
            for (size_t block = (size - 1) / BLOCK + 1; block-- != 0;) {
                const size_t at = block * BLOCK;
                encode_codes<B, L>(values + at, smaller(BLOCK, size - at), values + unit + at, before, inverse,
                                   codes + at / P::VALUES * P::BYTES, counter + WEYL * static_cast<uint32_t>(at));
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

void onebit_decode(const uint8_t *means, const uint8_t *words, size_t n, size_t unit, float *y, bool add) {
    for (size_t begin = 0; begin < n; begin += unit, means += 2 * sizeof(float)) {
        const size_t size = smaller(unit, n - begin);
        float *values = y + begin;
        const F high = all(get<float>(means)), low = all(get<float>(means + sizeof(float)));
        for (size_t i = 0; i < size; i += LANES) {
            const F found = chosen(get<std::uint16_t>(words + i / 8), high, low);
            store_some(values + i, add ? load_some(values + i, size - i) + found : found, size - i);
        }
        words += (size + 31) / 32 * 4;
    }
}

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
