"""Two data-parallel ranks simulated in one process, each with its own plan.

Without stochastic rounding the averaged gradient is bit-equal to the gradient of two ranks under
DistributedDataParallel: each part's gradient is halved, which is exact, and both are added in FP32.
tests/benchmarks/test_paper_experiments.py compares the two. INT8 rounds stochastically, with other
random numbers than the two ranks.

Invariant: the replicas share their parameters' memory and have their own batch norm statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qsync_fx import Plan

Inputs = tuple[Tensor, ...]
Loss = Callable[[Any, Inputs], Tensor]
"""Function of a model and a rank's inputs that returns the mean loss over the samples."""


class Pair:
    """Replicas of a model, one per plan, that share parameters.

    Args:
        model: to train.
        plans: one per rank.
        loss: of a rank's inputs.
        options: of the backend, "aot_eager" inside by default.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[Plan],
        loss: Loss,
        **options: Any,
    ) -> None:
        self.model, self._loss = model, loss
        self.replicas = [model, *(_sharing(model) for _ in plans[1:])]
        self._compiled = []
        for replica, plan in zip(self.replicas, plans, strict=True):
            settings: dict[str, Any] = {"inner_backend": "aot_eager", **options, "plan": plan}
            self._compiled.append(
                torch.compile(replica, backend="qsync", options=settings, dynamic=False)
            )

    def backward(self, parts: Sequence[Inputs]) -> float:
        """Accumulate the mean gradient over all samples, and return the mean loss.

        A rank's loss is weighted with its share of the samples.
        """
        samples = sum(len(part[0]) for part in parts)
        total = 0.0
        for compiled, part in zip(self._compiled, parts, strict=True):
            loss = self._loss(compiled, part) * (len(part[0]) / samples)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    def restart(self, like: nn.Module) -> None:
        """Load the parameters and buffers of a model without recompiling."""
        for replica in self.replicas:
            replica.load_state_dict(like.state_dict())

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Set batch norm statistics to their mean over the replicas, as ranks do per epoch."""
        for same in zip(*(replica.buffers() for replica in self.replicas), strict=True):
            if same[0].is_floating_point():
                mean = sum(buffer / len(same) for buffer in same)
                for buffer in same:
                    buffer.copy_(mean)


def _sharing(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares its parameters but not its buffers."""
    same = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, same)
