"""Quantized copies of weights that outlive a pass, and whether they are still right.

Invariant: a copy is given out for the very tensor that it was made of, while no optimizer has taken a step, torch has counted no write to
it, and it lies where it lay. Steps are asked themselves, since those of torch with `fused=True` count nothing; and those of all
optimizers, since one may update other tensors that a weight is made from: its part of FSDP's, or a copy in FP32. A copy holds on to that
memory, so that no other values come to lie at the address. What is written past all of that cannot be seen: so some values are compared
when a copy is used for the 1st, 2nd, 4th, 8th time and so on, and a weight whose values have changed is told of and quantized in each pass
from then on.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from qsync_fx.backend.operators.casts.quantize import quantize
from qsync_fx.errors import PlanWarning

_COMPARED: Final = 256
"""How many values of a weight are compared, as far apart as they can be."""


class Made(NamedTuple):
    """How a copy is made: what `qsync::quantize` is given beside the weight and a random number."""

    stream: int
    fmt: str
    rounding: str
    keep: tuple[int, ...]

    def of(self, weight: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(weight.detach(), seed, self.stream, self.fmt, self.rounding, self.keep)


@dataclass
class _Copy:
    state: tuple[object, ...]
    memory: torch.UntypedStorage
    compared: Tensor
    pair: tuple[Tensor, Tensor]


@dataclass
class _Kept:
    """What is kept of a weight.

    Attributes:
        copies: by format, rounding, dimensions with scales, and the stream of the device that made it; not by which graph did.
        used: how often a copy was given out again, over all steps.
        trusted: whether torch's counter has told of all that was written, as far as was seen.
    """

    copies: dict[tuple[object, ...], _Copy] = field(default_factory=dict)
    used: int = 0
    trusted: bool = True


_kept: Final[MutableMapping[Tensor, _Kept]] = WeakTensorKeyDictionary()


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_after_a_step)


def _after_a_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for kept in _kept.values():
        kept.copies.clear()


def copies(weights: Sequence[tuple[Tensor, Made]], seed: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns values and scales of weights: kept ones, and where there are none new ones, rounded by `seed`."""
    queue = _queue(seed.device)
    _watch_steps()
    return [_copy(weight, made, seed, queue) for weight, made in weights]


def _queue(device: torch.device) -> int | None:
    """Returns the stream that kernels are launched to; None where what runs now is recorded, to be run again without Python."""
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return int(torch.cuda.current_stream(device).cuda_stream)


def _copy(weight: Tensor, made: Made, seed: Tensor, queue: int | None) -> tuple[Tensor, Tensor]:
    # What was made in inference mode has no counter, and DDP has what is compiled run once on tensors without values.
    if queue is None or weight.is_inference() or isinstance(weight, FakeTensor):
        return made.of(weight, seed)
    kept = _kept.get(weight)
    if kept is None:
        kept = _kept[weight] = _Kept()
    if not kept.trusted:
        return made.of(weight, seed)
    state = weight._version, weight.data_ptr(), weight.dtype, weight.device, weight.shape, weight.stride()
    key = (made.fmt, made.rounding, made.keep, queue)
    found = kept.copies.get(key)
    if found is not None and found.state == state:
        kept.used += 1
        if kept.used & (kept.used - 1) or torch.equal(found.compared, _some(weight)):
            return found.pair
        kept.trusted = False
        kept.copies.clear()
        _tell(weight)
        return made.of(weight, seed)
    # What was made of other values is read no more, by whichever graph.
    kept.copies = {other: copy for other, copy in kept.copies.items() if copy.state == state}
    pair = made.of(weight, seed)
    kept.copies[key] = _Copy(state, weight.untyped_storage(), _some(weight).clone(), pair)
    return pair


def _some(weight: Tensor) -> Tensor:
    """Returns some values of a weight as they lie in memory, in whole numbers: not a number is not equal to itself."""
    held = weight.detach()
    # An odd step meets all columns of a matrix whose rows have an even length.
    step = held.numel() // _COMPARED | 1
    span = 1 + sum((size - 1) * stride for size, stride in zip(held.shape, held.stride(), strict=True))
    if span == held.numel():  # whichever way it lies, without gaps
        some = held.as_strided((-(-span // step),), (step,))
    else:
        some = held.flatten()[::step]
    return some.contiguous().view(torch.uint8)


def _tell(weight: Tensor) -> None:
    warnings.warn(
        f"a weight {list(weight.shape)} was written to without torch knowing (through .data, numpy or memory that is shared), and a pass "
        'may have read it as it was before: the option "weights_once" is the word that this does not happen. It is quantized in each pass '
        "from now on; write to weights under torch.no_grad(), or call torch.autograd.graph.increment_version(weight) behind each write",
        PlanWarning,
        stacklevel=2,
    )
