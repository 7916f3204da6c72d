// Steps of optimizers: what one path (instruction set) offers, and the same over many tensors, on threads.
//
// Invariant: every table computes the same bits from the same arguments, and threads change nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qsync {

// What all tensors of one call share. `sign` is -1 where the objective is to grow; `grad_scale` is what gradients were multiplied by.
struct AdamRule {
    float kept;         // what decay leaves of a parameter, where it is apart from the gradient
    float weight_decay; // what of a parameter is added to its gradient
    float first_weight; // 1 - beta1
    float second_kept;  // beta2
    float second_weight;
    float eps;
    float sign;
    float grad_scale;
};

struct SgdRule {
    float weight_decay;
    float momentum;
    float taken; // 1 - dampening
    float negative_lr;
    float sign;
    float grad_scale;
};

// How a parameter decays: not at all, before the step, or by way of its gradient.
enum Decay { NO_DECAY, APART, IN_GRADIENT, DECAYS };
// What there is of a momentum: nothing, a buffer that this step fills first, or one that goes on.
enum Momentum { NO_MOMENTUM, FIRST, GOING_ON, NESTEROV_FIRST, NESTEROV, MOMENTA };

struct Optimizers {
    // `largest` is not null where [1] is; [scaled] divides the gradient by its scale and stores it.
    void (*adam[DECAYS][2][2])(float *parameter, float *gradient, float *first, float *second, float *largest, std::size_t n,
                               const AdamRule &rule, float negative_step, float root);
    void (*sgd[2][MOMENTA][2])(float *parameter, float *gradient, float *buffer, std::size_t n, const SgdRule &rule);
};

extern const Optimizers scalar_optimizers;
#ifdef QSYNC_X86
extern const Optimizers avx2_optimizers;
extern const Optimizers avx512_optimizers;
#endif

struct AdamTensor {
    float *parameter, *gradient, *first, *second, *largest;
    std::size_t n;
    float negative_step; // -lr / (1 - beta1 ** step)
    float root;          // sqrt(1 - beta2 ** step)
};

struct SgdTensor {
    float *parameter, *gradient, *buffer;
    std::size_t n;
    bool first;
};

void adam(const Optimizers &optimizers, const AdamTensor *tensors, std::size_t count, const AdamRule &rule, Decay decay, bool scaled,
          int threads);
void sgd(const Optimizers &optimizers, const SgdTensor *tensors, std::size_t count, const SgdRule &rule, bool decays, bool nesterov,
         bool scaled, int threads);

} // namespace qsync
