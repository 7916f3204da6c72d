// Copies of matrices: turned, filled up with zeros, converted, in one pass over memory.
//
// A copy is bound by memory as long as each thread moves 16 bytes at a time on both sides. Turned ones go through shared memory: a thread
// packs what becomes neighbours into words, which are placed so that neither the words written nor the sixteen bytes read of a warp meet in
// a bank. Kernels are compiled apart for the case that all is aligned; else words are read and shifted, and the rest goes one by one.
#pragma once

#include "plain/matrix.cuh"

namespace qsync {

// What a matrix is made of. BITS*: whatever has that many bits, copied as it is. The numbers are those of
// backend/cuda/codegen.py.
enum class Element : int { BITS8, BITS16, BITS32, INT8, E4M3, E5M2, FLOAT16, BFLOAT16, FLOAT32 };

constexpr int size_of(Element x) {
    if (x == Element::BITS32 || x == Element::FLOAT32) return 4;
    return x == Element::BITS16 || x == Element::FLOAT16 || x == Element::BFLOAT16 ? 2 : 1;
}

template <Element X> QSYNC_BOTH float number(std::uint32_t code) {
    if constexpr (X == Element::INT8) return static_cast<float>(static_cast<std::int8_t>(code));
    if constexpr (X == Element::FLOAT16) return widened<FLOAT16>(code);
    if constexpr (X == Element::BFLOAT16) return widened<BFLOAT16>(code);
    // The high half of an FP16 number; and one whose exponent counts from eight less, without infinities.
    if constexpr (X == Element::E5M2) return widened<FLOAT16>(code << 8);
    if constexpr (X == Element::E4M3) {
        const float value = multiply(widened<FLOAT16>((code & 0x80u) << 8 | (code & 0x7Fu) << 7), 256.0f);
        return (code & 0x7Fu) == 0x7Fu ? as_float(0x7FC00000u) : value;
    }
    return as_float(code);
}

// To the nearest, ties to even; what is too large becomes infinite.
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

// Some elements of `SIZE` bytes as they lie in memory.
template <int SIZE, int number> struct Elements {
    static constexpr int WORDS = number * SIZE / 4;
    static constexpr std::uint32_t MASK = SIZE == 4 ? 0xFFFFFFFFu : (1u << 8 * (SIZE % 4)) - 1u;

    std::uint32_t word[WORDS];

    QSYNC_BOTH std::uint32_t code(int i) const { return word[i * SIZE / 4] >> 8 * (i * SIZE % 4) & MASK; }
    QSYNC_BOTH void put(int i, std::uint32_t code) { word[i * SIZE / 4] |= code << 8 * (i * SIZE % 4); }
};

// `batches` matrices [rows, columns], with `stride` elements between rows and `batch_stride` between matrices, to as many or more
// that are as large or larger, without gaps: [y_rows, y_columns], of turned ones the columns first.
struct Copy {
    const std::uint8_t *x;
    std::uint8_t *y;
    const float *scale; // null: 1
    std::int64_t batches, rows, columns, stride, batch_stride, y_rows, y_columns;
    std::uint32_t a_row;        // tiles, or vectors, of a row of y
    Division by_row, by_matrix; // tiles of a row and of a matrix; vectors of a row, rows of a matrix
    bool x_aligned, y_aligned;  // to what a thread moves at a time
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

// Elements from a column on; zeros beyond the end of the row.
template <int SIZE, int number, bool WHOLE> __device__ __forceinline__ Elements<SIZE, number> load(const Copy &copy, std::int64_t matrix, std::int64_t row, std::int64_t column) {
    using Found = Elements<SIZE, number>;
    Found found = {};
    const std::uint8_t *from = copy.x + SIZE * (matrix * copy.batch_stride + row * copy.stride + column);
    if (WHOLE || (copy.x_aligned && column + number <= copy.columns)) {
        load_whole<number * SIZE>(from, found.word);
    } else if (column + number + 4 / SIZE - 1 <= copy.columns) {
        // Words that hold at least one byte of these, and nothing from beyond the row's end.
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

// A vector of y for each thread, or several, a stride of the grid apart: all loads first.
template <Element X, Element Y> constexpr int ELEMENTS = 16 / (size_of(X) > size_of(Y) ? size_of(X) : size_of(Y));

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

// A tile: what 256 threads load with 16 bytes of a row each, of as many rows as make a word of y. All tiles have 32 words of rows.
template <Element X, Element Y> struct Tile {
    static constexpr int EACH = 16 / size_of(X), PACKED = 4 / size_of(Y);
    static constexpr int ROWS = 32 * PACKED, COLUMNS = 8 * EACH, BYTES = 128 * COLUMNS;
};

// Element i of the rows that a thread has, beside each other in a word; of four rows four at a time, as they are bytes.
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
    // [column][32 words of rows], the words of column c at their place with 4 * (c / EACH) added bit by bit.
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
