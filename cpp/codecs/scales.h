// The scale of a unit of QSGD: how it is found, and how values are brought to it.
//
// Invariant: as in kernels.cpp: equal bits on every path, nothing inline and external.
#pragma once

#include "codecs/bytes.h"
#include "lanes/lanes.h"

#include <cfloat>

namespace qsync {
namespace {

// The largest magnitude; NaN or infinite where a value is: as bits they come last.
inline float absmax(const float *x, size_t n) {
    I a = all(int32_t{0}), b = a;
    const I mask = all(int32_t{0x7FFFFFFF});
    size_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        a = most(a, bits(load(x + i)) & mask);
        b = most(b, bits(load(x + i + LANES)) & mask);
    }
    for (; i < n; i += LANES) a = most(a, bits(load_some(x + i, n - i)) & mask);
    const int32_t word = highest(most(a, b));
    float found;
    std::memcpy(&found, &word, sizeof found);
    return found;
}

// Squares of FP32 are far from what FP64 ends at: the sum is finite where all values are.
inline float two_norm(const float *x, size_t n) {
    Squares sum;
    for (size_t i = 0; i < n; i += LANES) sum.add(load_some(x + i, n - i));
    const double norm = __builtin_sqrt(folded(sum));
    return norm - norm == 0.0 && norm > static_cast<double>(FLT_MAX) ? FLT_MAX : static_cast<float>(norm);
}

// The scale of a unit, moved to where neither it nor its inverse is a denormal number: levels * x / scale = (x * before) * inverse.
struct Scale {
    float before = 1.0f, after = 1.0f, moved, levels;

    Scale(float scale, float span) : moved(scale), levels(span) {
        if (scale < 0x1p-64f) {
            before = 0x1p64f, after = 0x1p-64f;
            moved = scale * before;
        } else if (scale > 0x1p64f) {
            before = 0x1p-64f, after = 0x1p64f;
            moved = scale * before;
        }
    }
    float inverse() const { return moved > 0 ? levels / moved : 0; }
    float step() const {
        const float found = moved / levels;
        if (after <= 1.0f || levels * found * after <= FLT_MAX) return found;
        // It was rounded up, and as many as there are would go beyond what FP32 holds.
        uint32_t word;
        std::memcpy(&word, &found, sizeof word);
        --word;
        float below;
        std::memcpy(&below, &word, sizeof below);
        return below;
    }
};

// Values times levels / scale: where the scale was not moved, nothing comes before the inverse.
struct Whole {
    F inverse;
    F operator()(const F &x) const { return x * inverse; }
};
struct Moved {
    F before, inverse;
    F operator()(const F &x) const { return x * before * inverse; }
};
// The same times 2**24 in one product. Both have the same bits but where a number is lost below the smallest one, which needs a scale
// above 1; of one step a number that is there at all is above no random number but zero.
struct Enlarged {
    F inverse;
};

template <class Scaled> inline F enlarged(const Scaled &scaled, const F &x) { return scaled(x) * all(0x1p24f); }
inline F enlarged(const Enlarged &scaled, const F &x) { return x * scaled.inverse; }

} // namespace
} // namespace qsync
