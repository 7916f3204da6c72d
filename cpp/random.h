// Counter-based random numbers for the CPU kernels. They are stateless, so results depend neither
// on the order of work nor on the number of threads.
//
// `mix` is lowbias32 (C. Wellons, "Prospecting for Hash Functions", 2018), a bijection on 32 bits.
#pragma once

#include <cstdint>

namespace qsync {

constexpr std::uint32_t WEYL = 0x9E3779B1u;

// Internal linkage: each ISA variant compiles its own copy, which the linker must not merge.
static inline std::uint32_t mix(std::uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return x;
}

// Return the key of a random stream from a 64-bit seed and a stream number.
static inline std::uint32_t stream_key(std::uint64_t seed, std::uint32_t stream) {
    const auto low = static_cast<std::uint32_t>(seed), high = static_cast<std::uint32_t>(seed >> 32);
    return mix(low ^ mix(high ^ mix(stream + 0x9E3779B9u)));
}

// Return a number in [0, 1) with 24 bits, so that the conversion to float32 is exact.
static inline float uniform(std::uint32_t counter) { return static_cast<float>(static_cast<std::int32_t>(mix(counter) >> 8)) * 0x1p-24f; }

} // namespace qsync
