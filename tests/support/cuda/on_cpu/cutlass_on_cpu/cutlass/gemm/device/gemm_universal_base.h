// Stands for CUTLASS's header of this name on the CPU, where run.h launches.
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
