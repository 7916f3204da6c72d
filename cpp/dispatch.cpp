// Runtime dispatch: CPU feature detection and bit-exact comparison of ISA variants with the scalar
// kernels.

#include "dispatch.h"

#include "parallel.h"
#include "random.h"

#include <algorithm>
#include <cstring>

namespace qsync {

std::vector<Path> &available_paths() {
    static std::vector<Path> paths = [] {
        std::vector<Path> found;
#ifdef QSYNC_X86
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma")) {
            if (__builtin_cpu_supports("avx512vnni")) {
                // AVX512-BF16 is a separate CPU feature: some processors with VNNI lack it.
                const Multiplier<Bfloat16> *bf16 = &avx512_bf16;
#ifdef QSYNC_AVX512_BF16
                if (__builtin_cpu_supports("avx512bf16")) bf16 = &avx512_vnni_bf16;
#endif
#ifdef QSYNC_AMX
                if (amx_usable()) found.push_back({"amx", &avx512_kernels, &avx512_codecs, &amx_int8, &amx_bf16, &avx512_optimizers});
#endif
                found.push_back({"avx512_vnni", &avx512_kernels, &avx512_codecs, &avx512_vnni_int8, bf16, &avx512_optimizers});
            }
            found.push_back({"avx512", &avx512_kernels, &avx512_codecs, &avx512_int8, &avx512_bf16, &avx512_optimizers});
        }
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
            found.push_back({"avx2", &avx2_kernels, &avx2_codecs, &avx2_int8, &avx2_bf16, &avx2_optimizers});
#endif
        found.push_back({"scalar", &scalar_kernels, &scalar_codecs, &scalar_int8, &scalar_bf16, &scalar_optimizers});
        return found;
    }();
    return paths;
}

