// Asking memory for what is read or written soon. Processors foresee that by themselves, but few places at once and not far ahead: kernels of
// little work on much memory are up to twice as fast for it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qsync {

// How many bytes ahead of where a kernel works. Further than that it would crowd a core's first cache.
constexpr std::size_t AHEAD = 8192;

// Asks for `bytes` from an address on, which may all or in part lie behind the end of what there is: it is no access. Static, as each path is
// compiled for an instruction set of its own and must not share the code of another.
static inline void ask(std::uintptr_t address, std::size_t bytes) {
    constexpr std::size_t LINE = 64;
    for (std::size_t i = 0; i < bytes; i += LINE) __builtin_prefetch(reinterpret_cast<const void *>(address + i));
}
static inline void ask(const void *p, std::size_t bytes) { ask(reinterpret_cast<std::uintptr_t>(p), bytes); }
static inline void ask_ahead(const void *p, std::size_t bytes) { ask(reinterpret_cast<std::uintptr_t>(p) + AHEAD, bytes); }

} // namespace qsync
