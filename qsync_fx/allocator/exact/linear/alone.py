"""Choices by what each costs and takes itself: what a limit's price is about, before any program is solved.

At a price of what a limit limits, each choice alone is made by a comparison. What is left out is what else follows from choices, such as
conversions between them: so a price that is found so is one to begin at, and nothing is concluded from it.

Invariant: by what choices cost and take themselves, `Curve.won` at a price is what `Alone.values` win at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qsync_fx.allocator.exact.linear.program import INFINITY
from qsync_fx.predictor.replay.closed_form import Array


@dataclass(frozen=True)
class Curve:
    """What choices win of a limit at a price, were there nothing but choices.

    Attributes:
        prices: from which on each step is worth it, from the least on.
        wins: by all steps up to each.
    """

    prices: Array
    wins: Array

    def won(self, price: float) -> float:
        """Returns what is won at a price."""
        steps = int(np.searchsorted(self.prices, price, side="right"))
        return float(self.wins[steps - 1]) if steps else 0.0

    def price(self, won: float) -> float:
        """Returns the price at which so much is won, or as much as can be."""
        if not len(self.prices):
            return 0.0
        return float(self.prices[min(int(np.searchsorted(self.wins, won)), len(self.prices) - 1)])


class Alone:
    """Choices by what they cost and take themselves, whatever else follows from them.

    Args:
        groups: the variables of each choice.
        costs: of all variables.
    """

    def __init__(self, groups: Sequence[Sequence[int]], costs: Array) -> None:
        most = max(map(len, groups), default=1)
        # What is not there is what is there already, once more.
        self._groups = np.array([[*group, *[group[0]] * (most - len(group))] for group in groups], np.int64).reshape(
            -1, most
        )
        self._costs = costs[self._groups]
        self._each = np.arange(len(self._groups))

    def values(self, count: int, more: Array | None = None) -> Array:
        """Returns values of all variables at which each choice costs least, with something more on each variable."""
        costs = self._costs if more is None else self._costs + more[self._groups]
        found: Array = np.zeros(count)
        found[self._groups[self._each, costs.argmin(axis=1)]] = 1.0
        return found

    def curve(self, factors: Array) -> Curve:
        """Returns what choices win of a row: the steps along the lower hull of what each costs and takes."""
        weights = factors[self._groups]
        at = self._costs.argmin(axis=1)
        prices, wins = [np.zeros(0)], [np.zeros(0)]
        for _ in range(weights.shape[1] - 1):
            won = weights[self._each, at][:, None] - weights
            dearer = self._costs - self._costs[self._each, at][:, None]
            slopes = np.where(won > 0, dearer / np.where(won > 0, won, 1.0), INFINITY)
            to = slopes.argmin(axis=1)
            slope, step = slopes[self._each, to], won[self._each, to]
            there = slope < INFINITY
            prices.append(slope[there])
            wins.append(step[there])
            at = np.where(there, to, at)
        slope = np.concatenate(prices)
        order = np.argsort(slope, kind="stable")
        return Curve(slope[order], np.cumsum(np.concatenate(wins)[order]))
