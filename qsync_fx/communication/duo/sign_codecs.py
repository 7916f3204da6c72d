"""Codecs of DUO's fast reduction, whose errors the slow one corrects: they have no error feedback.

Invariant: NaN or infinity in the gradient of one rank makes the fast mean NaN on all ranks, also
with 0 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

import torch
from torch import Tensor

from qsync_fx.communication.codecs import NAMES, PLAIN, Codec, buffers, codec_named
from qsync_fx.communication.codecs.codec import Draw, Feedback
from qsync_fx.communication.codecs.onebit import Reshaped
from qsync_fx.communication.codecs.qsgd import UNITS, Qsgd
from qsync_fx.communication.codecs.truncation import Adaptive
from qsync_fx.communication.ddp_hook import Assigned, to_all
from qsync_fx.errors import OptionError, nearest


@dataclass(frozen=True)
class ZeroBit(Codec):
    """Codec that sends only whether all values are finite; decodes to zeros, or to NaN."""

    name: str = "nothing"

    @property
    def unit(self) -> int:
        return 1

    def nbytes(self, n: int) -> int:
        return _FLAG if n else 0

    def theory(self, n: int) -> float:
        return 0.0

    def encode(self, values: Tensor, wire: Tensor, draw: Draw, residual: Feedback = None) -> None:
        buffers.long_enough(wire, self.nbytes(values.numel()))
        is_finite = values.isfinite().all()
        flag = torch.where(is_finite, 0.0, torch.nan)  # on the device, without waiting for it
        wire[:_FLAG].view(torch.float32).copy_(flag)

    def decode(self, wire: Tensor, values: Tensor, add: bool = False, last: bool = False) -> None:
        buffers.long_enough(wire, self.nbytes(values.numel()))
        buffers.put(wire[:_FLAG].view(torch.float32).expand_as(values), values, add)


_FLAG: Final = 4


@dataclass(frozen=True)
class SignBit(Reshaped):
    """1bitSGD* without error feedback."""

    residual: ClassVar[bool] = False


@dataclass(frozen=True)
class Duo:
    """Configuration of DUO: the codec of the fast reduction, without error feedback.

    Without `ahead`, parameters take no lookahead step with the fast mean: they are the committed
    ones, one gradient behind. With 0 bits, the lookahead step still applies momentum.

    Attributes:
        fast: codec of the fast reduction.
        name: in reports.
        ahead: whether parameters take a lookahead step.
        offload: whether DUO's copies of gradients, parameters and optimizer state are in host
            memory; None: if the model is on a GPU.
    """

    fast: Codec
    name: str = "duo"
    ahead: bool = True
    # Results do not depend on it, so states of one setting load with another one.
    offload: bool | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.fast.residual or isinstance(self.fast, Adaptive):
            text = f"DUO's fast codec {self.fast.name} depends on the gradients of earlier steps"
            do = "use a codec without error feedback, such as SignBit(64) for one bit"
            raise OptionError(text, where="Duo(fast=...)", do=do)

    def assigned(self, sizes: Sequence[int], least: int | None = None) -> Assigned:
        """Return the fast codec of each parameter; with 0 bits, small parameters have it too."""
        if least is None and isinstance(self.fast, ZeroBit):
            least = 0
        result = to_all(self.fast, sizes, least)
        return replace(result, name=self.name, signature=repr(self), text=repr(self))


_QSGD = {bits: Qsgd(bits, UNITS[bits]) for bits in (2, 4, 8)}
_FAST: Final[Mapping[int, Codec]] = {0: ZeroBit(), 1: SignBit(64), **_QSGD, 32: PLAIN}
DUOS: Final = {f"duo{bits}": Duo(codec, f"duo{bits}") for bits, codec in _FAST.items()}
"""Configurations by name. With 32 bits, both means are equal, and so is training without DUO."""


def weights_codec(duo: Duo, requested: str | Codec | None) -> Codec:
    """Return the codec for differences of sharded parameters; raise `OptionError` if unsuitable.

    The default is FP32 for FP32 gradients, else QSGD with 4 bits, or those of the fast QSGD.
    """
    if requested is None:
        if duo.fast == PLAIN:
            return PLAIN
        bits = max(duo.fast.bits, 4) if isinstance(duo.fast, Qsgd) else 4
        return Qsgd(bits, UNITS[bits])
    result = codec_named(requested) if isinstance(requested, str) else requested
    if result.residual or isinstance(result, Adaptive | ZeroBit):
        text = f"differences of parameters cannot be sent with {result.name}"
        do = 'use a codec with fixed bits and no error feedback, such as "qsgd4", or True'
        raise OptionError(text, where="compress(..., sharded=...)", do=do)
    return result


def way_named(name: str) -> Codec | Duo:
    """Return the codec or DUO configuration of this name; raise `OptionError` if it is unknown."""
    if name in DUOS:
        return DUOS[name]
    if name in NAMES:
        return codec_named(name)
    raise OptionError(f"unknown gradient codec {name!r}", do=nearest(name, [*NAMES, *DUOS]))
