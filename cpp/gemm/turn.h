// Batched matrix transposition for 1-, 2- and 4-byte elements. Scalar code for every ISA variant:
// values are copied unchanged.
#pragma once

#include <cstddef>

namespace qsync {

// Transpose `count` matrices [rows, columns] of elements of `bytes` bytes (1, 2 or 4), contiguous
// and consecutive in memory, into [columns, rows]. Pointers are aligned to their elements. Source
// and target must not overlap.
void turn(const void *source, void *target, std::size_t count, std::size_t rows, std::size_t columns, std::size_t bytes, int threads);

} // namespace qsync
