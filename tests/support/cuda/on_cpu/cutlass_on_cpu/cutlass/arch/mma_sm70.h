// CPU replacement of CUTLASS's header of this name: mma.sync.m8n8k4 of FP16 with FP32 sums and
// fragments as in the PTX ISA (9.7.14.5.1). A warp computes four such products, each by two quads:
// lanes 0-3 and 16-19, and so on.
#pragma once

#include "cutlass/arch/mma.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/layout/matrix.h"
#include "cutlass/numeric_types.h"

// Select four of the eight bytes of `y` and `x`, one for each digit of `selector` (prmt). INT8
// kernels without tensor cores transpose with it.
inline int __byte_perm(unsigned x, unsigned y, unsigned selector) {
    std::uint64_t const bytes = std::uint64_t(y) << 32 | x;
    unsigned found = 0;
    for (int i = 0; i < 4; ++i) {
        found |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    }
    return static_cast<int>(found);
}

namespace cutlass {
namespace arch {

template <class LayoutA_, class LayoutB_>
struct QuadPairs {
    using Shape = gemm::GemmShape<16, 16, 4>;
    using ElementA = half_t;
    using LayoutA = LayoutA_;
    using FragmentA = Array<half_t, 4>;
    using ElementB = half_t;
    using LayoutB = LayoutB_;
    using FragmentB = Array<half_t, 4>;
    using ElementC = float;
    using LayoutC = layout::RowMajor;
    using FragmentC = Array<float, 8>;
    using Operator = OpMultiplyAdd;
    using ArchTag = arch::Sm70;

    static constexpr bool a_by_rows = platform::is_same<LayoutA, layout::RowMajor>::value;
    static constexpr bool b_by_rows = platform::is_same<LayoutB, layout::RowMajor>::value;

    void operator()(FragmentC &d, FragmentA const &a, FragmentB const &b, FragmentC const &c) const {
        struct Operands {
            FragmentA a;
            FragmentB b;
        };
        auto const all = on_cpu::exchange(Operands{a, b});
        int const lane = threadIdx.x % 32, first = lane / 4 % 4 * 4; // of this product
        auto const member = [&](int number) { return all[first + number % 4 + number / 4 * 16]; };
        FragmentC found;
        for (int i = 0; i < 8; ++i) {
            int const row = (lane & 1) + (i & 2) + (lane < 16 ? 0 : 4), column = (i & 4) + (lane & 2) + (i & 1);
            double sum = 0;
            for (int k = 0; k < 4; ++k) {
                // If the operand is contiguous along k, a thread has one row; otherwise four rows
                // at one k.
                half_t const x = a_by_rows ? member(row).a[k] : member(row / 4 * 4 + k).a[row % 4];
                half_t const y = b_by_rows ? member(column / 4 * 4 + k).b[column % 4] : member(column).b[k];
                sum += static_cast<double>(static_cast<float>(x)) * static_cast<double>(static_cast<float>(y));
            }
            found[i] = static_cast<float>(sum + static_cast<double>(c[i]));
        }
        d = found;
    }
};

#define QSYNC_QUAD_PAIRS(A, B)                                                                                         \
    template <>                                                                                                        \
    struct Mma<gemm::GemmShape<8, 8, 4>, 8, half_t, layout::A, half_t, layout::B, float, layout::RowMajor, OpMultiplyAdd> \
        : QuadPairs<layout::A, layout::B> {                                                                            \
        using Shape = gemm::GemmShape<8, 8, 4>;                                                                        \
    };                                                                                                                 \
    template <>                                                                                                        \
    struct Mma<gemm::GemmShape<16, 16, 4>, 32, half_t, layout::A, half_t, layout::B, float, layout::RowMajor, OpMultiplyAdd> \
        : QuadPairs<layout::A, layout::B> {};
QSYNC_QUAD_PAIRS(RowMajor, RowMajor)
QSYNC_QUAD_PAIRS(RowMajor, ColumnMajor)
QSYNC_QUAD_PAIRS(ColumnMajor, RowMajor)
QSYNC_QUAD_PAIRS(ColumnMajor, ColumnMajor)
#undef QSYNC_QUAD_PAIRS

} // namespace arch
} // namespace cutlass
