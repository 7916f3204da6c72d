"""Two ranks in one process: the gradient is averaged over two parts of a batch, each computed under a plan of its own.

Where nothing is drawn to round it, the sum is that of two ranks under DistributedDataParallel to the last bit: each part's gradient is
halved, which is exact, and both are added in FP32; tests/benchmarks/test_paper_experiments.py compares the
two. In INT8 the draws are others.

Invariant: both replicas have the same parameters, which are one in memory, and statistics of batch norms of their own.
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
"""From a model, and what a part of a batch is, to the mean loss over its samples."""


class Pair:
    """
    Args:
        model: that is trained.
        plans: of both ranks.
        loss: of a part of a batch.
        inner: what compiles the rewritten graphs.
    """

    def __init__(
        self, model: nn.Module, plans: Sequence[Plan], loss: Loss, inner: str = "aot_eager"
    ) -> None:
        self.model, self._loss = model, loss
        self.replicas = [model, *(_sharing(model) for _ in plans[1:])]
        self._compiled = []
        for replica, plan in zip(self.replicas, plans, strict=True):
            options: dict[str, Any] = {"plan": plan, "inner_backend": inner}
            self._compiled.append(
                torch.compile(replica, backend="qsync", options=options, dynamic=False)
            )

    def backward(self, parts: Sequence[Inputs]) -> float:
        """Adds the mean gradient over all samples to the parameters' gradients, and returns their mean loss.

        A part counts by its samples, as where a rank multiplies its loss with its share.
        """
        samples = sum(len(part[0]) for part in parts)
        total = 0.0
        for compiled, part in zip(self._compiled, parts, strict=True):
            loss = self._loss(compiled, part) * (len(part[0]) / samples)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    def restart(self, like: nn.Module) -> None:
        """Takes over the parameters and buffers of a model; what was compiled stays."""
        for replica in self.replicas:
            replica.load_state_dict(like.state_dict())

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Gives all replicas the mean of their batch norms' statistics, as ranks do at the end of an epoch."""
        for same in zip(*(replica.buffers() for replica in self.replicas), strict=True):
            if same[0].is_floating_point():
                mean = sum(buffer / len(same) for buffer in same)
                for buffer in same:
                    buffer.copy_(mean)


def _sharing(model: nn.Module) -> nn.Module:
    """Returns a copy of a model with its parameters, and buffers of its own."""
    same = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, same)
