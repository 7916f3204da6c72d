// Scale of a QSGD unit: its computation, and the normalization of values by it.
//
// Invariant: as in quantizer/kernels.cpp, identical bits in every ISA variant and no inline
// function with external linkage.
#pragma once

#include "codecs/bytes.h"
#include "lanes/lanes.h"

#include <cfloat>

namespace qsync {
namespace {

// Return the largest magnitude of [n] float32. The result is NaN or infinite if a value is, since
// their bit patterns compare largest.
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

// Return the 2-norm of [n] float32, summed in FP64, where squares of FP32 values neither overflow
// nor underflow. The norm is finite if all values are.
inline float two_norm(const float *x, size_t n) {
    Squares sum;
    for (size_t i = 0; i < n; i += LANES) sum.add(load_some(x + i, n - i));
    const double norm = __builtin_sqrt(folded(sum));
    return norm - norm == 0.0 && norm > static_cast<double>(FLT_MAX) ? FLT_MAX : static_cast<float>(norm);
}

// Scale of a unit, multiplied by a power of two such that neither it nor its inverse is denormal:
// levels * x / scale = (x * before) * inverse.
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
        // The step was rounded up, and levels * step would overflow FP32: use the next smaller
        // float.
        uint32_t word;
        std::memcpy(&word, &found, sizeof word);
        --word;
        float below;
        std::memcpy(&below, &word, sizeof below);
        return below;
    }
};

// Functors that multiply values by levels / scale. `Whole` is for scales that need no power of two.
struct Whole {
    F inverse;
    F operator()(const F &x) const { return x * inverse; }
};
struct Moved {
    F before, inverse;
    F operator()(const F &x) const { return x * before * inverse; }
};
// The same times 2**24 in one multiplication, for codes of one step. The codes are identical unless
// x * inverse underflows to zero, which requires a scale above 1: a nonzero value then exceeds the
// random number 0, but zero does not.
struct Enlarged {
    F inverse;
};

template <class Scaled> inline F enlarged(const Scaled &scaled, const F &x) { return scaled(x) * all(0x1p24f); }
inline F enlarged(const Enlarged &scaled, const F &x) { return x * scaled.inverse; }

} // namespace
} // namespace qsync
