"""Operators that draw random numbers. Their stream depends on the type they draw in, so it stays the model's."""

from __future__ import annotations

from qsync_fx.ops.row import fixed

ROWS = fixed(
    "it draws random numbers, and another precision would draw others",
    "rand rand_like randn randn_like randint randint_like randperm bernoulli normal normal_functional uniform random "
    "exponential geometric cauchy log_normal poisson binomial multinomial _standard_gamma _sample_dirichlet",
)
