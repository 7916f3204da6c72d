// Matrix copies with optional transposition, zero padding and dtype conversion, in one pass over
// memory.
//
// A copy is memory-bound if each thread moves 16 bytes at a time on both sides. Transposed copies
// go through shared memory: a thread packs elements that become neighbors into words, whose
// positions avoid bank conflicts for both the word stores and the 16-byte loads of a warp. Kernels
// are specialized for fully aligned data; otherwise words are read and shifted, and the remainder
// is copied element by element.
#pragma once

#include "plain/matrix.cuh"

namespace qsync {

// Element types. BITS*: arbitrary data of this width, copied unchanged. The numbers match
// CONVERT_TYPES in backend/cuda/codegen.py.
enum class Element : int { BITS8, BITS16, BITS32, INT8, E4M3, E5M2, FLOAT16, BFLOAT16, FLOAT32 };

constexpr int size_of(Element x) {
    if (x == Element::BITS32 || x == Element::FLOAT32) return 4;
    return x == Element::BITS16 || x == Element::FLOAT16 || x == Element::BFLOAT16 ? 2 : 1;
}

// Return the value of a number given as its bits.
template <Element X> QSYNC_BOTH float number(std::uint32_t code) {
    if constexpr (X == Element::INT8) return static_cast<float>(static_cast<std::int8_t>(code));
    if constexpr (X == Element::FLOAT16) return widened<FLOAT16>(code);
    if constexpr (X == Element::BFLOAT16) return widened<BFLOAT16>(code);
    // E5M2 is the high byte of FP16. E4M3 has an exponent bias that is smaller by 8, and no
    // infinities.
    if constexpr (X == Element::E5M2) return widened<FLOAT16>(code << 8);
    if constexpr (X == Element::E4M3) {
        const float value = multiply(widened<FLOAT16>((code & 0x80u) << 8 | (code & 0x7Fu) << 7), 256.0f);
        return (code & 0x7Fu) == 0x7Fu ? as_float(0x7FC00000u) : value;
    }
    return as_float(code);
}

// Return the bits of a value, rounded to nearest, ties to even. Overflow yields infinity.
template <Element Y> QSYNC_BOTH std::uint32_t coded(float value) {
    if constexpr (Y == Element::FLOAT32) return bits(value);
    if constexpr (Y == Element::BFLOAT16) {
        const std::uint32_t word = bits(value);
        return value != value ? 0x7FFFu : (word + 0x7FFFu + (word >> 16 & 1u)) >> 16;
    }
    std::uint16_t half;
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
#else
    const auto narrow = static_cast<_Float16>(value);
    std::memcpy(&half, &narrow, 2);
#endif
    return half;
}

template <Element X, Element Y> QSYNC_BOTH std::uint32_t converted(std::uint32_t code, float scale) {
    if constexpr (Y == Element::BITS8 || Y == Element::BITS16 || Y == Element::BITS32) {
        static_assert(X == Y);
        return code;
    } else {
        return coded<Y>(multiply(number<X>(code), scale));
    }
}

// Consecutive elements of `SIZE` bytes in their memory layout.
template <int SIZE, int number> struct Elements {
    static constexpr int WORDS = number * SIZE / 4;
    static constexpr std::uint32_t MASK = SIZE == 4 ? 0xFFFFFFFFu : (1u << 8 * (SIZE % 4)) - 1u;

    std::uint32_t word[WORDS];

    QSYNC_BOTH std::uint32_t code(int i) const { return word[i * SIZE / 4] >> 8 * (i * SIZE % 4) & MASK; }
    QSYNC_BOTH void put(int i, std::uint32_t code) { word[i * SIZE / 4] |= code << 8 * (i * SIZE % 4); }
};

// Arguments of a copy. x: `batches` matrices [rows, columns] with `stride` elements between rows
// and `batch_stride` between matrices. y: contiguous matrices [y_rows, y_columns], at least as many
// and as large; for a transposed copy, y_rows corresponds to the columns of x. Elements of y
// without a source are zeros. x and y do not overlap.
struct Copy {
    const std::uint8_t *x;
    std::uint8_t *y;
    const float *scale; // null: 1
    std::int64_t batches, rows, columns, stride, batch_stride, y_rows, y_columns;
    // Tiles (vectors) per row of y.
    std::uint32_t a_row;
    // Divisions by the tiles per row and per matrix (transposed), or by the vectors per row and the
    // rows per matrix.
    Division by_row, by_matrix;
    // Whether x and y are aligned to the access size of a thread.
    bool x_aligned, y_aligned;
};

#ifdef QSYNC_KERNELS

constexpr int COPYING = 256; // threads

template <int BYTES> __device__ __forceinline__ void load_whole(const std::uint8_t *from, std::uint32_t *word) {
    if constexpr (BYTES == 16) {
        const uint4 found = *reinterpret_cast<const uint4 *>(from);
        word[0] = found.x, word[1] = found.y, word[2] = found.z, word[3] = found.w;
    } else if constexpr (BYTES == 8) {
        const uint2 found = *reinterpret_cast<const uint2 *>(from);
        word[0] = found.x, word[1] = found.y;
    } else {
        word[0] = *reinterpret_cast<const std::uint32_t *>(from);
    }
}

template <int BYTES> __device__ __forceinline__ void store_whole(std::uint8_t *to, const std::uint32_t *word) {
    if constexpr (BYTES == 16) {
        *reinterpret_cast<uint4 *>(to) = make_uint4(word[0], word[1], word[2], word[3]);
    } else if constexpr (BYTES == 8) {
        *reinterpret_cast<uint2 *>(to) = make_uint2(word[0], word[1]);
    } else {
        *reinterpret_cast<std::uint32_t *>(to) = word[0];
    }
}

template <int SIZE> __device__ __forceinline__ std::uint32_t load_one(const std::uint8_t *from) {
    if constexpr (SIZE == 1) return *from;
    if constexpr (SIZE == 2) return *reinterpret_cast<const std::uint16_t *>(from);
    return *reinterpret_cast<const std::uint32_t *>(from);
}

template <int SIZE> __device__ __forceinline__ void store_one(std::uint8_t *to, std::uint32_t code) {
    if constexpr (SIZE == 1) *to = static_cast<std::uint8_t>(code);
    if constexpr (SIZE == 2) *reinterpret_cast<std::uint16_t *>(to) = static_cast<std::uint16_t>(code);
    if constexpr (SIZE == 4) *reinterpret_cast<std::uint32_t *>(to) = code;
}

// Load `number` elements of a row from `column` on; zeros past the end of the row.
template <int SIZE, int number, bool WHOLE> __device__ __forceinline__ Elements<SIZE, number> load(const Copy &copy, std::int64_t matrix, std::int64_t row, std::int64_t column) {
    using Found = Elements<SIZE, number>;
    Found found = {};
    const std::uint8_t *from = copy.x + SIZE * (matrix * copy.batch_stride + row * copy.stride + column);
    if (WHOLE || (copy.x_aligned && column + number <= copy.columns)) {
        load_whole<number * SIZE>(from, found.word);
    } else if (column + number + 4 / SIZE - 1 <= copy.columns) {
        // Unaligned: read aligned words. Each contains at least one of these bytes, and none
        // extends past the end of the row.
        const auto off = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(from) % 4);
        const auto *words = reinterpret_cast<const std::uint32_t *>(from - off);
        std::uint32_t now = words[0];
#pragma unroll
        for (int i = 0; i < Found::WORDS; ++i) {
            const std::uint32_t next = i + 1 < Found::WORDS || off ? words[i + 1] : 0u;
            found.word[i] = permuted(now, next, 0x3210 + 0x1111 * off);
            now = next;
        }
    } else {
#pragma unroll
        for (int i = 0; i < number; ++i) {
            if (column + i < copy.columns) found.put(i, load_one<SIZE>(from + SIZE * i));
        }
    }
    return found;
}

