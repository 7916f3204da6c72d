// Which path runs. Invariant: unless a person asks for it, a path is used only after it gave the scalar path's bits on
// this very processor.
#pragma once

#include "codecs/codecs.h"
#include "gemm/gemm.h"
#include "optimizers/optimizers.h"
#include "quantizer/kernels.h"

#include <string>
#include <vector>

namespace qsync {

struct Path {
    std::string name;
    const Kernels *kernels;
    const Codecs *codecs;
    const Multiplier<Int8> *int8;
    const Multiplier<Bfloat16> *bf16;
    const Optimizers *optimizers;
};

// Those that this build and this processor have, best first; "scalar" is always the last. Only spoil.h changes one.
std::vector<Path> &available_paths();

// Returns whether a path gives the scalar path's bits for every kernel, on values of all kinds and on sizes that leave a tail.
bool agrees_with_scalar(const Path &path);

} // namespace qsync
