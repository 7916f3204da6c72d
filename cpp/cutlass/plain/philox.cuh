// Philox4x32-10 counter-based random numbers (Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers:
// As Easy as 1, 2, 3", SC 2011). backend/numerics/philox.py computes the same numbers in torch.
//
// One block serves eight elements with sixteen bits each. Counter: (index / 8 as low and high word;
// stream; 0); key: the seed. The number of element i of the eight is (bits + 1/2) * 2^-16, with the
// low half of word i / 2 for even i and the high half for odd i. So it is strictly between 0 and 1,
// its mean is 1/2, and a value that the format represents exactly is never rounded to a neighbor.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define QSYNC_BOTH __host__ __device__ __forceinline__
#else
#define QSYNC_BOTH inline
#endif

namespace qsync {

struct Words {
    std::uint32_t word[4];
};

// Convert counters to random blocks in place. Several blocks share the round keys and hide each
// other's latency.
template <int number> QSYNC_BOTH void philox4x32(Words (&blocks)[number], std::uint32_t key0, std::uint32_t key1) {
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int round = 0; round < 10; ++round) {
#ifdef __CUDACC__
#pragma unroll
#endif
        for (int i = 0; i < number; ++i) {
            std::uint32_t(&c)[4] = blocks[i].word;
            const std::uint64_t left = static_cast<std::uint64_t>(c[0]) * 0xD2511F53u, right = static_cast<std::uint64_t>(c[2]) * 0xCD9E8D57u;
            c[0] = static_cast<std::uint32_t>(right >> 32) ^ c[1] ^ key0;
            c[1] = static_cast<std::uint32_t>(right);
            c[2] = static_cast<std::uint32_t>(left >> 32) ^ c[3] ^ key1;
            c[3] = static_cast<std::uint32_t>(left);
        }
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

struct Random {
    std::uint32_t key0, key1, stream;

    // Return the counter of elements 8 * eighth to 8 * eighth + 7.
    QSYNC_BOTH Words counter(std::uint64_t eighth) const {
        return {{static_cast<std::uint32_t>(eighth), static_cast<std::uint32_t>(eighth >> 32), stream, 0}};
    }

    template <int number> QSYNC_BOTH void draw(Words (&counters)[number]) const { philox4x32(counters, key0, key1); }
};

// Return the sixteen bits of element i of the eight in the low half. i is a compile-time constant
// after unrolling.
QSYNC_BOTH std::uint32_t sixteen(const Words &words, int i) {
    return i % 2 ? words.word[i / 2] >> 16 : words.word[i / 2] & 0xFFFFu;
}

} // namespace qsync
