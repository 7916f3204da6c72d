// Kernels that are wrong on purpose, so that tests show what becomes of a path that gives wrong results. Nothing else calls this.
#pragma once

#include "dispatch.h"

#include <string>
#include <utility>
#include <vector>

namespace qsync {

// The kernels of a path by name, with how many there are of each: one a type and rounding, say.
std::vector<std::pair<std::string, int>> spoilable();

// Has one of a path's kernels get a bit wrong, that of the lowest value of its result. One kernel is wrong at a time; throws
// std::invalid_argument where there is no such kernel.
void spoil(Path &path, const std::string &name, int which);

// Makes what was spoiled right again.
void mend();

} // namespace qsync
