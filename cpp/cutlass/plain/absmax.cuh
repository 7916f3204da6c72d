// Absolute maximum of a matrix, of each row, or of each column, as a two-step reduction. Each
// threadblock or warp writes the maximum of its part to the workspace ([parts][groups] uint32); a
// second step reduces the parts. Without atomics, the workspace needs no initialization.
//
// Magnitudes are compared as integers: without the sign bit, the bit patterns of floats have the
// order of their values, with Inf above all numbers and NaN above Inf. So NaN and Inf need no extra
// test.
#pragma once

#include "plain/matrix.cuh"

namespace qsync {

constexpr int THREADS = 256, WARPS = THREADS / 32;

// Return the largest magnitude of eight elements, in the bits of the type, left-aligned for 16-bit
// types.
template <Type X> QSYNC_BOTH std::uint32_t magnitude(const Eight<X> &x) {
    std::uint32_t largest = 0;
    if constexpr (X == FLOAT32) {
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = maximum(largest, x.word[i] & 0x7FFFFFFFu);
    } else {
        // Comparing pairs as words yields the maximum of the upper halves; the lower halves are
        // compared separately.
        std::uint32_t lower = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const std::uint32_t pair = x.word[i] & 0x7FFF7FFFu;
            largest = maximum(largest, pair);
            lower = maximum(lower, pair << 16);
        }
        largest = maximum(largest & 0xFFFF0000u, lower);
    }
    return largest;
}

// Return the value of a magnitude.
template <Type X> QSYNC_BOTH float magnitude_value(std::uint32_t word) { return widened<X>(X == FLOAT32 ? word : word >> 16); }

#ifdef QSYNC_KERNELS

// Return the maximum over a warp, in all lanes.
__device__ __forceinline__ std::uint32_t maximum_of_warp(std::uint32_t word) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) word = maximum(word, __shfl_xor_sync(0xFFFFFFFFu, word, lane));
    return word;
}

// Return the maximum over a threadblock, in all threads. `shared` has WARPS words and may be reused
// after the next barrier.
__device__ __forceinline__ std::uint32_t maximum_of_block(std::uint32_t word, std::uint32_t *shared) {
    word = maximum_of_warp(word);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = word;
    __syncthreads();
    word = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) word = maximum(word, shared[warp]);
    return word;
}

// Write one maximum per threadblock: parts [gridDim.x].
template <Type X, bool WHOLE> __global__ void __launch_bounds__(THREADS) absmax_all(Matrix<X> x, std::uint32_t *parts) {
    constexpr int UNROLLED = !WHOLE ? 1 : X == FLOAT32 ? 4 : 8;
    __shared__ std::uint32_t shared[WARPS];
    std::uint32_t largest = 0;
    const std::uint32_t eighths = x.eighths(), stride = gridDim.x * THREADS;
    std::uint32_t at = blockIdx.x * THREADS + threadIdx.x;
    for (; at + (UNROLLED - 1) * stride < eighths; at += UNROLLED * stride) {
        Eight<X> found[UNROLLED];
#pragma unroll
        for (int i = 0; i < UNROLLED; ++i) found[i] = x.template load<WHOLE>(at + i * stride);
#pragma unroll
        for (int i = 0; i < UNROLLED; ++i) largest = maximum(largest, magnitude<X>(found[i]));
    }
    for (; at < eighths; at += stride) largest = maximum(largest, magnitude<X>(x.template load<WHOLE>(at)));
    largest = maximum_of_block(largest, shared);
    if (threadIdx.x == 0) parts[blockIdx.x] = largest;
}

