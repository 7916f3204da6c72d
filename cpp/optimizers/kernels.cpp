// Optimizer kernels, compiled once per ISA variant: plain loops that the compiler vectorizes.
//
// Invariant: the operations of the single-tensor step of torch.optim in the same order, each
// rounded once. Operations that the vector kernels of torch contract (lerp_, addcmul_, add with
// alpha) are explicit fused multiply-adds. So bits are identical in every ISA variant.

#include "optimizers/optimizers.h"

namespace qsync {
namespace {

using std::size_t;

inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

template <bool SCALED> inline float gradient_of(float *gradient, size_t i, float scale, float sign) {
    if (!SCALED) return gradient[i] * sign;
    const float unscaled = gradient[i] / scale;
    gradient[i] = unscaled;
    return unscaled * sign;
}

template <Decay DECAY, bool LARGEST, bool SCALED>
void adam(float *__restrict parameter, float *__restrict gradient, float *__restrict first, float *__restrict second,
          float *__restrict largest, size_t n, const AdamRule &given, float negative_step, float root) {
    const AdamRule rule = given;
    // As in lerp_: interpolate from the nearer end, so that a weight of 1 yields the gradient
    // itself.
    const bool near = rule.first_weight < 0.5f && rule.first_weight > -0.5f;
    const float weight = near ? rule.first_weight : rule.first_weight - 1.0f;
    for (size_t i = 0; i < n; ++i) {
        float p = parameter[i];
        float g = gradient_of<SCALED>(gradient, i, rule.grad_scale, rule.sign);
        if (DECAY == APART) p *= rule.kept;
        if (DECAY == IN_GRADIENT) g = fused(p, rule.weight_decay, g);
        const float m = first[i];
        const float m_now = fused(weight, g - m, near ? m : g);
        const float v_now = fused(rule.second_weight * g, g, second[i] * rule.second_kept);
        float bound = v_now;
        if (LARGEST) {
            const float before = largest[i];
            bound = before >= v_now || before != before ? before : v_now; // NaN if either is NaN
            largest[i] = bound;
        }
        first[i] = m_now;
        second[i] = v_now;
        parameter[i] = p + negative_step * m_now / (__builtin_sqrtf(bound) / root + rule.eps);
    }
}

template <bool DECAYS_, Momentum MOMENTUM, bool SCALED>
void sgd(float *__restrict parameter, float *__restrict gradient, float *__restrict buffer, size_t n, const SgdRule &given) {
    const SgdRule rule = given;
    for (size_t i = 0; i < n; ++i) {
        const float p = parameter[i];
        float g = gradient_of<SCALED>(gradient, i, rule.grad_scale, rule.sign);
        if (DECAYS_) g = fused(p, rule.weight_decay, g);
        if (MOMENTUM != NO_MOMENTUM) {
            const bool begins = MOMENTUM == FIRST || MOMENTUM == NESTEROV_FIRST;
            const float b = begins ? g : fused(g, rule.taken, buffer[i] * rule.momentum);
            buffer[i] = b;
            g = MOMENTUM == NESTEROV || MOMENTUM == NESTEROV_FIRST ? fused(b, rule.momentum, g) : b;
        }
        parameter[i] = fused(g, rule.negative_lr, p);
    }
}

} // namespace

extern const Optimizers QSYNC_OPTIMIZERS;
#define QSYNC_ADAM(D) {{adam<D, false, false>, adam<D, false, true>}, {adam<D, true, false>, adam<D, true, true>}}
#define QSYNC_SGD(D, M) {sgd<D, M, false>, sgd<D, M, true>}
#define QSYNC_SGDS(D) {QSYNC_SGD(D, NO_MOMENTUM), QSYNC_SGD(D, FIRST), QSYNC_SGD(D, GOING_ON), QSYNC_SGD(D, NESTEROV_FIRST), QSYNC_SGD(D, NESTEROV)}
const Optimizers QSYNC_OPTIMIZERS = {
    {QSYNC_ADAM(NO_DECAY), QSYNC_ADAM(APART), QSYNC_ADAM(IN_GRADIENT)},
    {QSYNC_SGDS(false), QSYNC_SGDS(true)},
};

} // namespace qsync
