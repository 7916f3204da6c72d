// Fault injection for tests: kernels that corrupt one bit of their result. A build has it with the
// CMake option QSYNC_FAULT_INJECTION, which wheels do not set.
#pragma once

#include "dispatch.h"

#include <string>
#include <utility>
#include <vector>

namespace qsync {

// Return the names of the kernels that can be corrupted, each with its number of variants (for
// example one per dtype and rounding mode).
std::vector<std::pair<std::string, int>> corruptible();

// Corrupt one kernel of an ISA variant: flip the lowest bit of the first byte of its result. A
// previous corruption is undone first. Throws std::invalid_argument for an unknown kernel.
void corrupt(Path &path, const std::string &name, int which);

// Undo the corruption.
void restore();

} // namespace qsync
