// wgmma on the CPU: D += A B for 64 rows. Each thread has a part of D; fragments and matrices in
// shared memory are as in the PTX ISA (9.7.15.5). It completes at the call, which a kernel that
// waits before it reads D cannot detect.
#pragma once

namespace on_cpu {

struct s8 {
    using Sum = std::int32_t;
    static constexpr int bytes = 1;
    static Sum value(unsigned char const *at) { return static_cast<std::int8_t>(*at); }
};

template <class Type, int size>
struct Float {
    using Sum = float;
    static constexpr int bytes = size;
    static Sum value(unsigned char const *at) {
        Type stored;
        std::memcpy(static_cast<void *>(&stored), at, size);
        return static_cast<float>(stored);
    }
};

using e4m3 = Float<cutlass::float_e4m3_t, 1>;
using e5m2 = Float<cutlass::float_e5m2_t, 1>;
using f16 = Float<cutlass::half_t, 2>;
using bf16 = Float<cutlass::bfloat16_t, 2>;

struct tf32 {
    using Sum = float;
    static constexpr int bytes = 4;
    static Sum value(unsigned char const *at) {
        std::uint32_t bits;
        std::memcpy(&bits, at, 4);
        bits &= 0xffffe000; // the hardware ignores the other bits
        float number;
        std::memcpy(&number, &bits, 4);
        return number;
    }
};

// Matrix in shared memory: `outer` is m or n. Its layouts in units of 16 bytes, for a swizzle of
// width w (2, 4, 8 units), are
//     k contiguous      ((8, n), 2) : ((w, stride), 1)
//     outer contiguous  ((w, n), (8, k)) : ((1, leading), (w, stride))
template <class Type>
struct Matrix {
    std::uint32_t start, leading, stride;
    int bits;
    bool across;

    Matrix(std::uint64_t descriptor, bool across)
        : start(static_cast<std::uint32_t>(descriptor & 0x3fff) << 4), leading(static_cast<std::uint32_t>(descriptor >> 16 & 0x3fff) << 4),
          stride(static_cast<std::uint32_t>(descriptor >> 32 & 0x3fff) << 4), bits(4 - static_cast<int>(descriptor >> 62)),
          across(across) {
        if (descriptor >> 62 == 0) fail("a matrix without a swizzle, which no kernel here has");
        if ((descriptor >> 49 & 7) != 0) fail("a matrix that does not start where its pattern does");
        if (across && Type::bytes != 2) fail("wgmma takes only 16-bit matrices across k");
    }

    typename Type::Sum at(int outer, int k) const {
        unsigned const width = 16u << bits;
        unsigned offset;
        if (across) {
            unsigned const byte = static_cast<unsigned>(outer * Type::bytes);
            offset = byte % width + byte / width * leading + static_cast<unsigned>(k) % 8 * width + static_cast<unsigned>(k) / 8 * stride;
        } else {
            offset = static_cast<unsigned>(outer) % 8 * width + static_cast<unsigned>(outer) / 8 * stride + static_cast<unsigned>(k * Type::bytes);
        }
        return Type::value(pointer(swizzled(start + offset, bits) | special.cluster_ctarank << 24, Type::bytes));
    }
};

// `a(row, k)` returns an element of A; rows are the 16 of this warp.
template <int N, int K, class B, class Sum, class A>
void wgmma(void *const *d, A a, std::uint64_t b, bool add, bool b_across) {
    Matrix<B> const matrix(b, b_across);
    unsigned const lane = threadIdx.x % 32;
    std::vector<Sum> rows[2];
    for (unsigned half = 0; half < 2; ++half) {
        for (int k = 0; k < K; ++k) rows[half].push_back(a(lane / 4 + 8 * half, k));
    }
    for (int i = 0; i < N / 2; ++i) {
        int const column = i / 4 * 8 + static_cast<int>(lane % 4) * 2 + i % 2;
        Sum sum;
        std::memcpy(&sum, d[i], sizeof(sum));
        if (!add) sum = 0;
        for (int k = 0; k < K; ++k) sum += rows[i / 2 % 2][k] * matrix.at(column, k);
        std::memcpy(d[i], &sum, sizeof(sum));
    }
    // wgmma is one instruction of four warps: all must have read shared memory before one
    // continues.
    wait(warpgroups[block.running / 128], 128);
}

template <int N, int K, class A, class B>
void wgmma_ss(void *const *d, std::uint64_t a, std::uint64_t b, bool add, bool a_across = false, bool b_across = false) {
    Matrix<A> const matrix(a, a_across);
    int const first = static_cast<int>(threadIdx.x / 32 % 4) * 16;
    wgmma<N, K, B, typename A::Sum>(d, [&](unsigned row, int k) { return matrix.at(first + static_cast<int>(row), k); }, b, add, b_across);
}

// A in registers: lane l has 4 bytes of rows l / 4 and l / 4 + 8, for each half of k.
template <int N, int K, class A, class B>
void wgmma_rs(void *const *d, std::array<std::uint32_t, 4> a, std::uint64_t b, bool add, bool b_across = false) {
    auto const all = exchange(a);
    auto const value = [&](unsigned row, int k) {
        int const byte = k * A::bytes;
        auto const &words = all[row % 8 * 4 + static_cast<unsigned>(byte % 16 / 4)];
        std::uint32_t const word = words[row / 8 + 2 * static_cast<unsigned>(byte / 16)];
        return A::value(reinterpret_cast<unsigned char const *>(&word) + byte % 4);
    };
    wgmma<N, K, B, typename A::Sum>(d, value, b, add, b_across);
}

} // namespace on_cpu
