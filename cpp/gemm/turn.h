// Matrices with rows for columns. No instruction set has a part in it: values are moved as they are.
#pragma once

#include <cstddef>

namespace qsync {

// Writes each of `count` matrices of `rows` by `columns` values of `bytes` (1, 2 or 4) that lie one behind the other, turned: value j of row
// i becomes value i of row j. Source and target share no memory.
void turn(const void *source, void *target, std::size_t count, std::size_t rows, std::size_t columns, std::size_t bytes, int threads);

} // namespace qsync
