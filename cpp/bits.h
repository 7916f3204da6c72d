// Packing of boolean tensors: torch stores one byte per value, packed masks one bit per value.
// Scalar code for every ISA variant: one 64-bit multiplication converts eight values.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qsync {

// Pack n bytes, each 0 or 1, into bits, least significant bit first.
//
// source: [n] uint8; target: [(n + 7) / 8] uint8. The last byte is padded with zero bits. No
// alignment is required; the buffers must not overlap.
void pack_bits(const std::uint8_t *source, std::uint8_t *target, std::size_t n, int threads);

// Unpack n bits that `pack_bits` wrote into bytes, each 0 or 1.
//
// source: [(n + 7) / 8] uint8; target: [n] uint8. The buffers must not overlap.
void unpack_bits(const std::uint8_t *source, std::uint8_t *target, std::size_t n, int threads);

} // namespace qsync
