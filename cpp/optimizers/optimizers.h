// Fused optimizer steps (Adam, AdamW, SGD) on the CPU: the kernels of one ISA variant, and
// multithreaded functions for lists of tensors.
//
// Invariant: all tables compute identical bits from identical arguments, for any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qsync {

// Hyperparameters that all tensors of a call share. `sign` is -1 to maximize the objective.
// Gradients were multiplied by `grad_scale`.
struct AdamRule {
    float kept;         // factor of decoupled weight decay: 1 - lr * weight_decay
    float weight_decay; // factor of weight decay in the gradient
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

// Weight decay: none, decoupled (AdamW), or added to the gradient.
enum Decay { NO_DECAY, APART, IN_GRADIENT, DECAYS };
// Momentum: none, a buffer that this step initializes, or an existing buffer; both also with
// Nesterov momentum.
enum Momentum { NO_MOMENTUM, FIRST, GOING_ON, NESTEROV_FIRST, NESTEROV, MOMENTA };

struct Optimizers {
    // All pointers are [n] float32, contiguous, and do not overlap. `largest` (AMSGrad) is null
    // unless the second index of `adam` is 1. With [scaled], the gradient is divided by its scale
    // and stored.
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

// Update `count` tensors. If parameters overlap, the steps run one after the other.
void adam(const Optimizers &optimizers, const AdamTensor *tensors, std::size_t count, const AdamRule &rule, Decay decay, bool scaled,
          int threads);
void sgd(const Optimizers &optimizers, const SgdTensor *tensors, std::size_t count, const SgdRule &rule, bool decays, bool nesterov,
         bool scaled, int threads);

} // namespace qsync
