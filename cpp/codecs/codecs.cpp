// Multithreaded gradient codecs: layout of the encoded buffer and distribution of units over
// threads.

#include "codecs/codecs.h"

#include "parallel.h"
#include "random.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace qsync {
namespace {

// Values per thread that amortize waking it.
constexpr std::size_t GRAIN = std::size_t{1} << 15;

// Values that are transformed at once: 16 units of 128 values, for which QSGD has a fast path.
constexpr std::size_t BATCH = 2048;

constexpr int LOWEST = 12, HALF_BYTE = 4;
constexpr std::size_t HEADER = 4;

std::size_t ceiling(std::size_t n, std::size_t by) { return n / by + (n % by != 0); }

int width(int bits) { return bits == 2 ? 0 : bits == 4 ? 1 : bits == 8 ? 2 : 3; }

// Return the size of n codes in bytes: groups of sixteen bytes, or of sixteen 16-bit words.
std::size_t code_bytes(std::size_t n, int bits) {
    const std::size_t values = bits < 8 ? 128u / static_cast<unsigned>(bits) : 16;
    return ceiling(n, values) * (bits == 16 ? 32 : 16);
}

// Call work(begin, end) on threads. The length of each range but the last is a multiple of `unit`.
template <class Work> void by_units(std::size_t n, std::size_t unit, int threads, const Work &work) {
    parallel(n, ceiling(GRAIN, unit) * unit, threads, [&](std::size_t begin, std::size_t end, std::size_t) { work(begin, end); });
}

// Call work(begin, size, blocks) on batches of full units, except for the last one. `blocks` is a
// buffer in the L1 cache for their transform.
template <class Work> void by_blocks(std::size_t unit, std::size_t begin, std::size_t end, const Work &work) {
    std::vector<float> blocks(std::max(unit, BATCH));
    for (std::size_t at = begin; at < end; at += blocks.size()) work(at, std::min(blocks.size(), end - at), blocks.data());
}

// Return the counter of the word with the signs of 32 values from `index` on.
std::uint32_t sign_counter(std::uint32_t signs, std::size_t index) { return signs + WEYL * static_cast<std::uint32_t>(index / 32); }

// Return the header of a partition: the level (0 for 12 bits to 5 for 32 bits) plus eight times the
// number of values.
std::uint32_t header(int bits, std::size_t count) {
    return static_cast<std::uint32_t>(count) << 3 | static_cast<std::uint32_t>((bits - LOWEST) / HALF_BYTE);
}

std::size_t plane_bytes(std::size_t n, int bits) {
    return n * static_cast<std::size_t>(bits / 8) + (bits % 8 != 0 ? ceiling(n, 2) : 0);
}

// Return the size rounded up to four bytes, the alignment of headers relative to the buffer.
std::size_t aligned(std::size_t bytes) { return ceiling(bytes, 4) * 4; }

} // namespace

std::size_t qsgd_bytes(std::size_t n, int bits, std::size_t unit, bool rotated) {
    if (rotated) return n == 0 ? 0 : sizeof(std::uint32_t) + qsgd_bytes(ceiling(n, unit) * unit, bits, unit);
    return ceiling(n, unit) * sizeof(float) + n / unit * code_bytes(unit, bits) + code_bytes(n % unit, bits);
}

std::size_t onebit_bytes(std::size_t n, std::size_t unit) {
    return ceiling(n, unit) * 2 * sizeof(float) + n / unit * ceiling(unit, 32) * 4 + ceiling(n % unit, 32) * 4;
}

std::size_t partition_values(int bits, std::size_t partition) { return partition * 8 / static_cast<std::size_t>(bits); }

std::size_t truncate_bytes(std::size_t n, int bits, std::size_t partition) {
    const std::size_t values = partition_values(bits, partition), rest = n % values;
    return n / values * (HEADER + aligned(plane_bytes(values, bits))) + (rest != 0 ? HEADER + aligned(plane_bytes(rest, bits)) : 0);
}

void qsgd_encode(const Codecs &codecs, const Qsgd &how, const float *x, std::size_t n, std::uint8_t *wire, std::uint32_t counter,
                 int threads) {
    if (how.rotated && n != 0) {
        std::memcpy(wire, &how.signs, sizeof how.signs);
        wire += sizeof how.signs;
    }
    std::uint8_t *codes = wire + ceiling(n, how.unit) * sizeof(float);
    const auto encode = [&](const float *values, std::size_t begin, std::size_t size) {
        const std::size_t units = begin / how.unit;
        codecs.qsgd_encode[width(how.bits)][how.layout](values, size, how.unit, how.norm, wire + units * sizeof(float),
                                                        codes + units * code_bytes(how.unit, how.bits),
                                                        counter + WEYL * static_cast<std::uint32_t>(begin));
    };
    by_units(n, how.unit, threads, [&](std::size_t begin, std::size_t end) {
        if (!how.rotated) return encode(x + begin, begin, end - begin);
        by_blocks(how.unit, begin, end, [&](std::size_t at, std::size_t size, float *blocks) {
            codecs.rotate(x + at, size, how.unit, sign_counter(how.signs, at), blocks);
            encode(blocks, at, ceiling(size, how.unit) * how.unit);
        });
    });
}

