// at::native::cpublas::brgemm, oneDNN's kernel for blocks as torch has it, over the blocks that cpp/gemm multiplies: for benchmarks alone.
// The second matrix lies packed, `wide` columns after the other, words of four bytes together; the first by rows.

#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cstdint>
#include <exception>

namespace {

template <class A, class B, class C> int multiply(int64_t m, int64_t n, int64_t k, const void *a, const void *b, void *c) {
    constexpr int64_t TALL = 128, WIDE = 64, PART = 1024;
    const auto *rows = static_cast<const A *>(a);
    const auto *columns = static_cast<const B *>(b);
    auto *sums = static_cast<C *>(c);
    try {
        for (int64_t row = 0; row < m; row += TALL)
            for (int64_t part = 0; part < k; part += PART)
                for (int64_t column = 0; column < n; column += WIDE)
                    at::native::cpublas::brgemm(std::min(TALL, m - row), WIDE, std::min(PART, k - part), k, WIDE, n, part > 0,
                                                rows + row * k + part, columns + column * k + part * WIDE, sums + row * n + column);
        at::native::cpublas::brgemm_release();
        return 0;
    } catch (const std::exception &) {
        return 1; // There is none for these types on this processor.
    }
}

} // namespace

extern "C" int brgemm_bf16(int64_t m, int64_t n, int64_t k, const void *a, const void *b, void *c) {
    return multiply<at::BFloat16, at::BFloat16, float>(m, n, k, a, b, c);
}

extern "C" int brgemm_u8s8(int64_t m, int64_t n, int64_t k, const void *a, const void *b, void *c) {
    return multiply<unsigned char, signed char, int32_t>(m, n, k, a, b, c);
}
