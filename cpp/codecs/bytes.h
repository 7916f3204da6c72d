// Unaligned loads and stores, and common types, of the codec kernels.
#pragma once

#include "ahead.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace qsync {
namespace {

using std::int32_t;
using std::size_t;
using std::uint32_t;
using std::uint8_t;

constexpr uint32_t INFINITE = 0x7F800000u;

template <class T> inline T get(const uint8_t *p) {
    T x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
template <class T> inline void put(uint8_t *p, T x) { std::memcpy(p, &x, sizeof x); }

inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

} // namespace
} // namespace qsync
