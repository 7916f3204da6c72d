/* CUDA's driver as far as a library for sm_70 calls it: two devices that write down what is asked of them, and compute nothing.
   What is launched is written with the bytes that it is given, so a test sees what a device would. */
#include <cuda.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern "C" {

static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;
static thread_local CUcontext stack[8];
static thread_local int depth = 0;

static void say(const char *format, ...) {
    va_list rest;
    pthread_mutex_lock(&busy);
    FILE *file = fopen(getenv("DRIVER_LOG"), "a");
    va_start(rest, format);
    vfprintf(file, format, rest);
    va_end(rest);
    fclose(file);
    pthread_mutex_unlock(&busy);
}

static int current(void) { return depth ? (int)((size_t)stack[depth - 1] - 100) : -1; }

CUresult cuInit(unsigned flags) { (void)flags; return getenv("DRIVER_BROKEN") ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) {
    *device = number;
    return number < 2 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
    (void)device;
    *value = which == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? 80 : -1;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)(size_t)(100 + device);
    return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) { stack[depth++] = context; return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
    *context = stack[--depth];
    say("pop to %d\n", current());
    return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    say("load %d elf=%d\n", current(), memcmp(image, "\177ELF", 4) == 0);
    *module = (CUmodule)(size_t)(200 + current());
    return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)((size_t)module + 100);
    return strcmp(name, "qsync_kernel") ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
    say("attribute %d %d %d\n", (int)(size_t)function - 300, which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, value);
    return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
    (void)function, (void)threads, (void)shared;
    *blocks = 2;
    return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t bytes, CUstream stream) {
    say("clear %d %llu %d %zu %zu\n", current(), (unsigned long long)at, value, bytes, (size_t)stream);
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(
    CUfunction function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream stream, void **parameters,
    void **extra) {
    /* CUTLASS's parameters start with the sizes of the problem. */
    const int *sizes = static_cast<const int *>(parameters[0]);
    say("launch %d in %d grid %u %u %u block %u %u %u shared %u stream %zu sizes %d %d %d extra %d\n", (int)(size_t)function - 300, current(), x, y, z,
        bx, by, bz, shared, (size_t)stream, sizes[0], sizes[1], sizes[2], extra != NULL);
    return getenv("DRIVER_FULL") ? CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES : CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES ? "too many resources" : error == CUDA_ERROR_INVALID_DEVICE ? "no such device" : "not initialized";
    return CUDA_SUCCESS;
}

} // extern "C"
