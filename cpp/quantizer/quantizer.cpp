// Multithreaded quantization of tensors on top of the kernels of one ISA variant.

#include "quantizer/quantizer.h"

#include "ahead.h"
#include "parallel.h"
#include "random.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace qsync {
namespace {

// Elements per thread: enough work to amortize waking the thread, and few enough to stay in the
// private cache of a core between the absmax pass and the rounding pass.
constexpr std::size_t GRAIN = std::size_t{1} << 14;

constexpr std::uint32_t NOT_FINITE = 0x7F800000u;

std::size_t size_of(Type type) { return type == FLOAT32 ? 4 : 2; }

const void *at(const void *source, std::size_t index, Type type) { return static_cast<const char *>(source) + index * size_of(type); }

float scale_of(std::uint32_t absmax_bits, int levels) {
    if (absmax_bits >= NOT_FINITE) return std::numeric_limits<float>::quiet_NaN();
    if (absmax_bits == 0) return 1.0f;
    float absmax;
    std::memcpy(&absmax, &absmax_bits, sizeof absmax);
    return std::max(absmax / static_cast<float>(levels), 0x1p-126f);
}

// Split n elements, whose first index is `first`, where the high 32 bits of the index change. Call
// work(offset, size, counter) on each segment.
template <class Work> void by_counter(std::uint32_t key, std::uint64_t first, std::size_t n, const Work &work) {
    for (std::size_t done = 0; done < n;) {
        const std::uint64_t index = first + done;
        const auto low = static_cast<std::uint32_t>(index), high = static_cast<std::uint32_t>(index >> 32);
        const std::uint64_t left = (std::uint64_t{1} << 32) - low;
        const std::size_t size = std::min<std::uint64_t>(left, n - done);
        work(done, size, low * WEYL + mix(key ^ high));
        done += size;
    }
}

struct Quantizer {
    const Kernels &kernels;
    Type type;
    Rounding rounding;
    int levels;
    std::uint32_t key;

    // `next`: address of the n values that this thread reads next, for prefetching.
    void run(const void *source, std::int8_t *target, std::size_t n, std::uint64_t first, float scale, const void *next) const {
        if (scale != scale) {
            std::memset(target, 0, n);
            return;
        }
        by_counter(key, first, n, [&](std::size_t offset, std::size_t size, std::uint32_t counter) {
            kernels.quantize[type][rounding](at(source, offset, type), target + offset, size, scale, static_cast<float>(levels), counter,
                                             at(next, offset, type));
        });
    }

    std::uint32_t absmax(const void *source, std::size_t n, int threads) const {
        if (threads == 1) return kernels.absmax[type](source, n); // no allocation per short row
        std::vector<std::uint32_t> most(static_cast<std::size_t>(threads), 0);
        parallel(n, GRAIN, threads, [&](std::size_t begin, std::size_t end, std::size_t thread) {
            most[thread] = kernels.absmax[type](at(source, begin, type), end - begin);
        });
        return *std::max_element(most.begin(), most.end());
    }

    // Quantize one row on all threads: each thread computes the absmax of its range, then quantizes
    // the same range.
    float row(const void *source, std::int8_t *target, std::size_t n, std::uint64_t first, int threads) const {
        const float scale = scale_of(absmax(source, n, threads), levels);
        parallel(n, GRAIN, threads, [&](std::size_t begin, std::size_t end, std::size_t) {
            // The values of a short range are in cache by now, so prefetch the next row.
            const std::size_t next = end - begin <= GRAIN ? end : begin + AHEAD / size_of(type);
            run(at(source, begin, type), target + begin, end - begin, first + begin, scale, at(source, next, type));
        });
        return scale;
    }
};

} // namespace

void quantize(const Kernels &kernels, const void *source, std::int8_t *target, float *scales, std::size_t rows, std::size_t columns,
              Type type, Rounding rounding, int levels, Random random, int threads) {
    const Quantizer quantizer{kernels, type, rounding, levels, stream_key(random.seed, random.stream)};
    const auto row = [&](std::size_t index, int team) {
        const std::size_t start = index * columns;
        scales[index] = quantizer.row(at(source, start, type), target + start, columns, random.first + start, team);
    };
    if (columns == 0) {
        std::fill(scales, scales + rows, 1.0f);
    } else if (rows < static_cast<std::size_t>(threads) || columns >= GRAIN * static_cast<std::size_t>(threads)) {
        const IeeeMode mode;
        for (std::size_t index = 0; index < rows; ++index) row(index, threads);
    } else {
        parallel(rows, (GRAIN + columns - 1) / columns, threads, [&](std::size_t begin, std::size_t end, std::size_t) {
            for (std::size_t index = begin; index < end; ++index) row(index, 1);
        });
    }
}

void round_float(const Kernels &kernels, const float *source, float *target, std::size_t n, Grid grid, Rounding rounding, Random random,
                 int threads) {
    const std::uint32_t key = stream_key(random.seed, random.stream);
    parallel(n, GRAIN, threads, [&](std::size_t begin, std::size_t end, std::size_t) {
        by_counter(key, random.first + begin, end - begin, [&](std::size_t offset, std::size_t size, std::uint32_t counter) {
            kernels.round_float[rounding](source + begin + offset, target + begin + offset, size, grid, counter);
        });
    });
}

void keep(const Kernels &kernels, std::uint8_t *target, std::size_t n, double p, Random random, int threads) {
    const std::uint32_t key = stream_key(random.seed, random.stream);
    const auto least = static_cast<std::uint32_t>(std::ceil(p * 0x1p24));
    parallel(n, GRAIN, threads, [&](std::size_t begin, std::size_t end, std::size_t) {
        by_counter(key, random.first + begin, end - begin, [&](std::size_t offset, std::size_t size, std::uint32_t counter) {
            kernels.keep(target + begin + offset, size, least, counter);
        });
    });
}

} // namespace qsync
