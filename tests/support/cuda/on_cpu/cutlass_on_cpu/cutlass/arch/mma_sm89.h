// See mma_sm80.h.
#pragma once

#include "cutlass/arch/mma_sm80.h"

namespace cutlass {
namespace arch {
namespace detail {

// Whether sums accumulate in a second set of registers, as in CUTLASS's header.
template <class Operator>
static constexpr bool is_sm89_staged_policy_v =
    sizeof_bits<typename Operator::ElementA>::value == 8 && platform::is_same<typename Operator::ElementC, float>::value &&
    platform::is_same<typename Operator::MathOperator, OpMultiplyAdd>::value;

} // namespace detail
} // namespace arch
} // namespace cutlass
