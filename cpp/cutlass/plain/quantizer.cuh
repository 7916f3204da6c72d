// Quantization of a matrix to INT8 or FP8, with an optional transposed copy in the same pass.
//
// The kernels are memory-bound only if an element costs at most about twenty instructions;
// rounding.cuh explains the cost. Each thread issues all loads before it computes. The transposed
// copy goes through shared memory in words of four rows, whose positions avoid bank conflicts for
// both the word stores and the 16-byte loads of a warp.
#pragma once

#include "plain/absmax.cuh"
#include "plain/eighths.cuh"

namespace qsync {

#ifdef QSYNC_KERNELS

// Outputs of a quantization kernel. q: [rows, columns] bytes; qt: [columns, rows] bytes or null;
// both contiguous. scale: FP32 per tensor, row or column. seed: one int64 in device memory.
struct Outputs {
    std::uint8_t *q, *qt;
    float *scale;
    const std::int64_t *seed;
    // Partial maxima of a per-tensor scale (`number_of_parts` words), else null.
    const std::uint32_t *parts;
    std::uint32_t number_of_parts, stream;
    bool by_row, q_aligned, qt_aligned;

    template <Rounding R> __device__ __forceinline__ Random random() const {
        if constexpr (R != STOCHASTIC) return {0, 0, 0};
        const auto key = static_cast<std::uint64_t>(*seed);
        return {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32), stream};
    }

    // Store eight bytes at linear index `place`, or the `left` bytes up to the end of the row.
    template <bool WHOLE> __device__ __forceinline__ void store(const std::uint32_t (&bytes)[2], std::int64_t place, std::int64_t left) const {
        std::uint8_t *to = q + place;
        if (WHOLE || (q_aligned && left >= 8)) {
            *reinterpret_cast<uint2 *>(to) = make_uint2(bytes[0], bytes[1]);
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < left) to[i] = static_cast<std::uint8_t>(bytes[i / 4] >> 8 * (i % 4));
        }
    }
};

// Return the per-tensor scale, which one threadblock also writes to memory. Return 1 if there are
// several scales.
template <Type X, Format F> __device__ __forceinline__ float whole_scale(const Outputs &to, std::uint32_t *shared) {
    if (!to.parts) return 1.0f;
    const float scale = scale_of_parts<X, F>(to.parts, to.number_of_parts, shared);
    if (blockIdx.x == 0 && threadIdx.x == 0) *to.scale = scale;
    return scale;
}

// Kernels that need more registers than others, so fewer threadblocks fit on a multiprocessor.
// Kernels that are not performance-critical have no register limit, since a library with register
// spills is rejected.
template <Type X, Format F, Rounding R> constexpr bool WIDE = X == FLOAT16 || (F != INT8 && R == STOCHASTIC);

// Quantize several vectors of eight elements, a grid stride apart. All loads are issued first.
template <bool WHOLE, int number, Type X, Format F, Rounding R>
__device__ __forceinline__ void round_eighths(const Matrix<X> &x, const Outputs &to, const Rounder<X, F, R> &round, OneDivisor<R> by, std::uint32_t first, std::uint32_t stride) {
    Eight<X> found[number];
    std::int64_t column[number], places[number];
    std::uint32_t row[number];
#pragma unroll
    for (int i = 0; i < number; ++i) {
        const std::uint32_t at = first + i * stride;
        found[i] = x.template load<WHOLE>(at);
        row[i] = WHOLE && !to.by_row ? 0 : x.by_row(at);
        column[i] = 8 * static_cast<std::int64_t>(at - row[i] * x.row_eighths);
        // For whole eighths, the vector number determines the linear index independently of the
        // row.
        places[i] = WHOLE ? 8 * static_cast<std::int64_t>(at) : row[i] * x.columns + column[i];
    }
    Words words[number] = {};
    round.template draw<WHOLE>(places, words);
#pragma unroll
    for (int i = 0; i < number; ++i) {
        if (to.by_row) by = OneDivisor<R>(to.scale[row[i]]);
        std::uint32_t bytes[2];
        round(found[i], by, words[i], bytes);
        to.template store<WHOLE>(bytes, places[i], x.columns - column[i]);
    }
}

// Quantize without a transposed copy, with one scale per tensor or per row.
template <Type X, Format F, Rounding R, bool WHOLE> __global__ void __launch_bounds__(THREADS, !WHOLE ? 1 : WIDE<X, F, R> ? 3 : 4) round_rows(Matrix<X> x, Outputs to) {
    constexpr int UNROLLED = !WHOLE ? 1 : X == FLOAT32 ? 2 : 4;
    __shared__ std::uint32_t shared[WARPS];
    const Rounder<X, F, R> round{to.random<R>(), x.columns};
    const OneDivisor<R> by(whole_scale<X, F>(to, shared));
    const std::uint32_t eighths = x.eighths(), stride = gridDim.x * THREADS;
    std::uint32_t at = blockIdx.x * THREADS + threadIdx.x;
    for (; at + (UNROLLED - 1) * stride < eighths; at += UNROLLED * stride) round_eighths<WHOLE, UNROLLED>(x, to, round, by, at, stride);
    if constexpr (UNROLLED > 1) {
        for (; at < eighths; at += stride) round_eighths<WHOLE, 1>(x, to, round, by, at, stride);
    }
}

