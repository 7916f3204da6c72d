// Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011).
// backend/operators/philox.py computes the same numbers in torch.
//
// One block serves eight elements, sixteen bits each: counter (place / 8, low and high word; stream; 0), key the seed. The number of
// element i of the eight is (bits + 1/2) * 2^-16, bits the low half of word i / 2 for even i, else the high half. So it lies strictly
// between 0 and 1, its mean is 1/2, and a value that a format holds exactly is never rounded to its neighbour.
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

QSYNC_BOTH Words philox4x32(std::uint32_t c0, std::uint32_t c1, std::uint32_t c2, std::uint32_t c3, std::uint32_t k0, std::uint32_t k1) {
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t left = static_cast<std::uint64_t>(c0) * 0xD2511F53u, right = static_cast<std::uint64_t>(c2) * 0xCD9E8D57u;
        c0 = static_cast<std::uint32_t>(right >> 32) ^ c1 ^ k0;
        c1 = static_cast<std::uint32_t>(right);
        c2 = static_cast<std::uint32_t>(left >> 32) ^ c3 ^ k1;
        c3 = static_cast<std::uint32_t>(left);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

struct Random {
    std::uint32_t key0, key1, stream;

    // The words of the eight elements whose places are 8 * eighth to 8 * eighth + 7.
    QSYNC_BOTH Words at(std::uint64_t eighth) const {
        return philox4x32(static_cast<std::uint32_t>(eighth), static_cast<std::uint32_t>(eighth >> 32), stream, 0, key0, key1);
    }
};

// The sixteen bits of element i of the eight, in the low half; i is known when this is compiled.
QSYNC_BOTH std::uint32_t sixteen(const Words &words, int i) {
    return i % 2 ? words.word[i / 2] >> 16 : words.word[i / 2] & 0xFFFFu;
}

} // namespace qsync
