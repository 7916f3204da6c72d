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
            found.push_back({"avx512", &avx512_kernels});
        if (__builtin_cpu_supports("avx2")) found.push_back({"avx2", &avx2_kernels});
#endif
        found.push_back({"scalar", &scalar_kernels});
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

} // namespace

bool agree(const Kernels &first, const Kernels &second) {
    const IeeeMode mode;
    return agree_on(first, second, MOST) && agree_on(first, second, MOST - 7) && agree_on(first, second, 3);
}

} // namespace qsync
