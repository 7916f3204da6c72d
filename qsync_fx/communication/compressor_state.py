"""What a compressed training remembers: what codecs have left of gradients, and where the random streams are.

Invariant: it is kept by parameter, in the order that its values are coded in. A rank that goes on from what it saved sends the same bytes
as one that never stopped.

What a user holds of a training whose gradients are compressed, whatever sends them.

Invariant: each rank saves and loads its own state, and goes on from it with the same bits.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx.communication import bucket
from qsync_fx.communication.bucket import ParameterSlice
from qsync_fx.communication.codecs.codec import Draw
from qsync_fx.communication.error_feedback import CPU, Residuals
from qsync_fx.communication.statistics import Report
from qsync_fx.errors import OptionError


class CompressorHandle(ABC):
    """What `qsync_fx.distributed.compress` returns."""

    _buckets = 0
    """Buckets of the last step; units, of a model that is sharded."""

    def __repr__(self) -> str:
        """Return one line for people; it waits for no other rank."""
        return self.report().line(self._buckets)

    @abstractmethod
    def wait(self) -> None:
        """Returns when everything that was given is sent and received.

        Raises:
            RankError: a rank is gone, or a message could not be read.
        """

    def flush(self) -> None:
        """Brings parameters to where all gradients so far have been used in full: before evaluation, before parameters are saved for use
        and at the end of training. With DUO alone something is outstanding between steps."""
        self.wait()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns what it takes to go on with the same bits, beside the states of the model and of the optimizer. Each rank saves
        its own."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned on this rank. On another one, or among more or fewer, what belongs to a rank is dropped,
        with a warning.

        Raises:
            OptionError: it is of another codec or another model.
        """

    @abstractmethod
    def report(self) -> Report:
        """Returns what this rank has sent so far, how long that took, and what it changed."""

    @abstractmethod
    def statement(self) -> dict[str, list[str]]:
        """Returns what all ranks have to agree on before they send each other anything."""


_FORMAT: Final = "qsync-compression"
_VERSION: Final = 2
_READ: Final = (1, 2)
"""The first says nothing of scales of the loss."""
_GOLDEN: Final = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: steps have seeds far apart


@dataclass
class CompressorState:
    """Attributes:
    rank, world: of the process group.
    codec: what the ranks have agreed on, as text.
    seed: of all random streams.
    device: where gradients are coded; what is left of them lies there, too.
    step: how many steps have begun.
    sent: what this rank's gradients have left.
    owned: what the sums that this rank sends have left: of each parameter its part alone.
    control: what AQGB foresees the next step from; empty for other codecs.
    """

    rank: int
    world: int
    codec: str
    seed: int
    device: torch.device = CPU
    step: int = 0
    sent: Residuals = field(default_factory=Residuals)
    owned: Residuals = field(default_factory=Residuals)
    control: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sent.device = self.owned.device = self.device

    def draw(self, piece: ParameterSlice, step: int, first: int, summed: bool) -> Draw:
        """Returns where the random numbers for values of a parameter come from, from index `first` on.

        Sums have streams that no rank is part of: whoever sums a value rounds it alike.
        """
        stream = piece.index * (self.world + 1) + (self.world if summed else self.rank)
        return Draw((self.seed + step * _GOLDEN) % 2**64, stream % 2**32, first)

    def residual(self, piece: ParameterSlice, part: slice, summed: bool) -> Tensor | None:
        """Returns what was left of a part of a parameter, to be changed in place; None where the codec leaves nothing."""
        if not piece.codec.residual:
            return None
        if summed:
            return self.owned.part(
                piece.name, part.stop - part.start, slice(0, part.stop - part.start)
            )
        return self.sent.part(piece.name, piece.size, part)

    def spend(self, piece: ParameterSlice, values: Tensor) -> None:
        """Adds to a gradient what another codec has left of those before, where the one that it has now leaves nothing."""
        if not piece.codec.residual and piece.name in self.sent.values:
            self.sent.spend(piece.name, values)

    def recode(self, old: ParameterSlice, new: ParameterSlice, like: Tensor) -> None:
        """Keeps what was left of a parameter's gradients for another codec; `like` is a tensor that lies as they do.

        What is left of sums is that of their mean: a rank that adds it, times the ranks, to its own gradient has it arrive.
        """
        scale, laid = 0.0, torch.zeros_like(like)
        result = bucket.flat(old, laid)
        if old.name in self.sent.values:
            left, scale = self.sent.take(old.name)
            result += left
        if old.name in self.owned.values:
            left, of = self.owned.take(old.name)
            scale = scale or of
            result[old.part(self.rank)] += left * (self.world * scale / of)
        if scale:
            bucket.put_back(old, laid, result)
            self.sent.values[new.name] = bucket.flat(new, laid).clone()
            self.sent.scales[new.name] = scale

    @property
    def undone(self) -> bool:
        """Whether steps can be taken back."""
        return self.sent.undone

    @undone.setter
    def undone(self, wanted: bool) -> None:
        self.sent.undone = self.owned.undone = wanted

    def begin(self, scale: float) -> None:
        """Says what the loss is multiplied by whose gradients come."""
        self.sent.scale = self.owned.scale = scale

    def settle(self, used: bool) -> None:
        """Ends a step; one whose gradients are not used leaves nothing, where it can be taken back."""
        self.sent.settle(used)
        self.owned.settle(used)

    def saved(self) -> dict[str, Any]:
        """Returns what `load` takes: a copy."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "codec": self.codec,
            "rank": self.rank,
            "world": self.world,
            "seed": self.seed,
            "step": self.step,
            "sent": self.sent.saved(),
            "owned": self.owned.saved(),
            "scales": {"sent": dict(self.sent.scales), "owned": dict(self.owned.scales)},
            "control": self.control,
        }

    def load(self, saved: Mapping[str, Any], pieces: Iterable[ParameterSlice]) -> None:
        """Goes on from what `saved` returned. What was left of gradients is dropped, with a warning, where ranks are others.

        Raises:
            OptionError: it is no such thing, or that of another codec or model.
        """
        if (
            not isinstance(saved, Mapping)
            or saved.get("format") != _FORMAT
            or saved.get("version") not in _READ
        ):
            raise OptionError(
                "this is no state of a compression", do="give what handle.state_dict() returned"
            )
        if saved["codec"] != self.codec:
            raise OptionError(
                f"the state is that of {saved['codec']}, and gradients are sent as {self.codec}",
                do="compress with the same codec as before, or begin without the state",
            )
        sent, owned, scales = (
            dict(saved["sent"]),
            dict(saved["owned"]),
            saved.get("scales", {"sent": {}, "owned": {}}),
        )
        if (saved["rank"], saved["world"]) != (self.rank, self.world):
            if sent or owned:
                warnings.warn(
                    f"the state was saved by rank {saved['rank']} of {saved['world']}, and this is rank {self.rank} of {self.world}: "
                    "what codecs had left of gradients is dropped, and training goes on without it",
                    stacklevel=3,
                )
            sent, owned = {}, {}
        sizes = {piece.name: piece for piece in pieces}
        for name in [*sent, *owned]:
            if name not in sizes:
                raise OptionError(
                    f"the state has what was left of {name}, which the model does not have"
                )
        for name, values in sent.items():
            if values.numel() != sizes[name].size:
                raise OptionError(
                    f"the state has {values.numel()} values of {name}, which has {sizes[name].size}"
                )
        self.seed, self.step = saved["seed"], saved["step"]
        self.sent.load(sent, scales["sent"])
        self.owned.load(owned, scales["owned"])
        self.control = dict(saved.get("control", {}))
