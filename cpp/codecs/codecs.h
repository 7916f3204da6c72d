// Gradient compression codecs on the CPU: QSGD, after a Hadamard transform if requested, 1bitSGD
// and truncation. The kernels of one ISA variant, and multithreaded functions for entire tensors.
//
// Invariant: all tables compute identical bits from identical arguments, for any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qsync {

enum Layout { SIGN, ENDPOINTS, LAYOUTS };
enum Norm { MAX_NORM, TWO_NORM };

// Number of code widths of QSGD: 2, 4, 8 and 16 bits.
constexpr int WIDTHS = 4;

// Codec kernels of one ISA variant. A tensor of n values is divided into units of `unit` values;
// the last unit may be shorter.
//
// Values are [n] float32, contiguous. Pointers to encoded data need no alignment. No buffers
// overlap. `add` adds the decoded values to `y` instead of overwriting it. `last` states that the
// output is not read soon: the kernel may use non-temporal stores.
struct Codecs {
    // QSGD. scales: one float32 per unit; codes: groups of 16 bytes (32 for 16-bit codes), see
    // `Packed` in qsgd.h. `counter`: the random counter of the first value.
    void (*qsgd_encode[WIDTHS][LAYOUTS])(const float *x, std::size_t n, std::size_t unit, Norm norm, std::uint8_t *scales,
                                         std::uint8_t *codes, std::uint32_t counter);
    void (*qsgd_decode[WIDTHS][LAYOUTS])(const std::uint8_t *scales, const std::uint8_t *codes, std::size_t n, std::size_t unit, float *y,
                                         bool add, bool last);
    // 1bitSGD. means: two float32 per unit; words: one bit per value, each unit padded to 32 bits.
    // `residual` is the error feedback buffer ([n] float32) or null: it is added to x and receives
    // the quantization error of the sum.
    void (*onebit_encode)(const float *x, float *residual, std::size_t n, std::size_t unit, std::uint8_t *means, std::uint8_t *words);
    void (*onebit_decode)(const std::uint8_t *means, const std::uint8_t *words, std::size_t n, std::size_t unit, float *y, bool add,
                          bool last);
    // Truncation to the highest `bits` of each value: byte planes, then one plane of half bytes if
    // `bits` is not a multiple of 8. `residual` is as for 1bitSGD.
    void (*truncate_encode)(const float *x, float *residual, std::size_t n, int bits, std::uint8_t *planes);
    void (*truncate_decode)(const std::uint8_t *planes, std::size_t n, int bits, float *y, bool add);
    // Randomized Hadamard transform H D of blocks, and its inverse, which overwrites y. `block` is a
    // power of two, at least 128; y has full blocks, the last one padded with zeros. `signs`: the
    // random counter of the first 32 signs.
    void (*rotate)(const float *x, std::size_t n, std::size_t block, std::uint32_t signs, float *y);
    void (*rotate_back)(float *y, std::size_t n, std::size_t block, std::uint32_t signs, float *x, bool add);
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
    bool rotated = false;     // whether each unit is a block of a randomized Hadamard transform
    std::uint32_t signs = 0; // its counter, for encoding
};

// Return the size of n encoded values in bytes.
std::size_t qsgd_bytes(std::size_t n, int bits, std::size_t unit, bool rotated = false);
std::size_t onebit_bytes(std::size_t n, std::size_t unit);
// Return the number of values in a full partition of `partition` bytes, and the size of n encoded
// values in bytes.
std::size_t partition_values(int bits, std::size_t partition);
std::size_t truncate_bytes(std::size_t n, int bits, std::size_t partition);

// Multithreaded codecs. `wire` is the encoded buffer: all scales or means, then all codes; for
// truncation, consecutive partitions. With a transform, the counter of the signs comes first.
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
// Return whether the headers in `size` bytes are consistent with n values. If not, `y` is
// unchanged.
bool truncate_decode(const Codecs &codecs, const std::uint8_t *wire, std::size_t size, std::size_t n, float *y, bool add, int threads);

} // namespace qsync
