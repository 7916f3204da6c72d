"""State of gradient compression, and the handle that users get.

`CompressorState` has the error feedback of each parameter, in coding order, and the position of the
random streams; `CompressorHandle` is the interface of all compressors.

Invariant: each rank saves and loads its own state. A rank that resumes from it sends the same bits
as one that never stopped.
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
    """Handle of a compressed model, which `qsync_fx.distributed.compress` returns."""

    _buckets = 0
    """Number of buckets in the last step; for FSDP, of units."""

    def __repr__(self) -> str:
        """Return a one-line summary, without waiting for other ranks."""
        return self.report().line(self._buckets)

    @abstractmethod
    def wait(self) -> None:
        """Return once all submitted gradients are sent and received.

        Raises:
            RankError: a rank is gone, or a message could not be read.
        """

    def flush(self) -> None:
        """Apply all pending full-precision gradients to the parameters.

        Call it before evaluation, before saving parameters for use, and at the end of training.
        Only DUO has pending gradients between steps.
        """
        self.wait()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's compression state for a bit-identical resume.

        Save it on each rank, with the states of the model and the optimizer.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from this rank's `state_dict`.

        With another rank or world size, state that belongs to a rank is dropped with a warning.

        Raises:
            OptionError: the state is of another codec or another model.
        """

    @abstractmethod
    def report(self) -> Report:
        """Return the traffic of this rank, its duration, and the coding error so far."""

    @abstractmethod
    def statement(self) -> dict[str, list[str]]:
        """Return the settings that all ranks must agree on before the first message."""


_FORMAT: Final = "qsync-compression"
_VERSION: Final = 2
_READ: Final = (1, 2)
"""Version 1 has no loss scales."""
_GOLDEN: Final = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads the seeds of steps


@dataclass
class CompressorState:
    """Error feedback and random streams of this rank.

    Attributes:
        rank, world: rank and size of the process group.
        codec: description of the codecs that all ranks agree on.
        seed: seed of all random streams.
        device: device of coding and of the error feedback.
        step: number of steps begun.
        sent: error feedback of this rank's gradients.
        owned: error feedback of the means that this rank sends: of its shard of each parameter.
        control: link rate and block times from which AQGB predicts the next step; else empty.
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
        """Return the random stream position for values of a parameter, from index `first` on.

        Means use a stream that does not depend on the rank, so that all ranks round them equally.
        """
        stream = piece.index * (self.world + 1) + (self.world if summed else self.rank)
        return Draw((self.seed + step * _GOLDEN) % 2**64, stream % 2**32, first)

    def residual(self, piece: ParameterSlice, part: slice, summed: bool) -> Tensor | None:
        """Return the error feedback of a part of a parameter, for in-place update.

        Return None if the codec has none.
        """
        if not piece.codec.residual:
            return None
        if summed:
            return self.owned.part(
                piece.name, part.stop - part.start, slice(0, part.stop - part.start)
            )
        return self.sent.part(piece.name, piece.size, part)

    def spend(self, piece: ParameterSlice, values: Tensor) -> None:
        """Add the error feedback of an earlier codec to a gradient whose codec now has none."""
        if not piece.codec.residual and piece.name in self.sent.values:
            self.sent.spend(piece.name, values)

    def recode(self, old: ParameterSlice, new: ParameterSlice, like: Tensor) -> None:
        """Convert the error feedback of a parameter to another codec's coding order.

        The feedback of a mean is multiplied by the world size: one rank adds it to its own
        gradient, and the next mean divides it again.

        Args:
            like: tensor with the layout of the gradients.
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
        """True if a step can be rolled back."""
        return self.sent.undone

    @undone.setter
    def undone(self, wanted: bool) -> None:
        self.sent.undone = self.owned.undone = wanted

    def begin(self, scale: float) -> None:
        """Set the loss scale of the gradients to come."""
        self.sent.scale = self.owned.scale = scale

    def settle(self, used: bool) -> None:
        """End a step; roll it back if its gradients are not used and `undone` is set."""
        self.sent.settle(used)
        self.owned.settle(used)

    def saved(self) -> dict[str, Any]:
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
        """Resume from `saved`; drop the error feedback with a warning if rank or world size differ.

        Raises:
            OptionError: `saved` is not such a state, or is of another codec or model.
        """
        if (
            not isinstance(saved, Mapping)
            or saved.get("format") != _FORMAT
            or saved.get("version") not in _READ
        ):
            raise OptionError(
                "the value is not a state of gradient compression",
                do="pass the result of handle.state_dict()",
            )
        if saved["codec"] != self.codec:
            raise OptionError(
                f"the state belongs to {saved['codec']}, but gradients are sent with {self.codec}",
                do="use the same codec as before, or start without the state",
            )
        sent, owned, scales = (
            dict(saved["sent"]),
            dict(saved["owned"]),
            saved.get("scales", {"sent": {}, "owned": {}}),
        )
        if (saved["rank"], saved["world"]) != (self.rank, self.world):
            if sent or owned:
                warnings.warn(
                    f"the state was saved by rank {saved['rank']} of {saved['world']}, but this is "
                    f"rank {self.rank} of {self.world}: training resumes without the saved error "
                    "feedback",
                    stacklevel=3,
                )
            sent, owned = {}, {}
        sizes = {piece.name: piece for piece in pieces}
        for name in [*sent, *owned]:
            if name not in sizes:
                raise OptionError(
                    f"the state has error feedback of {name}, which the model does not have",
                    do="load the state of the same model",
                )
        for name, values in sent.items():
            if values.numel() != sizes[name].size:
                raise OptionError(
                    f"the state has {values.numel()} values for {name}, which has "
                    f"{sizes[name].size}",
                    do="load the state of the same model",
                )
        self.seed, self.step = saved["seed"], saved["step"]
        self.sent.load(sent, scales["sent"])
        self.owned.load(owned, scales["owned"])
        self.control = dict(saved.get("control", {}))