template <int SIZE, int number, bool WHOLE> __device__ __forceinline__ void store(const Copy &copy, const Elements<SIZE, number> &what, std::int64_t row, std::int64_t column) {
    std::uint8_t *to = copy.y + SIZE * (row * copy.y_columns + column);
    if (WHOLE || (copy.y_aligned && column + number <= copy.y_columns)) {
        store_whole<number * SIZE>(to, what.word);
        return;
    }
#pragma unroll
    for (int i = 0; i < number; ++i) {
        if (column + i < copy.y_columns) store_one<SIZE>(to + SIZE * i, what.code(i));
    }
}

// Elements per vector: 16 bytes of the wider type.
template <Element X, Element Y> constexpr int ELEMENTS = 16 / (size_of(X) > size_of(Y) ? size_of(X) : size_of(Y));

// Copy one or several vectors of y per thread, a grid stride apart. All loads are issued first.
template <Element X, Element Y, bool WHOLE, int number> __device__ __forceinline__ void copy_vectors(const Copy &copy, float scale, std::uint32_t first, std::uint32_t stride) {
    constexpr int EACH = ELEMENTS<X, Y>;
    Elements<size_of(X), EACH> found[number];
    std::int64_t row[number], column[number];
#pragma unroll
    for (int i = 0; i < number; ++i) {
        const std::uint32_t at = first + i * stride, line = copy.by_row(at), matrix = copy.by_matrix(line);
        const std::int64_t of = line - matrix * copy.y_rows;
        row[i] = line, column[i] = EACH * static_cast<std::int64_t>(at - line * copy.a_row);
        const bool inside = matrix < copy.batches && of < copy.rows && column[i] < copy.columns;
        found[i] = inside ? load<size_of(X), EACH, WHOLE>(copy, matrix, of, column[i]) : Elements<size_of(X), EACH>{};
    }
#pragma unroll
    for (int i = 0; i < number; ++i) {
        Elements<size_of(Y), EACH> out = {};
#pragma unroll
        for (int j = 0; j < EACH; ++j) out.put(j, converted<X, Y>(found[i].code(j), scale));
        store<size_of(Y), EACH, WHOLE>(copy, out, row[i], column[i]);
    }
}

