// CPU replacement of CUTLASS's headers mma_sm75.h, mma_sm80.h and mma_sm89.h: mma.sync for all
// shapes and types, with fragments as in the PTX ISA (9.7.14.5, m8n8k16 and m16n8k*): registers of
// 32 bits, four lanes per row.
#pragma once

#include "cutlass/arch/mma.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/layout/matrix.h"
#include "cutlass/numeric_types.h"

namespace cutlass {
namespace arch {

template <int M, int N, int K, class A, class B, class C, class Operator_>
struct Mma<gemm::GemmShape<M, N, K>, 32, A, layout::RowMajor, B, layout::ColumnMajor, C, layout::RowMajor, Operator_> {
    static_assert(N == 8 && (M == 8 || M == 16), "");
    using Shape = gemm::GemmShape<M, N, K>;
    using ElementA = A;
    using LayoutA = layout::RowMajor;
    using FragmentA = Array<A, M * K / 32>;
    using ElementB = B;
    using LayoutB = layout::ColumnMajor;
    using FragmentB = Array<B, K * N / 32>;
    using ElementC = C;
    using LayoutC = layout::RowMajor;
    using FragmentC = Array<C, M * N / 32>;
    using Operator = Operator_;
    using ArchTag = arch::Sm75;

    using Exact = platform::conditional_t<platform::is_same<C, int>::value, std::int64_t, double>;

    void operator()(FragmentC &d, FragmentA const &a, FragmentB const &b, FragmentC const &c) const {
        struct Operands {
            FragmentA a;
            FragmentB b;
        };
        auto const all = on_cpu::exchange(Operands{a, b});
        constexpr int packed = 32 / sizeof_bits<A>::value; // values per register
        int const lane = threadIdx.x % 32;
        FragmentC found;
        for (int i = 0; i < M * N / 32; ++i) {
            int const row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            Exact sum = 0;
            for (int k = 0; k < K; ++k) {
                int const holder = k / packed % 4, half = k / (4 * packed), place = k % packed;
                int const a_register = half * (M / 8) + row / 8;
                sum += value(all[row % 8 * 4 + holder].a[a_register * packed + place]) *
                       value(all[column * 4 + holder].b[half * packed + place]);
            }
            found[i] = static_cast<C>(sum + static_cast<Exact>(c[i]));
        }
        d = found;
    }

    template <class Element>
    static Exact value(Element const &element) {
        if constexpr (platform::is_same<C, int>::value) {
            return static_cast<Exact>(element);
        } else {
            return static_cast<Exact>(static_cast<float>(element));
        }
    }
};

} // namespace arch
} // namespace cutlass
