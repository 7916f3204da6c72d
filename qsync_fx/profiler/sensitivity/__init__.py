"""Sensitivity: each operator's contribution to the variance of the gradients, by precision.

Start with `estimate.sensitivity`, which runs a model in FP32 with one of the methods in
`second_order`, `noise_injection`, `monte_carlo` and `closed_form_terms`. `gradient_step` has their
interface and registry.
"""
