// Truth values, a byte each in torch, as a bit each. No instruction set has a part in it: eight at a time fit into one multiplication.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qsync {

// Writes n bytes, each 0 or 1, as bits into (n + 7) / 8 bytes: the first is the lowest bit of the first byte, and the last byte is filled
// up with zeros.
void pack_bits(const std::uint8_t *source, std::uint8_t *target, std::size_t n, int threads);

// Writes the n bytes, each 0 or 1, that `pack_bits` was given.
void unpack_bits(const std::uint8_t *source, std::uint8_t *target, std::size_t n, int threads);

} // namespace qsync
