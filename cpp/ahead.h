// Software prefetch for memory-bound kernels. Hardware prefetchers follow few streams and run a
// short distance ahead; explicit prefetches make kernels with little arithmetic up to twice as
// fast.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qsync {

// Prefetch distance in bytes. A longer distance would evict useful lines from the L1 cache.
constexpr std::size_t AHEAD = 8192;

// Prefetch `bytes` from an address on. The range may extend past the end of an allocation, since a
// prefetch never faults. Internal linkage: each ISA variant compiles its own copy, which the linker
// must not merge.
static inline void ask(std::uintptr_t address, std::size_t bytes) {
    constexpr std::size_t LINE = 64;
    for (std::size_t i = 0; i < bytes; i += LINE) __builtin_prefetch(reinterpret_cast<const void *>(address + i));
}
static inline void ask(const void *p, std::size_t bytes) { ask(reinterpret_cast<std::uintptr_t>(p), bytes); }
// Prefetch `bytes` at the prefetch distance from `p`.
static inline void ask_ahead(const void *p, std::size_t bytes) { ask(reinterpret_cast<std::uintptr_t>(p) + AHEAD, bytes); }

} // namespace qsync
