// Which path runs. Invariant: unless a person asks for it, a path is used only after it gave the scalar path's bits on
// this very processor.
#pragma once

#include "kernels.h"

#include <string>
#include <vector>

namespace qsync {

struct Path {
    std::string name;
    const Kernels *kernels;
};

// Those that this build and this processor have, best first; "scalar" is always the last.
const std::vector<Path> &available_paths();

// Returns whether both give the same bits for every kernel, on values of all kinds and on sizes that leave a tail.
bool agree(const Kernels &first, const Kernels &second);

} // namespace qsync
