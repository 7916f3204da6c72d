// C interface of kernels (cpp/cutlass/abi.h) on the host: plain loops over the pointers, strides
// and sizes from the wrapper. Kernel requirements on arguments are checked, so that a wrong
// argument fails the test instead of reading out of bounds. Macros: NAME, OPERAND (a type),
// A_BY_ROWS, B_BY_ROWS, or CONV: 0 fprop, 1 dgrad, 2 wgrad. Outputs are FP32.
#include "abi.h"

#include <cstddef>
#include <vector>

namespace {

constexpr int alignment = 16 / sizeof(OPERAND);

bool vectors(const void *pointer, std::int64_t stride) {
    return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0 && stride % alignment == 0;
}

float finished(double sum, float a_scale, float b_scale, const float *bias) {
    float value = static_cast<float>(sum) * a_scale;
    value = value * b_scale;
    return bias ? value + *bias : value;
}

float scale(const float *scales, int each, std::int64_t at) { return scales ? scales[each ? at : 0] : 1.0f; }

#ifdef CONV
using Arguments = qsync::ConvArguments;

int status(Arguments const &x) {
    bool const whole = vectors(x.a, CONV ? x.k : x.c) && vectors(x.b, x.c) && x.n > 0 && x.p > 0 && x.q > 0;
    bool const right = x.p == (x.h + 2 * x.pad_h - x.dilation_h * (x.r - 1) - 1) / x.stride_h + 1;
    return whole && right ? 0 : 1;
}

void compute(Arguments const &x) {
    auto const *a = static_cast<OPERAND const *>(x.a), *b = static_cast<OPERAND const *>(x.b);
    auto at = [&](std::int64_t first, std::int64_t row, std::int64_t column, std::int64_t channel, std::int64_t rows, std::int64_t columns,
                  std::int64_t channels) { return ((first * rows + row) * columns + column) * channels + channel; };
    std::int64_t const sizes[] = {std::int64_t(x.n) * x.p * x.q * x.k, std::int64_t(x.n) * x.h * x.w * x.c, std::int64_t(x.k) * x.r * x.s * x.c};
    std::vector<double> sums(sizes[CONV]);
    for (int n = 0; n < x.n; ++n)
        for (int p = 0; p < x.p; ++p)
            for (int q = 0; q < x.q; ++q)
                for (int r = 0; r < x.r; ++r)
                    for (int s = 0; s < x.s; ++s) {
                        int const h = p * x.stride_h - x.pad_h + r * x.dilation_h, w = q * x.stride_w - x.pad_w + s * x.dilation_w;
                        if (h < 0 || h >= x.h || w < 0 || w >= x.w)
                            continue;
                        for (int k = 0; k < x.k; ++k)
                            for (int c = 0; c < x.c; ++c) {
                                std::int64_t const places[] = {at(n, p, q, k, x.p, x.q, x.k), at(n, h, w, c, x.h, x.w, x.c), at(k, r, s, c, x.r, x.s, x.c)};
                                std::int64_t const first = places[CONV ? 0 : 1], second = places[CONV == 2 ? 1 : 2];
                                sums[places[CONV]] += double(a[first]) * double(b[second]);
                            }
                    }
    for (std::size_t i = 0; i < sums.size(); ++i)
        static_cast<float *>(x.d)[i] = finished(sums[i], scale(x.a_scale, 0, 0), scale(x.b_scale, x.b_scale_per_channel, i % x.k), x.bias ? x.bias + i % x.k : nullptr);
}
#else
using Arguments = qsync::GemmArguments;

int status(Arguments const &x) {
    std::int64_t const inner_a = A_BY_ROWS ? x.k : x.m, inner_b = B_BY_ROWS ? x.n : x.k;
    bool const whole = vectors(x.a, x.lda) && vectors(x.b, x.ldb) && inner_a % alignment == 0 && inner_b % alignment == 0 && x.n % 4 == 0;
    return whole && x.m > 0 && x.n > 0 && x.k > 0 && x.lda >= inner_a && x.ldb >= inner_b && x.ldd >= x.n ? 0 : 1;
}

void compute(Arguments const &x) {
    auto const *a = static_cast<OPERAND const *>(x.a), *b = static_cast<OPERAND const *>(x.b);
    for (std::int64_t m = 0; m < x.m; ++m)
        for (std::int64_t n = 0; n < x.n; ++n) {
            double sum = 0;
            for (std::int64_t k = 0; k < x.k; ++k)
                sum += double(a[A_BY_ROWS ? m * x.lda + k : k * x.lda + m]) * double(b[B_BY_ROWS ? k * x.ldb + n : n * x.ldb + k]);
            static_cast<float *>(x.d)[m * x.ldd + n] =
                finished(sum, scale(x.a_scale, x.a_scale_per_row, m), scale(x.b_scale, x.b_scale_per_column, n), x.bias ? x.bias + n : nullptr);
        }
}
#endif

} // namespace

extern "C" {
__attribute__((visibility("default"))) int qsync_abi(void) { return QSYNC_ABI_VERSION; }
__attribute__((visibility("default"))) const char *qsync_name(void) { return NAME; }
__attribute__((visibility("default"))) int qsync_can_implement(const Arguments *x) { return status(*x); }
__attribute__((visibility("default"))) std::int64_t qsync_workspace(const Arguments *) { return 64; }
__attribute__((visibility("default"))) int qsync_run(const Arguments *x, void *workspace, void *) {
    if (status(*x) || !workspace)
        return 2;
    compute(*x);
    return 0;
}
__attribute__((visibility("default"))) int qsync_shared_memory(void) { return 0; }
__attribute__((visibility("default"))) const char *qsync_error(int status) { return status == 1 ? "misaligned" : "run without being asked"; }
}
