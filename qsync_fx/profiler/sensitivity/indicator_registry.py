"""Registry of the sensitivity methods by name.

All methods estimate the variance that is added to the gradients of all parameters, except
"hessian", "fisher" and "random", whose numbers only rank operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from qsync_fx.errors import ProfileError, nearest
from qsync_fx.profiler.sensitivity.closed_form_terms import (
    Formulas,
    RandomIndicator,
    by_depth,
    by_fisher,
    qsync_indicator,
)
from qsync_fx.profiler.sensitivity.gradient_step import Method
from qsync_fx.profiler.sensitivity.monte_carlo import MonteCarlo
from qsync_fx.profiler.sensitivity.noise_injection import Injected
from qsync_fx.profiler.sensitivity.second_order import HessianIndicator, SecondOrder


@dataclass(frozen=True)
class MethodSpec:
    """A sensitivity method.

    Attributes:
        make: makes an instance for a model.
        about: description for lists.
        passes: approximate forward and backward passes per step, from the numbers of operators and
            precisions.
        twice: whether it uses second derivatives, which fused attention kernels lack.
    """

    make: Callable[[], Method]
    about: str
    passes: Callable[[int, int], int]
    twice: bool = False


METHODS: Final[dict[str, MethodSpec]] = {
    "second_order": MethodSpec(
        SecondOrder,
        "exact variances, carried to the gradients by second derivatives, and the gates that flip",
        lambda operators, precisions: 20,
        twice=True,
    ),
    "injected": MethodSpec(
        Injected,
        "noise of the exact variance is put in at each operator in turn",
        lambda operators, precisions: 1 + 2 * operators * precisions,
    ),
    "depth": MethodSpec(
        lambda: Formulas(by_depth),
        "exact variances of each product, weighed with how deep the operator stands",
        lambda operators, precisions: 2,
    ),
    "paper": MethodSpec(
        lambda: Formulas(qsync_indicator),
        "QSync's equations 3 to 5 to the letter",
        lambda operators, precisions: 1,
    ),
    "hessian": MethodSpec(
        HessianIndicator,
        "HAWQ: the top eigenvalue of each weight's Hessian",
        lambda operators, precisions: 2 + 8 * operators,
        twice=True,
    ),
    "fisher": MethodSpec(
        lambda: Formulas(by_fisher),
        "squared gradients, weighed with exact variances",
        lambda operators, precisions: 1,
    ),
    "random": MethodSpec(
        RandomIndicator, "drawn, halved with each wider precision", lambda operators, precisions: 0
    ),
    "monte_carlo": MethodSpec(
        MonteCarlo,
        "each operator in turn runs in the precision: the truth that the others are held to",
        lambda operators, precisions: 1 + 4 * operators * precisions,
    ),
}


def method(name: str) -> MethodSpec:
    """Return the method called `name`; raise `ProfileError` if there is none."""
    if name not in METHODS:
        raise ProfileError(
            f"{name!r} is no method to find a sensitivity", do=nearest(str(name), METHODS)
        )
    return METHODS[name]
