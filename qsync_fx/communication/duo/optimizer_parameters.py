"""Parameters that a rank's optimizer steps under DUO: replicated, or sharded.

After each step on shards, ranks all-gather their low-bit differences from the model's parameters;
the next ones include their coding error. Invariant: the models of all ranks are bit-identical.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qsync_fx.communication import bucket as geometry
from qsync_fx.communication.allreduce import Hierarchy, Reducer
from qsync_fx.communication.bucket import Bucket, ParameterSlice
from qsync_fx.communication.codecs import PLAIN
from qsync_fx.communication.compressor_state import CompressorState, finite
from qsync_fx.communication.duo import functional_optimizer
from qsync_fx.communication.duo.offload import Offload
from qsync_fx.communication.statistics import CommunicationStatistics
from qsync_fx.errors import OptionError

_COUNTERS: Final = ("step",)
"""State entries that are not sharded, even if they have the shape of a parameter."""
_PARAMETERS, _SUM, _STATE = 0, 1, 2  # message numbers; for gradients the number is the bucket index
_DIFFERENT: Final = "the parameters of rank {} differ from those of rank {} after an optimizer step"


class ReplicatedParameters:
    """Parameters that each rank's optimizer steps; `committed` are those before the lookahead."""

    tally: CommunicationStatistics | None = None
    sharded = False
    clip_advice = "clip_grad_norm_ and returns nothing"

    def __init__(
        self, parameters: Sequence[nn.Parameter], memory: Offload, keeps: bool = True
    ) -> None:
        self.stepped: Sequence[nn.Parameter] = parameters
        self.committed = self._copies(memory) if keeps else []

    def take(self, optimizer: Optimizer) -> None:
        """Replace the optimizer's parameters by `stepped`."""

    def local_part(self, place: int, gradient: Tensor) -> Tensor:
        """Return a view of the part of a gradient for this rank's optimizer."""
        return gradient

    def reduce(self, reducer: Reducer | Hierarchy, bucket: Bucket) -> None:
        """Average a bucket in place, at least the part for this rank's optimizer."""
        reducer.reduce(bucket)

    def pass_gradients(self, used: bool) -> None:
        """Pass the gradients of a backward pass to the optimizer; skip its step unless `used`."""

    def aside(self) -> Sequence[Tensor | None]:
        """Return gradients that users see but the optimizer does not use."""
        return ()

    def finite(self, step: int) -> bool:
        """Return whether the optimizer's gradients are finite; the same on all ranks."""
        return all(finite(p.grad) for p in self.stepped if p.grad is not None)

    def show(self, step: int, compared: bool) -> None:
        """Write the optimizer's parameters into the model of every rank."""

    def show_exactly(self, step: int) -> None:
        """Write the optimizer's parameters into the model of every rank without coding error."""

    def _copies(self, memory: Offload) -> list[Tensor]:
        values = [p.detach() for p in self.stepped]
        return [memory.copy(value, memory.empty_like(value)) for value in values]

    def nbytes(self, optimizer: Optimizer) -> int:
        """Return the bytes of the optimizer's state and of the parameter copies."""
        values = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [value for value in [*values, *self.committed] if isinstance(value, Tensor)]
        return sum(tensor.nbytes for tensor in tensors)

    def clip(self, limit: float, step: int) -> Tensor:
        """Scale the gradients to a 2-norm of at most `limit`; return the norm before."""
        return nn.utils.clip_grad_norm_(self.stepped, limit)

    def whole_state(self, optimizer: Optimizer, step: int) -> dict[str, Any]:
        """Return the optimizer's state for full parameters, in the format of its `state_dict`."""
        return optimizer.state_dict()

    def reload(self) -> None:
        """Use the model's parameters, which were loaded, as the committed ones."""


