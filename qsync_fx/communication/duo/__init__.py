"""DUO (J. Jia et al., 2025): a fast low-bit reduction, then an FP32 one during the next step.

The model's parameters are one optimizer step ahead of the committed ones, and only that step uses
low-bit gradients. Start with `optimizer_steps`, the state machine of a step, and `duo_hook` (comm
hook and handle). `sign_codecs` names the codecs of the fast reduction, `optimizer_parameters` has
the parameters that a rank's optimizer steps, and `functional_optimizer` repeats its steps.
"""
