"""Levenberg-Marquardt fit of device constants with priors.

The objective is a smoothed mean absolute relative error. Constants are expressed as deviations from
their usual values, in units of the prior's spread. Two quadratic penalties apply: a small one on
deviations, and a larger one on differences between devices.

Invariant: a fit reads only its arguments, so held-out points do not influence it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Reckon = Callable[[Numbers], Numbers]
"""Function of the deviations, [devices, constants], that returns the logarithms of seconds."""

_USUAL, _ALIKE = 0.05, 0.3
"""Penalty weights of the deviation from the usual value, and from the mean of the devices."""
_SMALL = 0.04
"""Relative error below which the objective is quadratic, so that improvements gain little."""
_STEP = 0.03
_NEAR = 0.7
"""Standard deviation of the random starting points around the best solution."""


@dataclass(frozen=True)
class Fitting:
    """Least-squares problem.

    Attributes:
        reckon: model.
        measured: logarithms of measured seconds, [points].
        owner: device index of each point, [points].
        devices, constants: number of devices, and of constants per device.
    """

    reckon: Reckon
    measured: Numbers
    owner: NDArray[np.int_]
    devices: int
    constants: int

    def _cost(self, away: Numbers, reckoned: Numbers) -> float:
        error = _relative(reckoned - self.measured)
        mean = away.mean(0)
        penalty = _USUAL * self.devices * (mean**2).sum() + _ALIKE * ((away - mean) ** 2).sum()
        return float(np.sum(np.sqrt(error**2 + _SMALL**2) - _SMALL) + penalty)

    def best(self, steps: int, tries: int) -> Numbers:
        """Return the best deviations of descents from zero and from `tries` random points."""
        random = np.random.default_rng(0)
        away, cost = self._descended(np.zeros((self.devices, self.constants)), steps)
        for _ in range(tries):
            tried, best_cost = self._descended(
                away + random.normal(0, _NEAR, self.constants), steps
            )
            if best_cost < cost:
                away, cost = tried, best_cost
        return away

    def _descended(self, away: Numbers, steps: int) -> tuple[Numbers, float]:
        mean = np.full((self.devices, self.devices), 1 / self.devices)
        hold = 2 * np.kron(
            _USUAL * mean + _ALIKE * (np.eye(self.devices) - mean), np.eye(self.constants)
        )
        reckoned = self.reckon(away)
        cost, damping = self._cost(away, reckoned), 1e-2
        for _ in range(steps):
            slopes = self._slopes(away, reckoned)
            left = reckoned - self.measured
            error = _relative(left)
            pull = error * (1 + error) / np.sqrt(error**2 + _SMALL**2)
            weight = np.where(np.abs(left) > 1e-6, pull / np.where(left == 0, 1, left), 1 / _SMALL)
            curved = slopes.T @ (slopes * weight[:, None]) + hold
            downhill = slopes.T @ pull + hold @ away.ravel()
            for _ in range(5):
                move = np.linalg.solve(curved + damping * np.diag(np.diag(curved) + 1e-3), downhill)
                tried = away - np.clip(move, -1.5, 1.5).reshape(away.shape)
                predicted = self.reckon(tried)
                if (new_cost := self._cost(tried, predicted)) < cost - 1e-6:
                    break
                damping *= 5
            else:
                break
            gained, away, cost, reckoned, damping = (
                cost - new_cost,
                tried,
                new_cost,
                predicted,
                max(damping / 4, 1e-4),
            )
            if gained < 2e-3:
                break
        return away, cost

    def _slopes(self, away: Numbers, reckoned: Numbers) -> Numbers:
        slopes = np.zeros((len(reckoned), self.devices, self.constants))
        indices = np.arange(len(reckoned))
        for constant in range(self.constants):
            moved = away.copy()
            moved[:, constant] += _STEP
            slopes[indices, self.owner, constant] = (self.reckon(moved) - reckoned) / _STEP
        return slopes.reshape(len(reckoned), -1)


def _relative(left: Numbers) -> Numbers:
    return np.asarray(np.expm1(np.minimum(left, 3.0)))
