// Packing of boolean tensors into bits, eight values per 64-bit multiplication.

#include "bits.h"

#include "parallel.h"

#include <cstring>

namespace qsync {
namespace {

constexpr std::size_t GRAIN = std::size_t{1} << 16;

std::uint8_t packed(const std::uint8_t *bytes) {
    std::uint64_t eight;
    std::memcpy(&eight, bytes, 8);
    // The multiplication moves byte i to bit 56 + i. All partial products fall on distinct bits, so
    // there is no carry.
    return static_cast<std::uint8_t>((eight * 0x0102040810204080u) >> 56);
}

void unpacked(std::uint8_t bits, std::uint8_t *bytes) {
    // Each byte of the product is a copy of `bits`; in byte i the mask selects bit i. Adding 0x7F
    // carries a selected bit to the highest bit of its byte.
    const std::uint64_t own = (bits * 0x0101010101010101u) & 0x8040201008040201u;
    const std::uint64_t eight = ((own + 0x7F7F7F7F7F7F7F7Fu) >> 7) & 0x0101010101010101u;
    std::memcpy(bytes, &eight, 8);
}

} // namespace

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first of eight bytes is the lowest");

void pack_bits(const std::uint8_t *source, std::uint8_t *target, std::size_t n, int threads) {
    parallel(n, GRAIN, threads, [&](std::size_t begin, std::size_t end, std::size_t) {
        std::size_t at = begin;
        for (; at + 8 <= end; at += 8) target[at / 8] = packed(source + at);
        if (at == end) return;
        std::uint8_t rest[8] = {};
        std::memcpy(rest, source + at, end - at);
        target[at / 8] = packed(rest);
    });
}

void unpack_bits(const std::uint8_t *source, std::uint8_t *target, std::size_t n, int threads) {
    parallel(n, GRAIN, threads, [&](std::size_t begin, std::size_t end, std::size_t) {
        std::size_t at = begin;
        for (; at + 8 <= end; at += 8) unpacked(source[at / 8], target + at);
        if (at == end) return;
        std::uint8_t rest[8];
        unpacked(source[at / 8], rest);
        std::memcpy(target + at, rest, end - at);
    });
}

} // namespace qsync
