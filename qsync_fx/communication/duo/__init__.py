"""DUO (J. Jia et al., 2025): gradients are reduced twice, in few bits at once and in FP32 behind the next step.

    rates     in what the fast reduction sends gradients, and what that is called
    pure      an optimizer as a function of parameters, state and gradients, and which optimizers are none
    replica   this rank's gradients of a step, kept until their mean is known in FP32
    held      what the optimizer of a rank steps; shards, where that is a part of each parameter; elementwise, whether it may be
    steps     commits what is known in full, and looks ahead with what is known in few bits
    training  the handle, and the hook of DistributedDataParallel; saving, what it saves; ending, where it ends too early
    told      what was sent on both ways

Parameters that a forward and a backward pass run on are one step of the optimizer ahead of those that are kept, and of that step alone the
gradients were in few bits.
"""