template <Element X, Element Y, bool WHOLE> __global__ void __launch_bounds__(COPYING) copy_rows(Copy copy, std::uint32_t vectors) {
    constexpr int UNROLLED = WHOLE ? 4 : 1;
    const float scale = copy.scale ? *copy.scale : 1.0f;
    const std::uint32_t stride = gridDim.x * COPYING;
    std::uint32_t at = blockIdx.x * COPYING + threadIdx.x;
    for (; at + (UNROLLED - 1) * stride < vectors; at += UNROLLED * stride) copy_vectors<X, Y, WHOLE, UNROLLED>(copy, scale, at, stride);
    if constexpr (UNROLLED > 1) {
        for (; at < vectors; at += stride) copy_vectors<X, Y, WHOLE, 1>(copy, scale, at, stride);
    }
}

// Tile of a transposed copy: 256 threads each load 16 bytes from as many rows as fill a word of y.
// A tile always has 32 words of rows.
template <Element X, Element Y> struct Tile {
    static constexpr int EACH = 16 / size_of(X), PACKED = 4 / size_of(Y);
    static constexpr int ROWS = 32 * PACKED, COLUMNS = 8 * EACH, BYTES = 128 * COLUMNS;
};

// Transpose in registers: word i contains element i of each row that the thread loaded, converted.
// Four rows (bytes) are processed four elements at a time.
template <Element X, Element Y, int number, int rows> __device__ __forceinline__ void pack(const Elements<size_of(X), number> (&found)[rows], float scale, std::uint32_t (&word)[number]) {
    if constexpr (rows == 4) {
        static_assert(X == Y);
#pragma unroll
        for (int i = 0; i < number; i += 4) {
            const std::uint32_t row[4] = {found[0].word[i / 4], found[1].word[i / 4], found[2].word[i / 4], found[3].word[i / 4]};
            const std::uint32_t a = permuted(row[0], row[1], 0x5140), b = permuted(row[2], row[3], 0x5140);
            const std::uint32_t c = permuted(row[0], row[1], 0x7362), d = permuted(row[2], row[3], 0x7362);
            word[i] = permuted(a, b, 0x5410), word[i + 1] = permuted(a, b, 0x7632);
            word[i + 2] = permuted(c, d, 0x5410), word[i + 3] = permuted(c, d, 0x7632);
        }
    } else {
#pragma unroll
        for (int i = 0; i < number; ++i) {
            word[i] = converted<X, Y>(found[0].code(i), scale);
            if constexpr (rows == 2) word[i] = permuted(word[i], converted<X, Y>(found[1].code(i), scale), 0x5410);
        }
    }
}

template <Element X, Element Y, bool WHOLE> __global__ void __launch_bounds__(COPYING) copy_turned(Copy copy, std::uint32_t tiles) {
    using T = Tile<X, Y>;
    constexpr int OUT = 16 / size_of(Y); // elements of a row of y that a thread stores
    // [column][32 words of rows]. Swizzle: the word index of column c is XORed with 4 * (c / EACH).
    __shared__ __align__(16) std::uint32_t tile[T::BYTES / 4];
    const float scale = copy.scale ? *copy.scale : 1.0f;
    const std::uint32_t group = threadIdx.x / 8, eighth = threadIdx.x % 8;
    for (std::uint32_t at = blockIdx.x; at < tiles; at += gridDim.x) {
        const std::uint32_t matrix = copy.by_matrix(at), within = at - matrix * copy.by_matrix.by;
        const std::uint32_t down = copy.by_row(within), across = within - down * copy.a_row;
        const std::int64_t tile_row = T::ROWS * static_cast<std::int64_t>(down), tile_column = T::COLUMNS * static_cast<std::int64_t>(across);
        const std::int64_t row = tile_row + T::PACKED * group, column = tile_column + T::EACH * eighth;
        Elements<size_of(X), T::EACH> found[T::PACKED] = {};
#pragma unroll
        for (int i = 0; i < T::PACKED; ++i) {
            if (matrix < copy.batches && row + i < copy.rows && column < copy.columns) found[i] = load<size_of(X), T::EACH, WHOLE>(copy, matrix, row + i, column);
        }
        std::uint32_t word[T::EACH];
        pack<X, Y>(found, scale, word);
#pragma unroll
        for (int i = 0; i < T::EACH; ++i) tile[(T::EACH * eighth + i) * 32 + (group ^ 4 * eighth)] = word[i];
        __syncthreads();
#pragma unroll
        for (std::uint32_t mine = group; mine < T::COLUMNS; mine += 32) {
            Elements<size_of(Y), OUT> out;
            load_whole<16>(reinterpret_cast<const std::uint8_t *>(tile + mine * 32 + (4 * eighth ^ 4 * (mine / T::EACH))), out.word);
            const std::int64_t y_row = tile_column + mine, y_column = tile_row + OUT * eighth;
            if (y_row < copy.y_rows && y_column < copy.y_columns) store<size_of(Y), OUT, WHOLE>(copy, out, matrix * copy.y_rows + y_row, y_column);
        }
        __syncthreads();
    }
}

#endif

} // namespace qsync
