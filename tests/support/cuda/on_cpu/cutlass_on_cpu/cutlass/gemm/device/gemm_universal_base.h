// CPU replacement of CUTLASS's header of this name: run.h launches instead.
#pragma once

#include "cutlass/gemm/gemm.h"

namespace cutlass {
namespace gemm {
namespace device {

template <class Kernel>
struct GemmUniversalBase;

} // namespace device
} // namespace gemm
} // namespace cutlass