constexpr int TILE = 128;

// Transpose a 4 x 4 block of bytes: from one word per row to one word per column.
__device__ __forceinline__ void transpose(const std::uint32_t (&row)[4], std::uint32_t (&column)[4]) {
    const std::uint32_t a = permuted(row[0], row[1], 0x5140), b = permuted(row[2], row[3], 0x5140);
    const std::uint32_t c = permuted(row[0], row[1], 0x7362), d = permuted(row[2], row[3], 0x7362);
    column[0] = permuted(a, b, 0x5410), column[1] = permuted(a, b, 0x7632);
    column[2] = permuted(c, d, 0x5410), column[3] = permuted(c, d, 0x7632);
}

// Quantize tiles of 128 x 128. A thread processes eight columns of four rows, twice; a warp covers
// sixteen times eight columns of twice four rows.
template <Type X, Format F, Rounding R, bool TRANSPOSED, bool BY_COLUMN, bool WHOLE>
__global__ void __launch_bounds__(THREADS, BY_COLUMN || !WHOLE ? 1 : X == FLOAT32 || WIDE<X, F, R> ? 2 : 3) round_tiles(Matrix<X> x, Outputs to, std::uint32_t tiles_a_row, std::uint64_t tiles) {
    // [column][four rows]. Swizzle: the word index of column c is XORed with 2 * (c / 8).
    __shared__ __align__(16) std::uint32_t tile[TRANSPOSED ? TILE * TILE / 4 : 4];
    __shared__ std::uint32_t shared[WARPS];
    const Rounder<X, F, R> round{to.random<R>(), x.columns};
    const OneDivisor<R> one(whole_scale<X, F>(to, shared));
    const std::uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, eighth = lane % 16;
    for (std::uint64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
        const std::int64_t tile_row = static_cast<std::int64_t>(index / tiles_a_row) * TILE;
        const std::int64_t tile_column = static_cast<std::int64_t>(index % tiles_a_row) * TILE, column = tile_column + 8 * eighth;
        std::conditional_t<BY_COLUMN, EightDivisors<R>, OneDivisor<R>> by;
        if constexpr (BY_COLUMN) {
            by = EightDivisors<R>(to.scale, column, x.columns);
        } else {
            by = one;
        }
#pragma unroll 1
        for (std::uint32_t half = 0; half < 2; ++half) {
            const std::uint32_t quad = half * 16 + warp * 2 + lane / 16; // of rows
            const std::int64_t first = tile_row + 4 * quad;
            Eight<X> found[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (first + i < x.rows && column < x.columns) found[i] = x.template load<WHOLE>(static_cast<std::uint32_t>(first + i), column);
            }
            // Draw two rows at a time: registers do not suffice for the random numbers of four.
            constexpr int DRAWN = 2;
            std::uint32_t left[4], right[4];
#pragma unroll
            for (int start = 0; start < 4; start += DRAWN) {
                std::int64_t places[DRAWN];
                Words words[DRAWN] = {};
#pragma unroll
                for (int i = 0; i < DRAWN; ++i) places[i] = (first + start + i) * x.columns + column;
                round.template draw<WHOLE>(places, words);
#pragma unroll
                for (int i = 0; i < DRAWN; ++i) {
                    const std::int64_t row = first + start + i;
                    const bool inside = row < x.rows && column < x.columns;
                    if constexpr (!BY_COLUMN) {
                        if (to.by_row && inside) by = OneDivisor<R>(to.scale[row]);
                    }
                    std::uint32_t bytes[2];
                    round(found[start + i], by, words[i], bytes);
                    if (inside) to.template store<WHOLE>(bytes, places[i], x.columns - column);
                    left[start + i] = bytes[0], right[start + i] = bytes[1];
                }
            }
            if constexpr (TRANSPOSED) {
                std::uint32_t columns[2][4];
                transpose(left, columns[0]);
                transpose(right, columns[1]);
#pragma unroll
                for (int i = 0; i < 8; ++i) tile[(8 * eighth + i) * (TILE / 4) + (quad ^ 2 * eighth)] = columns[i / 4][i % 4];
            }
        }
        if constexpr (TRANSPOSED) {
            __syncthreads();
#pragma unroll
            for (std::uint32_t step = 0; step < 4; ++step) {
                const std::uint32_t mine = step * 32 + threadIdx.x / 8, unit = threadIdx.x % 8, moved = 2 * (mine / 8);
                uint4 bytes = *reinterpret_cast<const uint4 *>(tile + mine * (TILE / 4) + (4 * unit ^ (moved & 28)));
                if (moved & 2) bytes = make_uint4(bytes.z, bytes.w, bytes.x, bytes.y);
                const std::int64_t row = tile_row + 16 * unit;
                if (tile_column + mine >= x.columns || row >= x.rows) continue;
                std::uint8_t *at = to.qt + (tile_column + mine) * static_cast<std::int64_t>(x.rows) + row;
                if (to.qt_aligned) {
                    *reinterpret_cast<uint4 *>(at) = bytes;
                    continue;
                }
                const std::uint32_t word[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    if (row + i < x.rows) at[i] = static_cast<std::uint8_t>(word[i / 4] >> 8 * (i % 4));
                }
            }
            __syncthreads();
        }
    }
}

#endif

} // namespace qsync
