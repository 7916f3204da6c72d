"""Sensitivity: each operator's contribution to the variance of the gradients, by precision.

Start with `estimate.sensitivity`; `gradient_step` has the interface and registry of methods.
"""
