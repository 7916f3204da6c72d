// Sixteen values in plain loops. Only lanes.h includes this file. avx512.h documents the
// operations.
#pragma once

namespace qsync {
namespace {

struct F { float v[LANES]; };
struct I { std::int32_t v[LANES]; };

template <class To, class From, class Work> inline To each(const From &a, const Work &work) {
    To to;
    for (std::size_t i = 0; i < LANES; ++i) to.v[i] = work(a.v[i]);
    return to;
}
template <class To, class From, class Work> inline To each(const From &a, const From &b, const Work &work) {
    To to;
    for (std::size_t i = 0; i < LANES; ++i) to.v[i] = work(a.v[i], b.v[i]);
    return to;
}
using Lane = std::int32_t;
inline std::uint32_t word(Lane a) { return static_cast<std::uint32_t>(a); }
inline Lane lane(std::uint32_t a) { return static_cast<Lane>(a); }

inline F load(const float *p) {
    F a;
    std::memcpy(a.v, p, sizeof a.v);
    return a;
}
inline void store(float *p, const F &a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store_past(float *p, const F &a) { store(p, a); }
inline F all(float x) { return each<F>(F{}, [x](float) { return x; }); }
inline I all(Lane x) { return each<I>(I{}, [x](Lane) { return x; }); }
inline F operator+(const F &a, const F &b) { return each<F>(a, b, [](float x, float y) { return x + y; }); }
inline F operator-(const F &a, const F &b) { return each<F>(a, b, [](float x, float y) { return x - y; }); }
inline F operator*(const F &a, const F &b) { return each<F>(a, b, [](float x, float y) { return x * y; }); }
inline I operator+(const I &a, const I &b) { return each<I>(a, b, [](Lane x, Lane y) { return lane(word(x) + word(y)); }); }
inline I operator*(const I &a, const I &b) { return each<I>(a, b, [](Lane x, Lane y) { return lane(word(x) * word(y)); }); }
inline I operator&(const I &a, const I &b) { return each<I>(a, b, [](Lane x, Lane y) { return x & y; }); }
inline I operator|(const I &a, const I &b) { return each<I>(a, b, [](Lane x, Lane y) { return x | y; }); }
inline I operator^(const I &a, const I &b) { return each<I>(a, b, [](Lane x, Lane y) { return x ^ y; }); }
template <int K> inline I left(const I &a) { return each<I>(a, [](Lane x) { return lane(word(x) << K); }); }
template <int K> inline I right(const I &a) { return each<I>(a, [](Lane x) { return lane(word(x) >> K); }); }
inline I bits(const F &a) {
    I to;
    std::memcpy(to.v, a.v, sizeof to.v);
    return to;
}
inline F as_float(const I &a) {
    F to;
    std::memcpy(to.v, a.v, sizeof to.v);
    return to;
}
inline I truncated(const F &a) { return each<I>(a, [](float x) { return static_cast<Lane>(x); }); }
inline F to_float(const I &a) { return each<F>(a, [](Lane x) { return static_cast<float>(x); }); }
inline F floored(const F &a) { return each<F>(a, [](float x) { return __builtin_floorf(x); }); }
inline I least(const I &a, const I &b) { return each<I>(a, b, [](Lane x, Lane y) { return x < y ? x : y; }); }
inline I most(const I &a, const I &b) { return each<I>(a, b, [](Lane x, Lane y) { return x > y ? x : y; }); }
inline I one_more(const I &a, const F &b, const F &c) { return a + each<I>(b, c, [](float x, float y) { return x < y ? 1 : 0; }); }
inline I joined(const I &a, const I &bit, const F &b, const F &c) {
    return a | (bit & each<I>(b, c, [](float x, float y) { return x < y ? -1 : 0; }));
}
inline I merged(const I &a, const I &b, const I &mask) { return a | (b & mask); }
inline std::uint32_t not_negative(const F &a) {
    std::uint32_t found = 0;
    for (std::size_t i = 0; i < LANES; ++i) found |= static_cast<std::uint32_t>(a.v[i] >= 0.0f) << i;
    return found;
}
inline F chosen(std::uint32_t which, const F &a, const F &b) {
    F to;
    for (std::size_t i = 0; i < LANES; ++i) to.v[i] = which >> i & 1u ? a.v[i] : b.v[i];
    return to;
}
template <int H> inline F butterfly(const F &a) {
    F to;
    for (std::size_t i = 0; i < LANES; ++i) to.v[i] = (i & H) == 0 ? a.v[i] + a.v[i + H] : a.v[i - H] - a.v[i];
    return to;
}
inline void store_bytes(std::uint8_t *p, const I &a) {
    for (std::size_t i = 0; i < LANES; ++i) p[i] = static_cast<std::uint8_t>(a.v[i]);
}
inline I load_bytes(const std::uint8_t *p) {
    I to;
    for (std::size_t i = 0; i < LANES; ++i) to.v[i] = p[i];
    return to;
}
inline void store_words(std::uint8_t *p, const I &a) {
    for (std::size_t i = 0; i < LANES; ++i) {
        const auto x = static_cast<std::uint16_t>(a.v[i]);
        std::memcpy(p + 2 * i, &x, 2);
    }
}
inline I load_words(const std::uint8_t *p) {
    I to;
    for (std::size_t i = 0; i < LANES; ++i) {
        std::uint16_t x;
        std::memcpy(&x, p + 2 * i, 2);
        to.v[i] = x;
    }
    return to;
}

struct Squares {
    double part[LANES] = {};
    void add(const F &a) {
        for (std::size_t i = 0; i < LANES; ++i) part[i] += static_cast<double>(a.v[i]) * static_cast<double>(a.v[i]);
    }
    void store(double *p) const { std::memcpy(p, part, sizeof part); }
};

} // namespace
} // namespace qsync
