"""What the optimizer of a rank steps: all parameters, or, where it is sharded, the rank's part of each.

Invariant: what is held of a parameter lies in its memory's order, so that a step of it is that part of a step of the whole.
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
    """All parameters, on every rank.

    Attributes:
        stepped: what the optimizer steps, by the place of the parameter.
        kept: what is known of them in full, before the look ahead.
        tally: what was sent of parameters; None where nothing is.
    """

    tally: CommunicationStatistics | None = None
    sharded = False

    def __init__(self, parameters: Sequence[nn.Parameter], keeps: bool = True) -> None:
        self.stepped: Sequence[nn.Parameter] = parameters
        self.kept = [p.detach().clone() for p in parameters] if keeps else []

    def take(self, optimizer: Optimizer) -> None:
        """Has an optimizer of the parameters step what is held of them."""

    def own(self, place: int, gradient: Tensor) -> Tensor:
        """Returns what of a parameter's gradient is for the optimizer of this rank: a view."""
        return gradient

    def reduce(self, reducer: Reducer, bucket: Bucket) -> None:
        """Puts the mean over ranks in the place of a bucket's values, as far as this rank's optimizer needs it."""
        reducer.reduce(bucket)

    def arrived(self, used: bool) -> None:
        """Gives the optimizer the gradients of a backward pass; `used` says whether a step is to be taken with them."""

    def aside(self) -> Sequence[Tensor | None]:
        """Returns gradients that users see, and no step is taken with."""
        return ()

    def finite(self, step: int) -> bool:
        """Returns whether the gradients that a step is about to be taken with are finite; the same on all ranks."""
        return finite(p.grad for p in self.stepped if p.grad is not None)

    def show(self, step: int, compared: bool) -> None:
        """Has the model run on what the optimizer has made of parameters."""

    def show_exactly(self, step: int) -> None:
        """The same, to the last bit."""

    def nbytes(self, optimizer: Optimizer) -> int:
        """Returns the bytes of the optimizer's state and of what is kept beside the model's parameters."""
        state = [
            value
            for values in optimizer.state.values()
            for value in values.values()
            if isinstance(value, Tensor)
        ]
        return sum(tensor.nbytes for tensor in [*state, *self.kept])

    def clip(self, limit: float, step: int) -> Tensor:
        """Scales gradients so that their 2-norm is at most `limit`; returns what it was."""
        return nn.utils.clip_grad_norm_(self.stepped, limit)

    def whole_state(self, optimizer: Optimizer, step: int) -> dict[str, Any]:
        """Returns the optimizer's state of all parameters, as its `state_dict` has it."""
        return optimizer.state_dict()

    def reload(self) -> None:
        """Takes the parameters of the model, which were loaded, for what is known."""
