// CPU replacement of CUTLASS's header of this name: each_cluster.h launches instead.
#pragma once

#include "cutlass/cutlass.h"

namespace cutlass {

template <class Kernel, class Params>
Status kernel_launch(dim3, dim3, std::size_t, cudaStream_t, Params const &, bool) {
    on_cpu::fail("a kernel is launched as on a GPU");
}

} // namespace cutlass
