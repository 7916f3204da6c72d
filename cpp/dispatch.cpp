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

bool agree(const Kernels &first, const Kernels &second) {
    const IeeeMode mode;
    // Random bits are values of every magnitude, denormals, NaN and infinities among them.
    constexpr std::size_t n = 1021;
    std::vector<std::uint32_t> bits(n);
    for (std::size_t i = 0; i < n; ++i) bits[i] = mix(static_cast<std::uint32_t>(i));
    for (const std::size_t size : {n, n - 7, std::size_t{3}}) {
        for (int type = 0; type < TYPES; ++type) {
            if (first.absmax[type](bits.data(), size) != second.absmax[type](bits.data(), size)) return false;
            // The quantizers take finite values alone: clear an exponent bit.
            std::vector<std::uint32_t> finite(bits);
            for (auto &x : finite) x &= type == FLOAT32 ? 0xBFFFFFFFu : 0xBFFFBFFFu;
            for (int rounding = 0; rounding < ROUNDINGS; ++rounding) {
                for (const float scale : {0x1p-126f, 0.0123f, 1.0f}) {
                    std::vector<std::int8_t> a(size), b(size);
                    first.quantize[type][rounding](finite.data(), a.data(), size, scale, 127.0f, 5u);
                    second.quantize[type][rounding](finite.data(), b.data(), size, scale, 127.0f, 5u);
                    if (a != b) return false;
                }
            }
        }
        for (int rounding = 0; rounding < ROUNDINGS; ++rounding) {
            for (const Grid &grid : {Grid{10, -126, 0x1.ffcp127}, Grid{3, -6, 448.0}, Grid{2, -2, 7.5}}) {
                std::vector<float> source(size), a(size), b(size);
                std::memcpy(source.data(), bits.data(), size * sizeof(float));
                first.round_float[rounding](source.data(), a.data(), size, grid, 5u);
                second.round_float[rounding](source.data(), b.data(), size, grid, 5u);
                if (std::memcmp(a.data(), b.data(), size * sizeof(float)) != 0) return false;
            }
        }
    }
    return true;
}

} // namespace qsync
