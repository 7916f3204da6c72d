#include "dispatch.h"

#include "parallel.h"
#include "random.h"

#include <cstring>

namespace qsync {

const std::vector<Path> &available_paths() {
    static const std::vector<Path> paths = [] {
        std::vector<Path> found;
#ifdef QSYNC_X86
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vl"))
            found.push_back({"avx512", &avx512_kernels, &avx512_codecs});
        if (__builtin_cpu_supports("avx2")) found.push_back({"avx2", &avx2_kernels, &avx2_codecs});
#endif
        found.push_back({"scalar", &scalar_kernels, &scalar_codecs});
        return found;
    }();
    return paths;
}

namespace {

constexpr std::size_t MOST = 1021;

using Words = std::vector<std::uint32_t>;

std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

// Random bits: values of every magnitude, with denormals, NaN and infinities among them. Every other one is short, so that it can lie
// midway between two values of a narrow format.
Words any_values() {
    Words words(MOST);
    for (std::size_t i = 0; i < MOST; ++i) words[i] = mix(static_cast<std::uint32_t>(i)) & (i % 2 ? 0xFFF80000u : 0xFFFFFFFFu);
    return words;
}

// Finite values as `type` stores them: half of every magnitude, half on a level or midway between two, where a last bit decides.
Words quantizable(Type type, float scale) {
    Words words = any_values();
    for (std::size_t i = 0; i < MOST; ++i) {
        const std::uint32_t level = bits_of(static_cast<float>(static_cast<std::int32_t>(mix(words[i]) % 521) - 260) * 0.5f * scale);
        if (type == FLOAT32) words[i] = i % 2 ? level : words[i] & 0xBFFFFFFFu;
        if (type == BFLOAT16) words[i] = i % 2 ? (level >> 16) * 0x10001u : words[i] & 0xBFFFBFFFu;
        if (type == FLOAT16) words[i] &= 0xBFFFBFFFu;
    }
    return words;
}

// Equal to the last bit, but for what a NaN carries: which of two operands it comes from is the compiler's choice.
bool same(const std::vector<float> &a, const std::vector<float> &b) {
    for (std::size_t i = 0; i < a.size(); ++i)
        if (bits_of(a[i]) != bits_of(b[i]) && !(a[i] != a[i] && b[i] != b[i])) return false;
    return true;
}

bool agree_on(const Kernels &first, const Kernels &second, std::size_t size) {
    const Words any = any_values();
    for (int type = 0; type < TYPES; ++type) {
        if (first.absmax[type](any.data(), size) != second.absmax[type](any.data(), size)) return false;
        for (const float scale : {0x1p-126f, 0.0123f, 3.3e30f}) {
            const Words source = quantizable(static_cast<Type>(type), scale);
            if (first.absmax[type](source.data(), size) != second.absmax[type](source.data(), size)) return false;
            for (int rounding = 0; rounding < ROUNDINGS; ++rounding) {
                std::vector<std::int8_t> a(size), b(size);
                first.quantize[type][rounding](source.data(), a.data(), size, scale, 127.0f, 5u);
                second.quantize[type][rounding](source.data(), b.data(), size, scale, 127.0f, 5u);
                if (a != b) return false;
            }
        }
    }
    std::vector<float> source(size), a(size), b(size);
    std::memcpy(source.data(), any.data(), size * sizeof(float));
    for (int rounding = 0; rounding < ROUNDINGS; ++rounding) {
        for (const Grid &grid : {Grid{10, -126, 0x1.ffcp127}, Grid{3, -6, 448.0}, Grid{2, -2, 7.5}}) {
            first.round_float[rounding](source.data(), a.data(), size, grid, 5u);
            second.round_float[rounding](source.data(), b.data(), size, grid, 5u);
            if (std::memcmp(a.data(), b.data(), size * sizeof(float)) != 0) return false;
        }
    }
    return true;
}

bool agree_on(const Codecs &first, const Codecs &second, std::size_t size) {
    const Words any = any_values();
    // Of every magnitude, NaN among them; and near each other, as gradients are, so that random numbers decide.
    std::vector<float> wide(size), near(size);
    std::memcpy(wide.data(), any.data(), size * sizeof(float));
    for (std::size_t i = 0; i < size; ++i) near[i] = static_cast<float>(static_cast<std::int32_t>(any[i] >> 8) - 8000000) * 0x1p-30f;
    for (const std::vector<float> &source : {wide, near}) {
        using Bytes = std::vector<std::uint8_t>;
        for (int bits = 2; bits <= 16; bits *= 2) {
            for (int layout = 0; layout < LAYOUTS; ++layout) {
                for (const Norm norm : {MAX_NORM, TWO_NORM}) {
                    const Qsgd how{bits, 64, norm, static_cast<Layout>(layout)};
                    Bytes a(qsgd_bytes(size, bits, how.unit)), b(a.size());
                    qsgd_encode(first, how, source.data(), size, a.data(), 5u, 1);
                    qsgd_encode(second, how, source.data(), size, b.data(), 5u, 1);
                    if (a != b) return false;
                    std::vector<float> x(source), y(source);
                    qsgd_decode(first, how, a.data(), size, x.data(), norm == MAX_NORM, 1);
                    qsgd_decode(second, how, a.data(), size, y.data(), norm == MAX_NORM, 1);
                    if (!same(x, y)) return false;
                }
            }
        }
        for (const std::size_t unit : {std::size_t{3}, std::size_t{64}, std::size_t{100}}) {
            Bytes a(onebit_bytes(size, unit)), b(a.size());
            std::vector<float> x(near), y(near);
            onebit_encode(first, unit, source.data(), x.data(), size, a.data(), 1);
            onebit_encode(second, unit, source.data(), y.data(), size, b.data(), 1);
            if (a != b || !same(x, y)) return false;
            onebit_decode(first, unit, a.data(), size, x.data(), true, 1);
            onebit_decode(second, unit, a.data(), size, y.data(), true, 1);
            if (!same(x, y)) return false;
        }
        for (int bits = 12; bits <= 32; bits += 4) {
            Bytes a(truncate_bytes(size, bits, 420)), b(a.size());
            std::vector<float> x(near), y(near);
            truncate_encode(first, bits, 420, source.data(), x.data(), size, a.data(), 1);
            truncate_encode(second, bits, 420, source.data(), y.data(), size, b.data(), 1);
            if (a != b || !same(x, y)) return false;
            if (!truncate_decode(first, a.data(), a.size(), size, x.data(), true, 1)) return false;
            truncate_decode(second, a.data(), a.size(), size, y.data(), true, 1);
            if (!same(x, y)) return false;
        }
    }
    return true;
}

} // namespace

bool agrees_with_scalar(const Path &path) {
    if (path.kernels == &scalar_kernels) return true;
    const IeeeMode mode;
    for (const std::size_t size : {MOST, MOST - 7, std::size_t{3}})
        if (!agree_on(*path.kernels, scalar_kernels, size) || !agree_on(*path.codecs, scalar_codecs, size)) return false;
    return true;
}

} // namespace qsync