namespace {

// Largest number of test values.
constexpr std::size_t MOST = 1117;

using Words = std::vector<std::uint32_t>;

std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

// Return random bit patterns: values of every magnitude, with denormals, NaN and infinities. Every
// second one has few mantissa bits, so that it can be a tie between two values of a narrow format.
Words any_values() {
    Words words(MOST);
    for (std::size_t i = 0; i < MOST; ++i) words[i] = mix(static_cast<std::uint32_t>(i)) & (i % 2 ? 0xFFF80000u : 0xFFFFFFFFu);
    return words;
}

// Return finite values, stored as `type`. Half of them cover every magnitude; the other half are
// quantization levels or ties, where the last bit decides.
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

// Return whether all bits are equal, except for NaN payloads: the compiler chooses the operand that
// a NaN is propagated from.
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
                first.quantize[type][rounding](source.data(), a.data(), size, scale, 127.0f, 5u, source.data());
                second.quantize[type][rounding](source.data(), b.data(), size, scale, 127.0f, 5u, source.data());
                if (a != b) return false;
            }
        }
    }
    for (const std::uint32_t least : {0u, 1677722u, 1u << 24}) {
        std::vector<std::uint8_t> a(size), b(size);
        first.keep(a.data(), size, least, 5u);
        second.keep(b.data(), size, least, 5u);
        if (a != b) return false;
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
    // `wide` covers every magnitude and NaN; the values of `near` are close to each other, like
    // gradients, so that the random numbers decide.
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
                    qsgd_decode(first, how, a.data(), size, x.data(), norm == MAX_NORM, true, 1);
                    qsgd_decode(second, how, a.data(), size, y.data(), norm == MAX_NORM, true, 1);
                    if (!same(x, y)) return false;
                }
            }
        }
        for (const std::size_t block : {std::size_t{128}, std::size_t{256}, std::size_t{512}, std::size_t{1024}}) {
            std::vector<float> a((size + block - 1) / block * block), b(a), x(near), y(near);
            first.rotate(source.data(), size, block, 9u, a.data());
            second.rotate(source.data(), size, block, 9u, b.data());
            if (!same(a, b)) return false;
            first.rotate_back(a.data(), size, block, 9u, x.data(), block == 128);
            second.rotate_back(b.data(), size, block, 9u, y.data(), block == 128);
            if (!same(x, y)) return false;
        }
        for (const std::size_t unit : {std::size_t{3}, std::size_t{64}, std::size_t{100}}) {
            Bytes a(onebit_bytes(size, unit)), b(a.size());
            std::vector<float> x(near), y(near);
            onebit_encode(first, unit, source.data(), x.data(), size, a.data(), 1);
            onebit_encode(second, unit, source.data(), y.data(), size, b.data(), 1);
            if (a != b || !same(x, y)) return false;
            onebit_decode(first, unit, a.data(), size, x.data(), true, false, 1);
            onebit_decode(second, unit, a.data(), size, y.data(), true, false, 1);
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

// Return whether both micro-kernels compute identical products, for row-major and column-major
// operands, every output dtype, and biases that are large or near zero.
//
// a: [m, k], b: [n, k], contiguous; `layout` selects the strides under which they are read.
template <class T>
bool agree_on(const Multiplier<T> &first, const Multiplier<T> &second, const std::vector<T> &a, const std::vector<T> &b, std::size_t k) {
    const std::size_t m = a.size() / k, n = b.size() / k;
    std::vector<float> scales(m), bias(n);
    for (std::size_t i = 0; i < m; ++i) scales[i] = i % 2 ? 1e-5f : 0.01f + static_cast<float>(i) / 3.0f;
    for (std::size_t i = 0; i < n; ++i) bias[i] = i % 2 ? static_cast<float>(i) * 0.1f - 2.5f : static_cast<float>(i) * 777.7f - 9999.0f;
    for (int layout = 0; layout < 4; ++layout) {
        const auto vectors = [&](const std::vector<T> &of, std::size_t count, bool along) {
            const auto lies = static_cast<std::ptrdiff_t>(along ? k : count);
            return Vectors<T>{of.data(), count, k, along ? lies : 1, along ? 1 : lies};
        };
        for (int output = 0; output < OUTPUTS; ++output) {
            std::vector<float> x(m * n), y(x);
            Gemm<T> what{vectors(a, m, layout % 2 == 0), vectors(b, n, layout / 2 == 0), {scales.data(), true}, {nullptr, false},
                         bias.data(), static_cast<Output>(output), x.data()};
            what.activation = static_cast<Activation>(layout % ACTIVATIONS);
            gemm(first, what, 1);
            what.result = y.data();
            gemm(second, what, 1);
            const bool floats = output == OUT_FLOAT32 || (output == OUT_SUMS && !std::is_same_v<T, Int8>);
            if (floats ? !same(x, y) : std::memcmp(x.data(), y.data(), x.size() * sizeof x[0]) != 0) return false;
        }
    }
    return true;
}

// Tested problem sizes: partial tiles, and a K that is split into blocks.
struct Sizes {
    std::size_t m, n, k;
};
constexpr Sizes TRIED[] = {{33, 49, 131}, {2, 3, 6145}};

// Operands contain -128: a pair of products of -128 * -128 overflows 16 bits.
bool agree_on(const Multiplier<Int8> &first, const Multiplier<Int8> &second) {
    for (const auto &[m, n, k] : TRIED) {
        std::vector<Int8> a(m * k), b(n * k);
        for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<Int8>(i < 4 * k ? -128 : mix(static_cast<std::uint32_t>(i)));
        for (std::size_t i = 0; i < b.size(); ++i) b[i] = static_cast<Int8>(i % n < 2 ? -128 : mix(static_cast<std::uint32_t>(~i)));
        if (!agree_on(first, second, a, b, k)) return false;
    }
    return true;
}

// Operands are integers whose sums fit into 24 bits, hence exact in any order. A NaN and an
// infinity must propagate.
bool agree_on(const Multiplier<Bfloat16> &first, const Multiplier<Bfloat16> &second) {
    for (const auto &[m, n, k] : TRIED) {
        const auto number = [](std::uint32_t i) {
            return Bfloat16{static_cast<std::uint16_t>(bits_of(static_cast<float>(static_cast<std::int32_t>(mix(i) % 103) - 51)) >> 16)};
        };
        std::vector<Bfloat16> a(m * k), b(n * k);
        for (std::size_t i = 0; i < a.size(); ++i) a[i] = number(static_cast<std::uint32_t>(i));
        for (std::size_t i = 0; i < b.size(); ++i) b[i] = number(static_cast<std::uint32_t>(~i));
        // The first sum consists of a single product by 1.0, so that every bit of a packed value
        // reaches the result.
        std::fill(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(k), Bfloat16{0});
        a[0] = b[0] = Bfloat16{0x3F80u};
        if (!agree_on(first, second, a, b, k)) return false;
        a[k / 2] = Bfloat16{0x7F80u};
        b[k / 3] = Bfloat16{0x7FC0u};
        if (!agree_on(first, second, a, b, k)) return false;
    }
    return true;
}

bool agree_on(const Optimizers &first, const Optimizers &second, std::size_t size) {
    const Words any = any_values();
    std::vector<float> wide(size), near(size);
    std::memcpy(wide.data(), any.data(), size * sizeof(float));
    for (std::size_t i = 0; i < size; ++i) near[i] = static_cast<float>(static_cast<std::int32_t>(any[i] >> 8) - 8000000) * 0x1p-23f;
    // Parameter, gradient and at most three state tensors.
    using State = std::vector<std::vector<float>>;
    const auto equal = [](const State &a, const State &b) {
        for (std::size_t i = 0; i < a.size(); ++i)
            if (!same(a[i], b[i])) return false;
        return true;
    };
    for (const auto &source : {wide, near}) {
        const State before{near, source, near, wide, near};
        for (int scaled = 0; scaled < 2; ++scaled) {
            for (const float weight : {0.1f, 0.75f}) {
                for (int decay = 0; decay < DECAYS; ++decay) {
                    for (int largest = 0; largest < 2; ++largest) {
                        const AdamRule rule{0.9999f, 0.01f, weight, 0.999f, 0.001f, 1e-8f, -1.0f, 1024.0f};
                        State a(before), b(before);
                        first.adam[decay][largest][scaled](a[0].data(), a[1].data(), a[2].data(), a[3].data(), a[4].data(), size, rule,
                                                           -0.01f, 0.3f);
                        second.adam[decay][largest][scaled](b[0].data(), b[1].data(), b[2].data(), b[3].data(), b[4].data(), size, rule,
                                                            -0.01f, 0.3f);
                        if (!equal(a, b)) return false;
                    }
                }
            }
            for (int decays = 0; decays < 2; ++decays) {
                for (int momentum = 0; momentum < MOMENTA; ++momentum) {
                    const SgdRule rule{0.01f, 0.9f, 0.75f, -0.1f, -1.0f, 1024.0f};
                    State a(before), b(before);
                    first.sgd[decays][momentum][scaled](a[0].data(), a[1].data(), a[2].data(), size, rule);
                    second.sgd[decays][momentum][scaled](b[0].data(), b[1].data(), b[2].data(), size, rule);
                    if (!equal(a, b)) return false;
                }
            }
        }
    }
    return true;
}

} // namespace

bool agrees_with_scalar(const Path &path) {
    if (path.kernels == &scalar_kernels) return true;
    const IeeeMode mode;
    for (const std::size_t size : {MOST, MOST - 7, std::size_t{3}})
        if (!agree_on(*path.kernels, scalar_kernels, size) || !agree_on(*path.codecs, scalar_codecs, size) ||
            !agree_on(*path.optimizers, scalar_optimizers, size))
            return false;
    return agree_on(*path.int8, scalar_int8) && agree_on(*path.bf16, scalar_bf16);
}

} // namespace qsync
