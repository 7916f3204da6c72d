"""What errors at each operator do to the gradients of all parameters, for all operators and precisions in one run.

A tensor t of an operator that becomes t + e changes the gradients G of the parameters by H e, H the derivative of G by t: by what follows
in the forward pass, and by the operator's own part in the backward pass. For random signs r, one a parameter, the square of r'H e is
|H e|**2 in the mean, and H'r is the gradient of r'G by t: one backward pass through the backward pass gives it for all tensors of a model.
Likewise an error in the gradient of t counts by the derivative of r'G by that gradient. Errors that are random have no
products in the mean: of them sum_i E[e_i**2] (H'r)_i**2 is taken. Those of roundings to nearest belong together, and may add up.

Gates flip beside that (see `gates`). How much noise gets in front of a gate is asked of a few gates a run, those that were asked
least, each by one backward pass from there.

Invariant: unbiased where errors are small against what the model computes with. A run costs about four of the model's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync_fx.ops import Place
from qsync_fx.profiling.statistics.gates import Flips, Gate
from qsync_fx.profiling.statistics.local import erring
from qsync_fx.profiling.statistics.roundings import Changes
from qsync_fx.profiling.statistics.step import Key, Step
from qsync_fx.profiling.statistics.tapped import tapped
from qsync_fx.profiling.statistics.taps import Seen, Taps
from qsync_fx.profiling.statistics.undisturbed import trained


@dataclass
class Reach:
    """The variance of what gates read that operators cause: sums over runs, by gate, and by operator and precision."""

    sums: dict[str, dict[Key, float]] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)

    def rarest(self, gates: Sequence[Gate], most: int) -> list[Gate]:
        """Returns the gates to ask: those that never were, else the ones that were asked least."""
        never = [gate for gate in gates if gate.name not in self.runs]
        return never or sorted(gates, key=lambda gate: self.runs[gate.name])[:most]

    def deviation(self, gate: str, key: Key) -> float:
        return math.sqrt(self.sums.get(gate, {}).get(key, 0.0) / max(1, self.runs.get(gate, 0)))


@dataclass
class SecondOrder:
    """The method "exact".

    Args:
        gates: how many gates are asked for the noise in front of them in each step.

    Attributes:
        reach: what all steps so far have said of that.
    """

    gates: int = 4
    reach: Reach = field(default_factory=Reach)

    def look(self, step: Step) -> dict[Key, float]:
        taps = Taps({op: {p for change in by.values() for p in change.places} for op, by in step.changes.items()})
        step.again(0)
        with step.captured.running(tapped(taps.tap, taps.watch)), sdpa_kernel(SDPBackend.MATH):
            loss = step.loss()
        parameters = list(trained(step.captured.model).values())
        return _Run(self, step.changes, taps, parameters, step.generator).look(loss)


class _Run:
    def __init__(
        self, of: SecondOrder, changes: Changes, taps: Taps, parameters: list[Tensor], generator: torch.Generator
    ) -> None:
        self._changes, self._reach, self._taps = changes, of.reach, taps
        self._parameters, self._generator = parameters, generator
        self._asked = of.reach.rarest(taps.gates, of.gates)
        places = [(at, place) for at, seen in enumerate(taps.seen) for place in seen.tensors]
        self._at = {place: number for number, place in enumerate(places)}
        self._edges = [taps.seen[at].tensors[place].edge for at, place in places]

    def look(self, loss: Tensor) -> dict[Key, float]:
        gates, edges, parameters = self._taps.gates, self._edges, self._parameters
        ends: list[GradientEdge] = [*(gate.entry for gate in gates), *(gate.exit for gate in gates)]
        ways: list[Any] = [*parameters, *edges, *ends]
        found: Sequence[Tensor | None] = torch.autograd.grad(loss, ways, create_graph=True, allow_unused=True)
        own, inner = found[: len(parameters)], found[len(parameters) :]
        probed = torch.stack([(g * self._signs(g)).sum() for g in own if g is not None]).sum()
        known = [at for at, g in enumerate(inner) if g is not None and g.requires_grad]
        wanted: list[Any] = [*edges, *(inner[at] for at in known)]
        # Gradients of what is linear in everything depend on nothing.
        derived: Sequence[Tensor | None] = [None] * len(wanted)
        if probed.requires_grad:
            derived = torch.autograd.grad(probed, wanted, allow_unused=True, retain_graph=True)
        self._gradients = [None if g is None else g.detach() for g in inner]
        self._by_value = derived[: len(edges)]
        self._by_gradient = dict(zip(known, derived[len(edges) :], strict=True))
        flips = {gate.name: self._flips(gate, len(edges) + at) for at, gate in enumerate(gates)}
        self._gains = [self._gain(gate) for gate in self._asked]
        self._caught: list[dict[Key, float]] = [{} for _ in self._asked]
        sums = self._smooth()
        for gate, caught in zip(self._asked, self._caught, strict=True):
            self._reach.runs[gate.name] = self._reach.runs.get(gate.name, 0) + 1
            kept = self._reach.sums.setdefault(gate.name, {})
            for key, square in caught.items():
                kept[key] = kept.get(key, 0.0) + square / max(1, gate.numel)
        for name, of_gate in flips.items():
            for key in self._reach.sums.get(name, {}):
                sums[key] = sums.get(key, 0.0) + of_gate.at(self._reach.deviation(name, key))
        return sums

    def _smooth(self) -> dict[Key, float]:
        """Returns what there is without gates, and notes what gets in front of those that are asked."""
        random: dict[Key, float] = {}
        fixed: dict[Key, float] = {}
        for at, seen in enumerate(self._taps.seen):
            gradients: dict[Place, Tensor] = {}
            for place in seen.tensors:
                if (g := self._gradients[self._at[at, place]]) is not None:
                    gradients[place] = g
            for name in self._changes[seen.operator]:
                self._add((seen.operator, name), at, seen, gradients, random, fixed)
        return {key: random[key] + fixed[key] ** 2 for key in random}

    def _add(
        self,
        key: Key,
        at: int,
        seen: Seen,
        gradients: Mapping[Place, Tensor],
        random: dict[Key, float],
        fixed: dict[Key, float],
    ) -> None:
        random.setdefault(key, 0.0)
        fixed.setdefault(key, 0.0)
        for one in erring(seen, self._changes[key[0]][key[1]], gradients):
            number = self._at[at, one.place]
            weight = self._by_gradient.get(number) if one.gradient else self._by_value[number]
            if weight is not None and one.random:
                random[key] += float((one.values * weight.double().square()).sum())
            elif weight is not None:
                fixed[key] += float((one.values * weight.double()).sum())
            if not one.gradient:
                for gains, caught in zip(self._gains, self._caught, strict=True):
                    if (gain := gains[number]) is not None:
                        caught[key] = caught.get(key, 0.0) + float((one.square * gain.double().square()).sum())

    def _flips(self, gate: Gate, at: int) -> Flips:
        slope, incoming = self._by_gradient.get(at), self._gradients[at + len(self._taps.gates)]
        return Flips() if slope is None or incoming is None else Flips(gate.histogram(slope, incoming))

    def _gain(self, gate: Gate) -> Sequence[Tensor | None]:
        """Returns what each tensor does to a random sum of what a gate reads."""
        like = self._gradients[len(self._edges) + self._taps.gates.index(gate)]
        if like is None:
            return [None] * len(self._edges)
        return torch.autograd.grad([gate.entry], self._edges, [self._signs(like)], allow_unused=True, retain_graph=True)

    def _signs(self, like: Tensor) -> Tensor:
        found = torch.randint(0, 2, like.shape, generator=self._generator) * 2 - 1
        return found.to(like)
