// Codecs of gradients: what one path (instruction set) offers, and the same over whole tensors, on threads.
//
// Invariant: every table computes the same bits from the same arguments, and threads change nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qsync {

enum Layout { SIGN, ENDPOINTS, LAYOUTS };
enum Norm { MAX_NORM, TWO_NORM };

// Bits of a QSGD value: 2, 4, 8 or 16, by their logarithm.
constexpr int WIDTHS = 4;

// How a tensor of n values is divided: into units of `unit` values, of which the last may have fewer.
struct Codecs {
    // What is decoded `last`, as nobody reads it soon, may be written past the caches.
    // A scale a unit, and the codes of each, sixteen to a group, one group for each code that a byte takes.
    void (*qsgd_encode[WIDTHS][LAYOUTS])(const float *x, std::size_t n, std::size_t unit, Norm norm, std::uint8_t *scales,
                                         std::uint8_t *codes, std::uint32_t counter);
    void (*qsgd_decode[WIDTHS][LAYOUTS])(const std::uint8_t *scales, const std::uint8_t *codes, std::size_t n, std::size_t unit, float *y,
                                         bool add, bool last);
    // Two means a unit and a bit a value. `residual` may be null; it takes what the code leaves of x + residual.
    void (*onebit_encode)(const float *x, float *residual, std::size_t n, std::size_t unit, std::uint8_t *means, std::uint8_t *words);
    void (*onebit_decode)(const std::uint8_t *means, const std::uint8_t *words, std::size_t n, std::size_t unit, float *y, bool add,
                          bool last);
    // The highest `bits` of each value, in planes of bytes and one of halves of bytes.
    void (*truncate_encode)(const float *x, float *residual, std::size_t n, int bits, std::uint8_t *planes);
    void (*truncate_decode)(const std::uint8_t *planes, std::size_t n, int bits, float *y, bool add);
};

extern const Codecs scalar_codecs;
#ifdef QSYNC_X86
extern const Codecs avx2_codecs;
extern const Codecs avx512_codecs;
#endif

struct Qsgd {
    int bits;
    std::size_t unit;
    Norm norm;
    Layout layout;
};

std::size_t qsgd_bytes(std::size_t n, int bits, std::size_t unit);
std::size_t onebit_bytes(std::size_t n, std::size_t unit);
// How many values a whole partition of so many bytes takes, and how many bytes n values make.
std::size_t partition_values(int bits, std::size_t partition);
std::size_t truncate_bytes(std::size_t n, int bits, std::size_t partition);

void qsgd_encode(const Codecs &codecs, const Qsgd &how, const float *x, std::size_t n, std::uint8_t *wire, std::uint32_t counter,
                 int threads);
void qsgd_decode(const Codecs &codecs, const Qsgd &how, const std::uint8_t *wire, std::size_t n, float *y, bool add, bool last,
                 int threads);
void onebit_encode(const Codecs &codecs, std::size_t unit, const float *x, float *residual, std::size_t n, std::uint8_t *wire,
                   int threads);
void onebit_decode(const Codecs &codecs, std::size_t unit, const std::uint8_t *wire, std::size_t n, float *y, bool add, bool last,
                   int threads);
void truncate_encode(const Codecs &codecs, int bits, std::size_t partition, const float *x, float *residual, std::size_t n,
                     std::uint8_t *wire, int threads);
// Returns whether the headers of `size` bytes say what n values were.
bool truncate_decode(const Codecs &codecs, const std::uint8_t *wire, std::size_t size, std::size_t n, float *y, bool add, int threads);

} // namespace qsync