void qsgd_decode(const Codecs &codecs, const Qsgd &how, const std::uint8_t *wire, std::size_t n, float *y, bool add, bool last,
                 int threads) {
    std::uint32_t signs = 0;
    if (how.rotated && n != 0) {
        std::memcpy(&signs, wire, sizeof signs);
        wire += sizeof signs;
    }
    const std::uint8_t *codes = wire + ceiling(n, how.unit) * sizeof(float);
    const auto decode = [&](std::size_t begin, std::size_t size, float *values, bool sum, bool past) {
        const std::size_t units = begin / how.unit;
        codecs.qsgd_decode[width(how.bits)][how.layout](wire + units * sizeof(float), codes + units * code_bytes(how.unit, how.bits),
                                                        size, how.unit, values, sum, past);
    };
    by_units(n, how.unit, threads, [&](std::size_t begin, std::size_t end) {
        if (!how.rotated) return decode(begin, end - begin, y + begin, add, last);
        by_blocks(how.unit, begin, end, [&](std::size_t at, std::size_t size, float *blocks) {
            decode(at, ceiling(size, how.unit) * how.unit, blocks, false, false);
            codecs.rotate_back(blocks, size, how.unit, sign_counter(signs, at), y + at, add);
        });
    });
}

void onebit_encode(const Codecs &codecs, std::size_t unit, const float *x, float *residual, std::size_t n, std::uint8_t *wire,
                   int threads) {
    std::uint8_t *words = wire + ceiling(n, unit) * 2 * sizeof(float);
    by_units(n, unit, threads, [&](std::size_t begin, std::size_t end) {
        const std::size_t units = begin / unit;
        codecs.onebit_encode(x + begin, residual == nullptr ? nullptr : residual + begin, end - begin, unit,
                             wire + units * 2 * sizeof(float), words + units * ceiling(unit, 32) * 4);
    });
}

void onebit_decode(const Codecs &codecs, std::size_t unit, const std::uint8_t *wire, std::size_t n, float *y, bool add, bool last,
                   int threads) {
    const std::uint8_t *words = wire + ceiling(n, unit) * 2 * sizeof(float);
    by_units(n, unit, threads, [&](std::size_t begin, std::size_t end) {
        const std::size_t units = begin / unit;
        codecs.onebit_decode(wire + units * 2 * sizeof(float), words + units * ceiling(unit, 32) * 4, end - begin, unit, y + begin, add,
                             last);
    });
}

void truncate_encode(const Codecs &codecs, int bits, std::size_t partition, const float *x, float *residual, std::size_t n,
                     std::uint8_t *wire, int threads) {
    const std::size_t values = partition_values(bits, partition), bytes = HEADER + aligned(plane_bytes(values, bits));
    by_units(n, values, threads, [&](std::size_t begin, std::size_t end) {
        for (std::size_t at = begin; at < end; at += values) {
            const std::size_t size = std::min(values, end - at);
            std::uint8_t *to = wire + at / values * bytes;
            const std::uint32_t head = header(bits, size);
            std::memcpy(to, &head, HEADER);
            codecs.truncate_encode(x + at, residual == nullptr ? nullptr : residual + at, size, bits, to + HEADER);
            const std::size_t used = plane_bytes(size, bits);
            std::memset(to + HEADER + used, 0, aligned(used) - used);
        }
    });
}

bool truncate_decode(const Codecs &codecs, const std::uint8_t *wire, std::size_t size, std::size_t n, float *y, bool add, int threads) {
    struct Part {
        std::size_t at, first, count;
        int bits;
    };
    std::vector<Part> parts;
    std::size_t at = 0, first = 0;
    while (at < size) {
        if (size - at < HEADER) return false;
        std::uint32_t head;
        std::memcpy(&head, wire + at, HEADER);
        const int bits = LOWEST + HALF_BYTE * static_cast<int>(head & 7u);
        const std::size_t count = head >> 3;
        if (bits > 32 || count == 0 || count > n - first) return false;
        const std::size_t bytes = aligned(plane_bytes(count, bits));
        if (bytes > size - at - HEADER) return false;
        parts.push_back({at + HEADER, first, count, bits});
        at += HEADER + bytes;
        first += count;
    }
    if (first != n) return false;
    const std::size_t grain = parts.empty() ? 1 : ceiling(GRAIN, parts.front().count);
    parallel(parts.size(), grain, threads, [&](std::size_t begin, std::size_t end, std::size_t) {
        for (std::size_t i = begin; i < end; ++i)
            codecs.truncate_decode(wire + parts[i].at, parts[i].count, parts[i].bits, y + parts[i].first, add);
    });
    return true;
}

} // namespace qsync
