"""Sensitivity: each operator's contribution to the variance of the gradients, by precision.

`estimate.sensitivity` runs a model in FP32 with one of the methods of `indicator_registry`. The
methods are in `second_order`, `noise_injection`, `monte_carlo` and `closed_form_terms`;
`gradient_step.GradientStep` is their input. `qsync_fx.profiler.tensor_capture` records the tensors.

Invariant: a run leaves the model unchanged (`training_state.undisturbed`), and identifies operators
by the ids of plans.
"""
