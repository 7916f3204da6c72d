// Loading and launching of embedded machine code through the CUDA driver API.
//
// The CUDA runtime is not used: the runtime of CUDA 13 rejects code for sm_70 in the form that nvcc
// embeds, and one library must work with any runtime version that torch ships. libcuda is opened at
// the first run, so that this library can be loaded, and its kernel's resource requirements
// queried, on a machine without a driver.
//
// Invariant: code is loaded once per device into the primary context, which the CUDA runtime and
// torch share, and is never unloaded. Calls are thread-safe. A call restores the current context of
// the thread.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>

#include <cuda.h>
#include <dlfcn.h>

#include "cutlass/cutlass.h"

// QSYNC_CODE is the path of the machine code, relative to the working directory of the compiler.
__asm__(".section .rodata\n"
        ".hidden qsync_code\n"
        ".balign 64\n"
        "qsync_code:\n"
        ".incbin \"" QSYNC_CODE "\"\n"
        ".byte 0\n"
        ".previous\n");
extern "C" __attribute__((visibility("hidden"))) unsigned char const qsync_code[];

namespace qsync {

// Statuses below are CUTLASS statuses; statuses above DRIVER_ERRORS are driver errors.
enum DriverStatus : int { NO_DRIVER = 900, DRIVER_ERRORS = 1000 };

#define QSYNC_DRIVER_FUNCTIONS(X)                                                                                      \
    X(cuInit) X(cuDeviceGet) X(cuDeviceGetAttribute) X(cuDevicePrimaryCtxRetain) X(cuCtxPushCurrent) X(cuCtxPopCurrent) \
    X(cuModuleLoadData) X(cuModuleGetFunction) X(cuFuncSetAttribute) X(cuOccupancyMaxActiveBlocksPerMultiprocessor)    \
    X(cuLaunchKernel) X(cuMemsetD8Async) X(cuGetErrorString)

struct Driver {
    bool found = true;
// cuda.h defines some of these names as macros for the symbol version that its types match, so they
// are expanded before they become strings.
#define QSYNC_TEXT(name) #name
#define QSYNC_MEMBER(name) decltype(&::name) f_##name = find<decltype(&::name)>(QSYNC_TEXT(name));
#define QSYNC_NAMED(name) QSYNC_MEMBER(name)
    void *const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    QSYNC_DRIVER_FUNCTIONS(QSYNC_NAMED)

    template <class Function>
    Function find(char const *name) {
        void *const function = library == nullptr ? nullptr : dlsym(library, name);
        found = found && function != nullptr;
        return reinterpret_cast<Function>(function);
    }
};

inline Driver const &driver() {
    static Driver const one;
    return one;
}

#define QSYNC_JOINED(name) f_##name
#define QSYNC_FUNCTION(name) QSYNC_JOINED(name)
#define QSYNC_CALL(name) qsync::driver().QSYNC_FUNCTION(name)

inline int driver_status(CUresult result) { return result == CUDA_SUCCESS ? 0 : DRIVER_ERRORS + static_cast<int>(result); }

inline char const *driver_text(int status) {
    if (status < NO_DRIVER) {
        return cutlass::cutlassGetStatusString(static_cast<cutlass::Status>(status));
    }
    char const *text = nullptr;
    if (status > DRIVER_ERRORS && driver().found) {
        QSYNC_CALL(cuGetErrorString)(static_cast<CUresult>(status - DRIVER_ERRORS), &text);
    }
    if (text != nullptr) {
        return text;
    }
    return status == NO_DRIVER ? "there is no CUDA driver here (libcuda.so.1)" : "unknown status";
}

// Makes a context current for the calling thread during the lifetime of this object.
struct Current {
    int const status;
    explicit Current(CUcontext context) : status(driver_status(QSYNC_CALL(cuCtxPushCurrent)(context))) {}
    ~Current() {
        CUcontext dropped;
        if (status == 0) {
            QSYNC_CALL(cuCtxPopCurrent)(&dropped);
        }
    }
    Current(Current const &) = delete;
};

// A kernel loaded on one device, the number of multiprocessors, and the number of resident
// threadblocks per multiprocessor.
struct Loaded {
    CUcontext context = nullptr;
    CUfunction kernel = nullptr;
    int multiprocessors = 1, resident = 1;
};

// Load the kernel on device `number` and query its occupancy. Return a status.
inline int loaded_anew(int number, int threads, int shared, Loaded &made) {
    CUdevice device;
    CUmodule module;
    CUresult result = QSYNC_CALL(cuInit)(0);
    if (result == CUDA_SUCCESS) result = QSYNC_CALL(cuDeviceGet)(&device, number);
    if (result == CUDA_SUCCESS) result = QSYNC_CALL(cuDeviceGetAttribute)(&made.multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    if (result == CUDA_SUCCESS) result = QSYNC_CALL(cuDevicePrimaryCtxRetain)(&made.context, device);
    if (result != CUDA_SUCCESS) {
        return driver_status(result);
    }
    Current const current(made.context);
    if (current.status != 0) {
        return current.status;
    }
    result = QSYNC_CALL(cuModuleLoadData)(&module, qsync_code);
    if (result == CUDA_SUCCESS) result = QSYNC_CALL(cuModuleGetFunction)(&made.kernel, module, "qsync_kernel");
    if (result == CUDA_SUCCESS && shared >= 48 << 10) {
        result = QSYNC_CALL(cuFuncSetAttribute)(made.kernel, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared);
    }
    if (result == CUDA_SUCCESS) {
        result = QSYNC_CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor)(&made.resident, made.kernel, threads, static_cast<std::size_t>(shared));
    }
    return driver_status(result);
}

// Return the kernel on `device` through `found`, loading it at the first call.
inline int load(int device, int threads, int shared, Loaded &found) {
    static std::mutex busy;
    static std::map<int, Loaded> known;
    if (!driver().found) {
        return NO_DRIVER;
    }
    std::lock_guard<std::mutex> const alone(busy);
    auto const at = known.find(device);
    if (at != known.end()) {
        found = at->second;
        return 0;
    }
    Loaded made;
    int const status = loaded_anew(device, threads, shared, made);
    if (status == 0) {
        found = known[device] = made;
    }
    return status;
}

inline int launch(Loaded const &loaded, dim3 grid, int threads, int shared, cudaStream_t stream, void *parameters) {
    void *given[] = {parameters};
    return driver_status(QSYNC_CALL(cuLaunchKernel)(
        loaded.kernel, grid.x, grid.y, grid.z, static_cast<unsigned>(threads), 1, 1, static_cast<unsigned>(shared), stream, given, nullptr));
}

} // namespace qsync

// CUTLASS clears workspaces with this function of the CUDA runtime, which is not linked.
extern "C" __attribute__((visibility("hidden"))) inline cudaError_t cudaMemsetAsync(void *pointer, int value, std::size_t bytes, cudaStream_t stream) {
    CUresult const result =
        QSYNC_CALL(cuMemsetD8Async)(reinterpret_cast<CUdeviceptr>(pointer), static_cast<unsigned char>(value), bytes, stream);
    // Where both APIs define an error, its number is the same.
    return static_cast<cudaError_t>(result);
}