// Write one maximum per row and part, computed by a warp: parts [parts_a_row][rows]. If a row has a
// single part, write its scale directly: scale [rows].
template <Type X, Format F>
__global__ void __launch_bounds__(THREADS) absmax_rows(Matrix<X> x, std::uint32_t *parts, float *scale, std::uint32_t parts_a_row) {
    const std::uint32_t warps = gridDim.x * WARPS, length = (x.row_eighths + parts_a_row - 1) / parts_a_row;
    const std::uint64_t tasks = static_cast<std::uint64_t>(x.rows) * parts_a_row;
    for (std::uint64_t task = blockIdx.x * WARPS + threadIdx.x / 32; task < tasks; task += warps) {
        const auto row = static_cast<std::uint32_t>(parts_a_row == 1 ? task : task / parts_a_row);
        const auto part = static_cast<std::uint32_t>(task - static_cast<std::uint64_t>(row) * parts_a_row);
        const std::uint32_t end = minimum((part + 1) * length, x.row_eighths);
        std::uint32_t largest = 0;
#pragma unroll 4
        for (std::uint32_t at = part * length + threadIdx.x % 32; at < end; at += 32) {
            largest = maximum(largest, magnitude<X>(x.template load<false>(row, 8 * static_cast<std::int64_t>(at))));
        }
        largest = maximum_of_warp(largest);
        if (threadIdx.x % 32 == 0) {
            if (parts_a_row == 1) {
                scale[row] = scale_of<F>(magnitude_value<X>(largest));
            } else {
                parts[static_cast<std::uint64_t>(part) * x.rows + row] = largest;
            }
        }
    }
}

// Write one maximum per column and part: parts [gridDim.y][columns], each part a range of rows. A
// threadblock covers 256 columns, and each of its warps every eighth row.
template <Type X> __global__ void __launch_bounds__(THREADS) absmax_columns(Matrix<X> x, std::uint32_t *parts) {
    __shared__ std::uint32_t shared[WARPS][8][33];
    const std::uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const std::uint32_t length = (x.rows + gridDim.y - 1) / gridDim.y;
    const std::int64_t column = blockIdx.x * std::int64_t{256} + 8 * lane;
    const std::uint32_t first = blockIdx.y * length, end = minimum(first + length, x.rows);
    std::uint32_t largest[8] = {};
    if (column < x.columns) {
#pragma unroll 4
        for (std::uint32_t row = first + warp; row < end; row += WARPS) {
            const Eight<X> found = x.template load<false>(row, column);
#pragma unroll
            for (int i = 0; i < 8; ++i) largest[i] = maximum(largest[i], found.bits_of(i));
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) shared[warp][i][lane] = largest[i];
    __syncthreads();
    const std::int64_t mine = blockIdx.x * std::int64_t{256} + threadIdx.x;
    std::uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) found = maximum(found, shared[i][threadIdx.x % 8][threadIdx.x / 8]);
    if (mine < x.columns) parts[static_cast<std::uint64_t>(blockIdx.y) * x.columns + mine] = found;
}

// Second step for rows and columns: reduce parts [number][groups] to scale [groups].
template <Type X, Format F>
__global__ void __launch_bounds__(THREADS) scales_of_parts(const std::uint32_t *parts, float *scale, std::uint32_t groups, std::uint32_t number) {
    const std::uint32_t group = blockIdx.x * THREADS + threadIdx.x;
    if (group >= groups) return;
    std::uint32_t largest = 0;
    for (std::uint32_t part = 0; part < number; ++part) largest = maximum(largest, parts[static_cast<std::uint64_t>(part) * groups + group]);
    scale[group] = scale_of<F>(magnitude_value<X>(largest));
}

// Second step for a single scale. Every threadblock of the next kernel performs it, which saves a
// kernel launch.
template <Type X, Format F> __device__ __forceinline__ float scale_of_parts(const std::uint32_t *parts, std::uint32_t number, std::uint32_t *shared) {
    std::uint32_t largest = 0;
    for (std::uint32_t part = threadIdx.x; part < number; part += THREADS) largest = maximum(largest, parts[part]);
    return scale_of<F>(magnitude_value<X>(maximum_of_block(largest, shared)));
}

// Write the scale 1 for groups without elements.
static __global__ void ones(float *scale, std::uint32_t groups) {
    const std::uint32_t group = blockIdx.x * THREADS + threadIdx.x;
    if (group < groups) scale[group] = 1.0f;
}

#endif

} // namespace qsync
