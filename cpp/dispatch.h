// Runtime dispatch over CPU instruction sets (ISA variants).
//
// Invariant: unless a caller names an ISA variant, it is used only if its results on this processor
// are bit-identical to the results of the scalar variant.
#pragma once

#include "codecs/codecs.h"
#include "gemm/gemm.h"
#include "optimizers/optimizers.h"
#include "quantizer/kernels.h"

#include <string>
#include <vector>

namespace qsync {

// Kernel tables of one ISA variant. "Path" in identifiers means ISA variant.
struct Path {
    std::string name;
    const Kernels *kernels;
    const Codecs *codecs;
    const Multiplier<Int8> *int8;
    const Multiplier<Bfloat16> *bf16;
    const Optimizers *optimizers;
};

// Return the ISA variants that this build and this processor support, best first; "scalar" is
// always the last. Only fault injection (fault_injection.h) modifies an entry.
std::vector<Path> &available_paths();

// Return whether every kernel of an ISA variant is bit-identical to the scalar kernel on test data:
// values of all magnitudes, special values, and sizes with a tail.
bool agrees_with_scalar(const Path &path);

} // namespace qsync
