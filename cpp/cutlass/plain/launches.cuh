// Common code of the plain CUDA libraries: statuses, kernel launch, integer arithmetic of sizes.
#pragma once

#include <cstdint>

namespace qsync {

enum Status : int { OK, WRONG_TYPE, WRONG_SIZE, WRONG_POINTER, DEVICE_ERRORS = 1000 };

inline const char *status_text(int status) {
    switch (status) {
    case OK: return "no error";
    case WRONG_TYPE: return "a type, format, way to round or grouping that this library does not have";
    case WRONG_SIZE: return "sizes or strides out of range";
    case WRONG_POINTER: return "a pointer that is missing or not aligned to its elements";
    default: return status > DEVICE_ERRORS ? cudaGetErrorString(static_cast<cudaError_t>(status - DEVICE_ERRORS)) : "unknown status";
    }
}

#ifdef __CUDACC__
template <class... Parameters, class... Given>
int launch(void (*kernel)(Parameters...), dim3 grid, unsigned block, cudaStream_t stream, Given... given) {
    kernel<<<grid, block, 0, stream>>>(static_cast<Parameters>(given)...);
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? 0 : DEVICE_ERRORS + static_cast<int>(error);
}
#endif

inline bool multiple(const void *pointer, std::uintptr_t of) { return reinterpret_cast<std::uintptr_t>(pointer) % of == 0; }
inline std::int64_t ceiling(std::int64_t number, std::int64_t by) { return (number + by - 1) / by; }
inline std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t most(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

} // namespace qsync
