// Hopper's tensor memory accelerator on the CPU: copies of tensor boxes to and from shared memory,
// with swizzles, zeros out of bounds, multicast, and im2col. Sources: PTX ISA 5.5 (tensors), and
// the driver's documentation of tensor maps.
#pragma once

#include <cuda.h>

namespace on_cpu {

struct TensorMap {
    unsigned char *memory;
    int rank, bytes, swizzle;
    bool im2col;
    std::int64_t sizes[5], strides[5]; // strides in bytes
    int box[5], steps[5];
    int lower[3], upper[3], channels, pixels;
};

static std::vector<TensorMap> maps;

inline int bytes_of(CUtensorMapDataType type) {
    switch (type) {
        case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
        case CU_TENSOR_MAP_DATA_TYPE_UINT16:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
        case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
        case CU_TENSOR_MAP_DATA_TYPE_UINT32:
        case CU_TENSOR_MAP_DATA_TYPE_INT32:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ:
        case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32: return 4;
        default: fail("a type that no tensor here has");
    }
}

inline TensorMap described(
    CUtensorMapDataType type, cuuint32_t rank, void *memory, cuuint64_t const *sizes, cuuint64_t const *strides, cuuint32_t const *steps,
    CUtensorMapSwizzle swizzle) {
    TensorMap made{};
    made.memory = static_cast<unsigned char *>(memory);
    made.rank = static_cast<int>(rank);
    made.bytes = bytes_of(type);
    switch (swizzle) {
        case CU_TENSOR_MAP_SWIZZLE_NONE: made.swizzle = 0; break;
        case CU_TENSOR_MAP_SWIZZLE_32B: made.swizzle = 1; break;
        case CU_TENSOR_MAP_SWIZZLE_64B: made.swizzle = 2; break;
        case CU_TENSOR_MAP_SWIZZLE_128B: made.swizzle = 3; break;
        default: fail("a swizzle that Hopper has not");
    }
    if (reinterpret_cast<std::uintptr_t>(memory) % 16 != 0) fail("TMA takes addresses of 16 bytes");
    for (int i = 0; i < made.rank; ++i) {
        made.sizes[i] = static_cast<std::int64_t>(sizes[i]);
        made.strides[i] = i == 0 ? made.bytes : static_cast<std::int64_t>(strides[i - 1]);
        made.steps[i] = static_cast<int>(steps[i]);
        if (i > 0 && made.strides[i] % 16 != 0) fail("TMA takes strides of 16 bytes");
        if (sizes[i] == 0 || sizes[i] > (1ull << 32)) fail("TMA takes sizes from 1 to 2^32");
    }
    return made;
}

inline CUresult stored(CUtensorMap *map, TensorMap const &made) {
    std::memset(static_cast<void *>(map), 0, sizeof(*map));
    std::size_t const index = maps.size();
    std::memcpy(static_cast<void *>(map), &index, sizeof(index));
    maps.push_back(made);
    return CUDA_SUCCESS;
}

inline TensorMap const &map_at(std::uint64_t descriptor) {
    std::size_t index;
    std::memcpy(&index, reinterpret_cast<void const *>(descriptor), sizeof(index));
    return maps.at(index);
}

// Permute the 16-byte units of a row of 2^(4 + bits) bytes by the address bits from 7 on.
inline std::uint32_t swizzled(std::uint32_t address, int bits) { return address ^ ((address >> 7 & ((1u << bits) - 1)) << 4); }

// Null if out of bounds.
inline unsigned char *element(TensorMap const &map, std::int64_t const *at) {
    unsigned char *memory = map.memory;
    for (int i = 0; i < map.rank; ++i) {
        if (at[i] < 0 || at[i] >= map.sizes[i]) return nullptr;
        memory += at[i] * map.strides[i];
    }
    return memory;
}

// Calls `each(element in memory or null, its address in shared memory)` for a box at `start`.
template <class Each>
std::uint32_t each_of_box(TensorMap const &map, std::uint32_t shared, std::int64_t const *start, Each each) {
    int count = 1;
    for (int i = 0; i < map.rank; ++i) count *= map.box[i];
    for (int n = 0; n < count; ++n) {
        std::int64_t where[5];
        for (int i = 0, rest = n; i < map.rank; rest /= map.box[i], ++i) {
            where[i] = start[i] + std::int64_t(rest % map.box[i]) * map.steps[i];
        }
        each(element(map, where), swizzled(shared + static_cast<std::uint32_t>(n * map.bytes), map.swizzle));
    }
    return static_cast<std::uint32_t>(count * map.bytes);
}

// Visits `channels` channels of `pixels` pixels, ordered by w, then h, then n, within the bounding
// box (PTX ISA 5.5.4).
template <class Each>
std::uint32_t each_of_pixels(
    TensorMap const &map, std::uint32_t shared, std::int64_t const *start, std::vector<int> const &offsets, Each each) {
    int const spatial = map.rank - 2;
    std::int64_t at[5];
    std::copy(start, start + map.rank, at);
    int n = 0;
    for (int pixel = 0; pixel < map.pixels; ++pixel) {
        std::int64_t where[5];
        std::copy(at, at + map.rank, where);
        for (int i = 0; i < spatial; ++i) where[1 + i] += offsets[i];
        for (int channel = 0; channel < map.channels; ++channel, ++n) {
            where[0] = at[0] + channel;
            each(element(map, where), swizzled(shared + static_cast<std::uint32_t>(n * map.bytes), map.swizzle));
        }
        for (int i = 0; i < spatial; ++i) {
            at[1 + i] += map.steps[1 + i];
            if (at[1 + i] < map.sizes[1 + i] + map.upper[i]) break;
            at[1 + i] = map.lower[i];
            if (i + 1 == spatial) ++at[1 + spatial];
        }
    }
    return static_cast<std::uint32_t>(n * map.bytes);
}

inline void tma_load(
    std::uint32_t shared, std::uint64_t descriptor, std::uint32_t barrier, std::vector<int> coordinates, std::vector<int> const &offsets,
    std::uint32_t mask) {
    TensorMap const &map = map_at(descriptor);
    if (static_cast<int>(coordinates.size()) != map.rank) fail("a load with coordinates of another rank than its tensor has");
    if (map.im2col != !offsets.empty()) fail("a load that unfolds, of a tensor that does not, or the other way round");
    if (shared % 128 != 0) fail("TMA writes at addresses of 128 bytes");
    std::int64_t start[5];
    std::copy(coordinates.begin(), coordinates.end(), start);
    unsigned const own = special.cluster_ctarank;
    for (unsigned rank = 0; rank < cluster_size; ++rank) {
        if (!(mask ? mask >> rank & 1 : rank == own)) continue;
        auto const load = [&](unsigned char const *from, std::uint32_t to) {
            unsigned char *target = pointer(to, map.bytes);
            if (from) std::memcpy(target, from, map.bytes);
            else std::memset(target, 0, map.bytes);
        };
        std::uint32_t const target = mapa(shared, rank);
        std::uint32_t const bytes = map.im2col ? each_of_pixels(map, target, start, offsets, load) : each_of_box(map, target, start, load);
        barrier_complete(mapa(barrier, rank), bytes);
    }
}

inline void tma_store(std::uint64_t descriptor, std::uint32_t shared, std::vector<int> coordinates) {
    TensorMap const &map = map_at(descriptor);
    if (static_cast<int>(coordinates.size()) != map.rank) fail("a store with coordinates of another rank than its tensor has");
    std::int64_t start[5];
    std::copy(coordinates.begin(), coordinates.end(), start);
    auto const store = [&](unsigned char *to, std::uint32_t from) {
        if (to) std::memcpy(to, pointer(from, map.bytes), map.bytes);
    };
    if (map.im2col) {
        each_of_pixels(map, shared, start, {0, 0, 0}, store);
    } else {
        each_of_box(map, shared, start, store);
    }
}

} // namespace on_cpu

