"""One step of a model as the methods see it: what to run, again and again, and what operators may do otherwise in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from qsync_fx.ops import Place
from qsync_fx.profiling.statistics.tensors.captured import Captured, Run, as_it_is
from qsync_fx.profiling.statistics.tensors.following import Follower
from qsync_fx.profiling.statistics.tensors.roundings import Changes
from qsync_fx.profiling.statistics.tensors.undisturbed import Again, trained

Key = tuple[str, str]
"""An operator and a precision."""

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """
    Attributes:
        captured: the model.
        loss: computes the loss of this step's batch.
        again: starts a pass from the same state.
        changes: what operators do otherwise in each precision.
        generator: for what is drawn beside the model.
        samples: of the batch.
    """

    captured: Captured
    loss: Callable[[], Tensor]
    again: Again
    changes: Changes
    generator: torch.Generator
    samples: int = 1

    @property
    def keys(self) -> list[Key]:
        """The operators and precisions in which something changes."""
        return [(op, name) for op, by in self.changes.items() for name, change in by.items() if change.places]

    @property
    def places(self) -> dict[str, set[Place]]:
        """Of each operator the places of the tensors that change in some precision."""
        return {op: {p for change in by.values() for p in change.places} for op, by in self.changes.items()}

    @property
    def following(self) -> dict[str, dict[Follower, list[Key]]]:
        """Of each operator that follows others, how, and whom in which precisions."""
        found: dict[str, dict[Follower, list[Key]]] = {}
        for op, name in self.keys:
            for one in self.changes[op][name].following:
                found.setdefault(one.operator, {}).setdefault(one, []).append((op, name))
        return found

    def gradients(self, run: Run = as_it_is, sample: int = 0) -> Gradients:
        """Returns the gradients of one pass, whose graphs `run` runs; `sample` tells apart what is rounded at random."""
        self.again(sample)
        with self.captured.running(run):
            return gradients_of(self.loss(), self.captured.model)


class Method(Protocol):
    """A way to find what operators add; it may learn from step to step."""

    def look(self, step: Step) -> dict[Key, float]:
        """Returns what each operator adds in each precision in a step; keys that are left out add nothing."""


def gradients_of(loss: Tensor, model: nn.Module) -> Gradients:
    """Returns the gradients of a loss by the parameters of a model that it depends on."""
    parameters = trained(model)
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: g.detach() for name, g in zip(parameters, found, strict=True) if g is not None}


def square_distance(found: Gradients, exact: Gradients) -> float:
    """Returns the square of the distance of two sets of gradients."""
    return sum(float((found[name].double() - g.double()).square().sum()) for name, g in exact.items() if name in found)
