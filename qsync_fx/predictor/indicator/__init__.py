"""Indicator: variance that an operator in a precision adds to the gradients (QSync).

`rounding_variance` computes the rounding noise of tensors and of products, `formulas` the closed
forms of the paper, and `sensitivity_map.Sensitivity` contains the result. All functions are pure;
Monte Carlo tests verify each formula. `qsync_fx.profiler.sensitivity` runs the models.
"""
