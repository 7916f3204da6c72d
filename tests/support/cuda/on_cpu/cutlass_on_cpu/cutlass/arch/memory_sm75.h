// CPU replacement of CUTLASS's header of this name: ldmatrix (PTX ISA 9.7.14.5.15).
#pragma once

#include "cutlass/array.h"
#include "cutlass/layout/matrix.h"

namespace cutlass {
namespace arch {

inline unsigned cutlass_get_smem_pointer(void const *) { std::abort(); }

// Lanes 8i to 8i+7 provide the addresses of the rows of matrix i, 16 bytes each. A lane gets two
// 16-bit values of each matrix: of row lane / 4, or, transposed, of column lane / 4.
template <typename Layout, int MatrixCount>
void ldsm(Array<unsigned, MatrixCount> &values, void const *pointer) {
    auto const rows = on_cpu::exchange(pointer);
    unsigned const lane = threadIdx.x % 32;
    bool constexpr transposed = platform::is_same<Layout, layout::ColumnMajor>::value;
    for (int matrix = 0; matrix < MatrixCount; ++matrix) {
        std::uint16_t halves[2];
        for (unsigned i = 0; i < 2; ++i) {
            unsigned const row = transposed ? lane % 4 * 2 + i : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + i;
            auto const *start = static_cast<unsigned char const *>(rows[8 * matrix + row]);
            if (reinterpret_cast<std::uintptr_t>(start) % 16 != 0) std::abort();
            std::memcpy(&halves[i], start + 2 * column, 2);
        }
        unsigned word;
        std::memcpy(&word, halves, 4);
        values[matrix] = word;
    }
}

template <typename AccessType>
void shared_load(AccessType &value, void const *pointer) { std::memcpy(static_cast<void *>(&value), pointer, sizeof(AccessType)); }

} // namespace arch
} // namespace cutlass
