/* Part of the CUDA runtime that kernel libraries call, without a GPU. Launches are checked against
   a GPU's limits and recorded; none computes. Loaded before the libraries, under the runtime's name.

   Each call is a line: "launch NAME grid x y z block x y z shared BYTES cluster x y z stream
   NUMBER", "clear BYTES stream NUMBER", "map ...", or "wrong ..." for a call that the GPU rejects,
   or that synchronizes or allocates.

   Limits: CUDA C++ Programming Guide, technical specifications per compute capability; tensor maps:
   CUDA Driver API, tensor map objects. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <map>
#include <mutex>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Gpu {
    int major = 8, minor = 0, multiprocessors = 108, shared = 163 << 10;
} gpu;

struct Kernel {
    std::string name;
    int shared = 48 << 10;  // dynamic shared memory limit, unless raised
    bool wide_clusters = false;
};

std::mutex busy;
std::string lines;
std::map<const void *, Kernel> kernels;
std::size_t fat = 0;

struct Configuration {
    dim3 grid, block;
    std::size_t shared;
    void *stream;
};
thread_local Configuration pushed;

void say(const char *format, ...) {
    char text[1024];
    va_list rest;
    va_start(rest, format);
    vsnprintf(text, sizeof(text), format, rest);
    va_end(rest);
    std::lock_guard<std::mutex> const alone(busy);
    lines += text;
    lines += '\n';
}

void wrong(bool is, const char *what) {
    if (is) say("wrong %s", what);
}

Kernel &kernel_of(const void *function) {
    auto const found = kernels.find(function);
    if (found != kernels.end()) return found->second;
    say("wrong a launch of a function that is no kernel");
    return kernels[function];
}

cudaError_t launched(const void *function, dim3 grid, dim3 block, std::size_t shared, void *stream, dim3 cluster) {
    Kernel const &kernel = kernel_of(function);
    say("launch %.200s grid %u %u %u block %u %u %u shared %zu cluster %u %u %u stream %zu", kernel.name.c_str(), grid.x, grid.y, grid.z, block.x,
        block.y, block.z, shared, cluster.x, cluster.y, cluster.z, reinterpret_cast<std::size_t>(stream));
    std::uint64_t const threads = std::uint64_t(block.x) * block.y * block.z;
    std::uint64_t const blocks = std::uint64_t(cluster.x) * cluster.y * cluster.z;
    wrong(!grid.x || !grid.y || !grid.z || grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535, "grid");
    wrong(!threads || threads > 1024 || block.z > 64, "block");
    wrong(shared > std::size_t(gpu.shared), "shared memory beyond the GPU's");
    wrong(shared > std::size_t(kernel.shared), "shared memory beyond what the kernel has asked for");
    wrong(blocks > 1 && gpu.major < 9, "a cluster before Hopper");
    wrong(!blocks || blocks > (kernel.wide_clusters ? 16u : 8u), "size of a cluster");
    wrong(blocks && (grid.x % cluster.x || grid.y % cluster.y || grid.z % cluster.z), "a grid that is no multiple of its clusters");
    return cudaSuccess;
}

int bytes_of(CUtensorMapDataType type) {
    switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16: case CU_TENSOR_MAP_DATA_TYPE_FLOAT16: case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_INT64: case CU_TENSOR_MAP_DATA_TYPE_UINT64: case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
    default: return 4;
    }
}

int widest(CUtensorMapSwizzle swizzle) {
    return swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32 : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : 1 << 30;
}

void described(const char *kind, CUtensorMapDataType type, cuuint32_t rank, void *memory, const cuuint64_t *sizes, const cuuint64_t *strides,
               const cuuint32_t *steps, cuuint64_t inner, CUtensorMapSwizzle swizzle) {
    int const bytes = bytes_of(type);
    say("map %s rank %u inner %llu", kind, rank, static_cast<unsigned long long>(inner));
    wrong(gpu.major < 9, "a tensor map before Hopper");
    wrong(!memory || reinterpret_cast<std::uintptr_t>(memory) % 16, "address of a tensor map");
    wrong(rank < 1 || rank > 5, "rank of a tensor map");
    for (cuuint32_t i = 0; i < rank; ++i) {
        wrong(!sizes[i] || sizes[i] > (1ull << 32), "size of a tensor map");
        wrong(!steps[i] || steps[i] > 8, "step of a tensor map");
        wrong(i && (strides[i - 1] % 16 || strides[i - 1] >= (1ull << 40)), "stride of a tensor map");
    }
    wrong(inner * bytes % 16, "innermost size of a box is no multiple of 16 bytes");
    wrong(inner * bytes > std::uint64_t(widest(swizzle)), "innermost size of a box is wider than its swizzle");
}

CUresult CUDAAPI tiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *memory, const cuuint64_t *sizes, const cuuint64_t *strides,
                       const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                       CUtensorMapFloatOOBfill) {
    described("tiled", type, rank, memory, sizes, strides, steps, box[0], swizzle);
    for (cuuint32_t i = 0; i < rank; ++i) wrong(!box[i] || box[i] > 256, "box of a tensor map");
    wrong(reinterpret_cast<std::uintptr_t>(map) % 64, "a tensor map itself is not aligned");
    memset(map, 0, sizeof(*map));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI unfolded(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *memory, const cuuint64_t *sizes, const cuuint64_t *strides,
                          const int *lower, const int *upper, cuuint32_t channels, cuuint32_t pixels, const cuuint32_t *steps, CUtensorMapInterleave,
                          CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    described("im2col", type, rank, memory, sizes, strides, steps, channels, swizzle);
    wrong(rank < 3, "rank of a map of images");
    wrong(!channels || channels > 256 || !pixels || pixels > 1024, "channels or pixels of a map of images");
    int const reach = rank == 3 ? 32768 : rank == 4 ? 128 : 16;
    for (cuuint32_t i = 0; i + 2 < rank; ++i) {
        wrong(lower[i] < -reach || lower[i] >= reach || upper[i] < -reach || upper[i] >= reach, "corner of a map of images");
    }
    memset(map, 0, sizeof(*map));
    return CUDA_SUCCESS;
}

} // namespace

// Interface for tests.

EXPORT void stand_in_reset(int major, int minor, int multiprocessors, int shared) {
    gpu = {major, minor, multiprocessors, shared};
    std::lock_guard<std::mutex> const alone(busy);
    lines.clear();
}
EXPORT const char *stand_in_lines() { return lines.c_str(); }

// Functions that nvcc's code calls when a library is loaded, and at "<<<>>>".

EXPORT void **__cudaRegisterFatBinary(void *) { return reinterpret_cast<void **>(&fat); }
EXPORT void __cudaRegisterFatBinaryEnd(void **) {}
EXPORT void __cudaUnregisterFatBinary(void **) {}
EXPORT char __cudaInitModule(void **) { return 1; }
EXPORT void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
EXPORT void __cudaRegisterFunction(void **, const char *function, char *, const char *name, int, uint3 *, uint3 *, dim3 *, dim3 *, int *) {
    std::lock_guard<std::mutex> const alone(busy);
    kernels[function].name = name;
}
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    pushed = {grid, block, shared, stream};
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
    *static_cast<void **>(stream) = pushed.stream;
    return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void *>(function));
    return cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **, size_t shared, cudaStream_t stream) {
    return launched(reinterpret_cast<const void *>(kernel), grid, block, shared, stream, dim3(1, 1, 1));
}

// CUDA runtime API.

#undef cudaGetDeviceProperties
extern "C" {
__attribute__((visibility("default"))) cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **, size_t shared, cudaStream_t stream) {
    return launched(function, grid, block, shared, stream, dim3(1, 1, 1));
}
__attribute__((visibility("default"))) cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *given, const void *function, void **) {
    dim3 cluster(1, 1, 1);
    for (unsigned i = 0; i < given->numAttrs; ++i) {
        if (given->attrs[i].id == cudaLaunchAttributeClusterDimension) {
            auto const &size = given->attrs[i].val.clusterDim;
            cluster = dim3(size.x, size.y, size.z);
        }
    }
    return launched(function, given->gridDim, given->blockDim, given->dynamicSmemBytes, given->stream, cluster);
}
__attribute__((visibility("default"))) cudaError_t cudaFuncSetAttribute(const void *function, cudaFuncAttribute which, int value) {
    Kernel &kernel = kernel_of(function);
    if (which == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        kernel.shared = value;
        wrong(value > gpu.shared, "shared memory asked for beyond the GPU's");
    }
    if (which == cudaFuncAttributeNonPortableClusterSizeAllowed) kernel.wide_clusters = value != 0;
    return cudaSuccess;
}
__attribute__((visibility("default"))) cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    memset(found, 0, sizeof(*found));
    found->maxThreadsPerBlock = 1024, found->maxDynamicSharedSizeBytes = kernel_of(function).shared;
    return cudaSuccess;
}
__attribute__((visibility("default"))) cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
__attribute__((visibility("default"))) cudaError_t cudaSetDevice(int) { return cudaSuccess; }
__attribute__((visibility("default"))) cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
__attribute__((visibility("default"))) cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int) {
    switch (which) {
    case cudaDevAttrMultiProcessorCount: *value = gpu.multiprocessors; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = gpu.shared; break;
    case cudaDevAttrComputeCapabilityMajor: *value = gpu.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = gpu.minor; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: say("wrong an attribute that nobody here knows: %d", int(which)); *value = 0;
    }
    return cudaSuccess;
}
__attribute__((visibility("default"))) cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int) {
    memset(found, 0, sizeof(*found));
    found->major = gpu.major, found->minor = gpu.minor, found->multiProcessorCount = gpu.multiprocessors, found->sharedMemPerBlockOptin = gpu.shared;
    return cudaSuccess;
}
__attribute__((visibility("default"))) cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int threads, size_t shared, unsigned) {
    wrong(shared > size_t(gpu.shared) || threads > 1024, "occupancy of what does not fit");
    return *blocks = 1, cudaSuccess;
}
__attribute__((visibility("default"))) cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}
__attribute__((visibility("default"))) cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *, const cudaLaunchConfig_t *) {
    return *clusters = gpu.multiprocessors / 2, cudaSuccess;
}
__attribute__((visibility("default"))) cudaError_t cudaMemsetAsync(void *, int, size_t bytes, cudaStream_t stream) {
    say("clear %zu stream %zu", bytes, reinterpret_cast<size_t>(stream));
    return cudaSuccess;
}
__attribute__((visibility("default"))) cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult *found) {
    *function = !strcmp(name, "cuTensorMapEncodeTiled")    ? reinterpret_cast<void *>(tiled)
                : !strcmp(name, "cuTensorMapEncodeIm2col") ? reinterpret_cast<void *>(unfolded)
                                                           : nullptr;
    if (!*function) say("wrong a function of the driver that nobody here knows: %s", name);
    if (found) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
__attribute__((visibility("default"))) cudaError_t cudaGetLastError() { return cudaSuccess; }
__attribute__((visibility("default"))) cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
__attribute__((visibility("default"))) const char *cudaGetErrorString(cudaError_t) { return "an error"; }
__attribute__((visibility("default"))) const char *cudaGetErrorName(cudaError_t) { return "an error"; }
__attribute__((visibility("default"))) cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
// Calls that a launch path must not make.
__attribute__((visibility("default"))) cudaError_t cudaMalloc(void **pointer, size_t) { say("wrong cudaMalloc"); return *pointer = nullptr, cudaErrorMemoryAllocation; }
__attribute__((visibility("default"))) cudaError_t cudaFree(void *) { say("wrong cudaFree"); return cudaSuccess; }
__attribute__((visibility("default"))) cudaError_t cudaDeviceSynchronize() { say("wrong cudaDeviceSynchronize"); return cudaSuccess; }
__attribute__((visibility("default"))) cudaError_t cudaStreamSynchronize(cudaStream_t) { say("wrong cudaStreamSynchronize"); return cudaSuccess; }
__attribute__((visibility("default"))) cudaError_t cudaMemcpy(void *, const void *, size_t, cudaMemcpyKind) { say("wrong cudaMemcpy"); return cudaSuccess; }
__attribute__((visibility("default"))) cudaError_t cudaMemset(void *, int, size_t) { say("wrong cudaMemset"); return cudaSuccess; }
}