class ShardedParameters(ReplicatedParameters):
    """This rank's shard of each parameter; `now` runs a function on the communication thread."""

    sharded = True
    clip_advice = "handle.clip_grad_norm_(1.0)"

    def __init__(
        self,
        group: Any,
        parameters: Sequence[nn.Parameter],
        pieces: Sequence[ParameterSlice],
        state: CompressorState,
        memory: Offload,
        now: Callable[[Callable[[], Tensor]], Tensor],
    ) -> None:
        self._parameters, self._pieces, self._state = parameters, tuple(pieces), state
        self._now = now
        for piece, p in zip(pieces, parameters, strict=True):
            # `empty_like` has the same strides if and only if the tensor is dense in memory.
            if torch.empty_like(p, device="meta").stride() != p.stride():
                text = "the parameter is not dense in memory, so it cannot be sharded"
                do = "make the parameter contiguous, or remove sharded=..."
                raise OptionError(text, where=piece.name, do=do)
        self._reducer = Reducer(group, state)
        self.tally: CommunicationStatistics | None = self._reducer.tally
        shards = [self.local_part(place, p.detach()) for place, p in enumerate(parameters)]
        self.stepped = [nn.Parameter(shard.clone()) for shard in shards]
        self.committed = self._copies(memory)

    def take(self, optimizer: Optimizer) -> None:
        places = {id(p): place for place, p in enumerate(self._parameters)}
        shards: dict[Tensor, Any] = {}
        for p, values in optimizer.state.items():
            if (place := places.get(id(p))) is not None:
                state = {name: self._state_of(place, name, item) for name, item in values.items()}
                shards[self.stepped[place]] = state
        for group in optimizer.param_groups:
            group["params"] = [self.stepped[places[id(p)]] for p in group["params"]]
        optimizer.state.clear()
        optimizer.state.update(shards)
        theirs = optimizer.zero_grad

        # Users see the gradients of the model; shards have copies, so both are cleared.
        @functools.wraps(theirs)
        def zero_grad(set_to_none: bool = True) -> None:
            theirs(set_to_none=set_to_none)
            for p in self._parameters:
                if set_to_none:
                    p.grad = None
                elif p.grad is not None:
                    p.grad = p.grad.detach().zero_()

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def local_part(self, place: int, gradient: Tensor) -> Tensor:
        piece = self._pieces[place]
        return geometry.flat(piece, gradient)[piece.part(self._state.rank)]

    def reduce(self, reducer: Reducer | Hierarchy, bucket: Bucket) -> None:
        assert isinstance(reducer, Reducer), "compress refuses nodes with a sharded optimizer"
        reducer.scatter(bucket)
        rank = self._state.rank
        for piece, gradient in zip(bucket.pieces, bucket.gradients, strict=True):
            reducer.outcome.finite &= finite(geometry.flat(piece, gradient)[piece.part(rank)])

    def pass_gradients(self, used: bool) -> None:
        for place, (p, part) in enumerate(zip(self._parameters, self.stepped, strict=True)):
            if p.grad is None:
                part.grad = None
                continue
            gradient = p.grad
            if gradient.stride() != p.stride():
                gradient = torch.empty_like(p).copy_(gradient)
            part.grad = self.local_part(place, gradient).clone()
            if not used:
                part.grad.fill_(torch.nan)  # skips the step on this rank, too

    def aside(self) -> Sequence[Tensor | None]:
        return [p.grad for p in self._parameters]

    def finite(self, step: int) -> bool:
        return self._total(float(not super().finite(step)), step) == 0

    def nbytes(self, optimizer: Optimizer) -> int:
        return super().nbytes(optimizer) + sum(part.nbytes for part in self.stepped)

    def clip(self, limit: float, step: int) -> Tensor:
        gradients = [p.grad for p in self.stepped if p.grad is not None]
        squares = sum(float(g.double().square().sum()) for g in gradients)
        norm = torch.tensor(self._total(squares, step) ** 0.5)
        for g in gradients:
            g.mul_((limit / (norm + 1e-6)).clamp(max=1.0).to(g.dtype))
        return norm

    def show(self, step: int, compared: bool) -> None:
        self._show(self._reducer, self._pieces, step, compared)

    def show_exactly(self, step: int) -> None:
        state = self._state.like(f"exactly, {self._state.codec}")
        exact = Reducer(self._reducer.group, state, tally=self._reducer.tally)
        pieces = [replace(piece, codec=PLAIN) for piece in self._pieces]
        self._show(exact, pieces, step, compared=True)

    def whole_state(self, optimizer: Optimizer, step: int) -> dict[str, Any]:
        result = super().whole_state(optimizer, step)
        # The dicts of values are the optimizer's own, so they are copied.
        result["state"] = {index: dict(values) for index, values in result["state"].items()}
        order = [p for group in optimizer.param_groups for p in group["params"]]
        places = {id(part): place for place, part in enumerate(self.stepped)}
        entries = [
            (values, name, places[id(order[index])])
            for index, values in result["state"].items()
            for name, value in values.items()
            if _is_sharded(name, value)
        ]
        pieces = [replace(self._pieces[place], codec=PLAIN) for _, _, place in entries]
        shards = [values[name].detach().float() for values, name, _ in entries]
        full = [shard.new_zeros(piece.size) for piece, shard in zip(pieces, shards, strict=True)]

        def work() -> Tensor:
            self._reducer.give(Bucket(_STATE, step, torch.empty(0), pieces, ()), shards, full)
            return torch.empty(0)

        self._now(work)
        for (values, name, place), flat in zip(entries, full, strict=True):
            like = torch.empty_like(self._parameters[place], dtype=values[name].dtype)
            geometry.flat(self._pieces[place], like).copy_(flat)
            values[name] = like.detach()
        return result

    def reload(self) -> None:
        for place, (p, part) in enumerate(zip(self._parameters, self.stepped, strict=True)):
            part.detach().copy_(self.local_part(place, p.detach()))

    def _show(
        self, reducer: Reducer, pieces: Sequence[ParameterSlice], step: int, compared: bool
    ) -> None:
        def work() -> Tensor:
            with torch.no_grad():
                both = zip(pieces, self._parameters, strict=True)
                flats = [geometry.flat(piece, p.detach()) for piece, p in both]
                shown, shards = [flat.float() for flat in flats], []
                for part, flat, piece in zip(self.stepped, shown, pieces, strict=True):
                    shard = part.float()
                    if piece.codec != PLAIN:
                        shard = shard - flat[piece.part(self._state.rank)]
                    shards.append(shard)
                bucket = Bucket(_PARAMETERS, step, torch.empty(0), pieces, ())
                reducer.give(bucket, shards, shown, add=True)
                for p, flat, result in zip(self._parameters, flats, shown, strict=True):
                    flat.copy_(result)
                    torch.autograd.graph.increment_version(p)
                    if compared:
                        reducer.add_to_digest(result)
            reducer.settle(step, compared, _DIFFERENT)
            return torch.empty(0)

        self._now(work)

    def _state_of(self, place: int, name: str, value: Any) -> Any:
        p = self._parameters[place]
        if not _is_sharded(name, value):
            return functional_optimizer.copied(value)
        if value.shape != p.shape:
            shape, where = list(value.shape), self._pieces[place].name
            text = f"the optimizer state {name} {shape} cannot be sharded like its parameter"
            raise OptionError(f"{text} {list(p.shape)}", where=where, do="remove sharded=...")
        return self.local_part(place, torch.empty_like(p, dtype=value.dtype).copy_(value)).clone()

    def _total(self, value: float, step: int) -> float:
        """Return the sum of `value` over ranks, in rank order."""
        size = 2 * self._state.world  # an FP64 value is sent as two FP32 values
        place = ParameterSlice("a sum over ranks", 0, size, PLAIN, tuple(range(0, size + 1, 2)))
        shard = torch.tensor([value], dtype=torch.float64).view(torch.float32)
        every = torch.zeros(self._state.world, dtype=torch.float64)
        bucket = Bucket(_SUM, step, torch.empty(0), [place], ())

        def work() -> Tensor:
            self._reducer.give(bucket, [shard], [every.view(torch.float32)])
            return every

        return float(sum(self._now(work).tolist()))


def _is_sharded(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and name not in _COUNTERS and value.dim() > 0