extern "C" inline CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *memory, cuuint64_t const *sizes, cuuint64_t const *strides,
    cuuint32_t const *box, cuuint32_t const *steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
    CUtensorMapFloatOOBfill) {
    on_cpu::TensorMap made = on_cpu::described(type, rank, memory, sizes, strides, steps, swizzle);
    for (cuuint32_t i = 0; i < rank; ++i) {
        if (box[i] == 0 || box[i] > 256) on_cpu::fail("TMA takes boxes from 1 to 256");
        made.box[i] = static_cast<int>(box[i]);
    }
    return on_cpu::stored(map, made);
}

extern "C" inline CUresult cuTensorMapEncodeIm2col(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *memory, cuuint64_t const *sizes, cuuint64_t const *strides,
    int const *lower, int const *upper, cuuint32_t channels, cuuint32_t pixels, cuuint32_t const *steps, CUtensorMapInterleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    on_cpu::TensorMap made = on_cpu::described(type, rank, memory, sizes, strides, steps, swizzle);
    made.im2col = true;
    made.channels = static_cast<int>(channels);
    made.pixels = static_cast<int>(pixels);
    std::copy(lower, lower + rank - 2, made.lower);
    std::copy(upper, upper + rank - 2, made.upper);
    return on_cpu::stored(map, made);
}
