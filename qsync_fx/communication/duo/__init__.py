"""DUO (J. Jia et al., 2025): a fast low-bit reduction, then an FP32 one during the next step.

The model's parameters are one optimizer step ahead of the committed ones, and only that step uses
low-bit gradients. Start with `optimizer_steps`, the state machine of a step, and `duo_hook`.
"""
