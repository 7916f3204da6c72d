"""Parameters that a rank's optimizer steps; a sharded optimizer overrides them with shards.

Invariant: values are in memory order, so that a step on a shard is the shard of a full step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from qsync_fx.communication.allreduce import Reducer
from qsync_fx.communication.bucket import Bucket
from qsync_fx.communication.duo.pending_step import finite
from qsync_fx.communication.statistics import CommunicationStatistics


class ReplicatedParameters:
    """All parameters on every rank.

    Attributes:
        stepped: parameters of the optimizer, by parameter index.
        kept: committed values, before the lookahead step.
        tally: statistics of parameter exchange; None without exchange.
    """

    tally: CommunicationStatistics | None = None
    sharded = False

    def __init__(self, parameters: Sequence[nn.Parameter], keeps: bool = True) -> None:
        self.stepped: Sequence[nn.Parameter] = parameters
        self.kept = [p.detach().clone() for p in parameters] if keeps else []

    def take(self, optimizer: Optimizer) -> None:
        """Replace the optimizer's parameters by `stepped`."""

    def own(self, place: int, gradient: Tensor) -> Tensor:
        """Return a view of the part of a gradient for this rank's optimizer."""
        return gradient

    def reduce(self, reducer: Reducer, bucket: Bucket) -> None:
        """Average a bucket in place, at least the part for this rank's optimizer."""
        reducer.reduce(bucket)

    def arrived(self, used: bool) -> None:
        """Pass the gradients of a backward pass to the optimizer; skip its step unless `used`."""

    def aside(self) -> Sequence[Tensor | None]:
        """Return gradients that users see but the optimizer does not use."""
        return ()

    def finite(self, step: int) -> bool:
        """Return whether the optimizer's gradients are finite; the same on all ranks."""
        return finite(p.grad for p in self.stepped if p.grad is not None)

    def show(self, step: int, compared: bool) -> None:
        """Write the optimizer's parameters into the model of every rank."""

    def show_exactly(self, step: int) -> None:
        """Write the optimizer's parameters into the model of every rank without coding error."""

    def nbytes(self, optimizer: Optimizer) -> int:
        """Return the bytes of the optimizer's state and of the parameter copies."""
        state = [
            value
            for values in optimizer.state.values()
            for value in values.values()
            if isinstance(value, Tensor)
        ]
        return sum(tensor.nbytes for tensor in [*state, *self.kept])

    def clip(self, limit: float, step: int) -> Tensor:
        """Scale the gradients to a 2-norm of at most `limit`; return the norm before."""
        return nn.utils.clip_grad_norm_(self.stepped, limit)

    def whole_state(self, optimizer: Optimizer, step: int) -> dict[str, Any]:
        """Return the optimizer's state for full parameters, in the format of its `state_dict`."""
        return optimizer.state_dict()

    def reload(self) -> None:
        """Use the model's parameters, which were loaded, as the committed ones."""
