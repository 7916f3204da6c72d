// CPU replacement of CUTLASS's header of this name: loads and stores with a guard.
#pragma once

#include "cutlass/arch/cache_operation.h"
#include "cutlass/cutlass.h"
#include "cutlass/platform/platform.h"

namespace cutlass {
namespace arch {

template <typename AccessType, int Bytes, CacheOperation::Kind = CacheOperation::Always>
struct global_load {
    global_load(AccessType &value, void const *pointer, bool guard) {
        if (guard) std::memcpy(static_cast<void *>(&value), pointer, Bytes);
    }
};

template <typename AccessType, int Bytes>
struct global_store {
    global_store(AccessType const &value, void *pointer, bool guard) {
        if (guard && reinterpret_cast<std::uintptr_t>(pointer) % Bytes != 0) std::abort(); // as on the device
        if (guard) std::memcpy(pointer, static_cast<void const *>(&value), Bytes);
    }
};

template <int Bytes>
void shared_load(void *, std::uint32_t) { std::abort(); }

template <int Bytes>
void shared_store(std::uint32_t, void const *) { std::abort(); }

} // namespace arch
} // namespace cutlass

#include "cutlass/arch/memory_sm75.h"
#include "cutlass/arch/memory_sm80.h"
