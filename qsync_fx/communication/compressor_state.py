"""State of gradient compression, and the handle that users get.

Invariant: a rank that resumes from its saved state sends the same bits as one that never stopped.
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
from qsync_fx.communication.control_group import CPU
from qsync_fx.communication.statistics import Report
from qsync_fx.errors import OptionError


class CompressorHandle(ABC):
    """Handle of a compressed model, which `qsync_fx.distributed.compress` returns."""

    def __repr__(self) -> str:
        return str(self.report())

    @abstractmethod
    def wait(self) -> None:
        """Return once all submitted gradients are sent and received; raise `RankError` if not."""

    def flush(self) -> None:
        """Apply pending full-precision gradients, which only DUO has between steps."""
        self.wait()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for a bit-identical resume; each rank saves its own."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from this rank's `state_dict`; raise `OptionError` for another codec or model.

        With another rank or world size, state that belongs to a rank is dropped with a warning.
        """

    @abstractmethod
    def report(self) -> Report:
        """Return the traffic of this rank, its duration, and the coding error so far."""

    @abstractmethod
    def statement(self) -> dict[str, list[str]]:
        """Return the settings that all ranks must agree on before the first message."""


def is_scaled(scaler: Any) -> bool:
    """Return whether a GradScaler is given and enabled."""
    return scaler is not None and bool(scaler.is_enabled())


def scale_of(scaler: Any) -> float:
    """Return the current scale of a GradScaler; 1 without one."""
    return float(scaler.get_scale()) if is_scaled(scaler) else 1.0


def finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite, in one pass over the values."""
    return bool(finite_flag(values))


def finite_flag(values: Tensor) -> Tensor:
    """Return the same as `finite` as a tensor on the device of the values, without waiting."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool)
    smallest, largest = torch.aminmax(values)
    return smallest.isfinite() & largest.isfinite()


@dataclass
class Residuals:
    """Error feedback of gradients, or of their means.

    It is stored with the loss scale of its gradient and rescaled only when it is used, so that a
    change of the scale alone cannot overflow FP32.
    """

    values: dict[str, Tensor] = field(default_factory=dict)  # FP32, 1-D in coding order
    scales: dict[str, float] = field(default_factory=dict)  # loss scale of each tensor in `values`
    scale: float = 1.0  # loss scale of the current gradients; 1 if unknown
    undone: bool = False  # whether a step can be rolled back, with a copy of its feedback
    device: torch.device = CPU
    _before: dict[str, Tensor] = field(default_factory=dict)
    _spent: set[str] = field(default_factory=set)
    _used: list[tuple[str, slice]] = field(default_factory=list)

    def part(self, name: str, size: int, part: slice) -> Tensor:
        """Return the feedback of a part, for in-place update; call it once a step for each part."""
        if name not in self.values:
            self.values[name] = torch.zeros(size, dtype=torch.float32, device=self.device)
            self.scales[name] = self.scale
        result = self.values[name][part]
        self._used.append((name, part))
        if self.undone:
            if name not in self._before:
                self._before[name] = torch.empty_like(self.values[name])
            self._before[name][part] = result
        if (factor := self.scale / self.scales[name]) != 1.0:
            result.mul_(factor)
        return result

    def spend(self, name: str, values: Tensor) -> None:
        """Add all feedback of a parameter to its gradient, for a codec without error feedback."""
        values += self.part(name, values.numel(), slice(0, values.numel()))
        self._spent.add(name)

    def settle(self, used: bool) -> None:
        """End a step whose gradients are used; otherwise roll it back if `undone` is set."""
        rolled_back = self.undone and not used
        for name, part in self._used:
            if rolled_back:
                self.values[name][part] = self._before[name][part]
            else:
                self.scales[name] = self.scale
        if not rolled_back:
            for name in self._spent:
                self.take(name)
        self._used.clear()
        self._spent.clear()

    def take(self, name: str) -> tuple[Tensor, float]:
        """Remove and return the feedback of a parameter and its loss scale."""
        return self.values.pop(name), self.scales.pop(name)

    def saved(self) -> dict[str, Any]:
        return {name: values.to("cpu", copy=True) for name, values in self.values.items()}

    def load(self, values: Mapping[str, Tensor], scales: Mapping[str, float]) -> None:
        self.values = {name: item.to(self.device, copy=True) for name, item in values.items()}
        self.scales = {name: scales[name] for name in values}
        self._used.clear()
        self._spent.clear()


_FORMAT: Final = "qsync-compression"
_VERSION: Final = 2
_GOLDEN: Final = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads the seeds of steps


@dataclass
class CompressorState:
    """Error feedback and random streams of this rank."""

    rank: int
    world: int
    codec: str  # text that all ranks agree on
    seed: int
    device: torch.device = CPU
    step: int = 0  # number of steps begun
    sent: Residuals = field(default_factory=Residuals)  # feedback of this rank's gradients
    owned: Residuals = field(default_factory=Residuals)  # feedback of the means of its shards
    control: dict[str, Any] = field(default_factory=dict)  # what AQGB predicts the next step from

    def __post_init__(self) -> None:
        self.sent.device = self.owned.device = self.device

    def draw(self, piece: ParameterSlice, step: int, first: int, summed: bool) -> Draw:
        # All ranks round means equally.
        stream = piece.index * (self.world + 1) + (self.world if summed else self.rank)
        return Draw((self.seed + step * _GOLDEN) % 2**64, stream % 2**32, first)

    def residual(self, piece: ParameterSlice, part: slice, summed: bool) -> Tensor | None:
        """Return the error feedback of a part of a parameter, for in-place update, if any."""
        size = part.stop - part.start
        if not piece.codec.residual or not size:
            return None
        if summed:
            return self.owned.part(piece.name, size, slice(0, size))
        return self.sent.part(piece.name, piece.size, part)

    def spend(self, piece: ParameterSlice, values: Tensor) -> None:
        """Add the error feedback of an earlier codec to a gradient whose codec now has none."""
        if not piece.codec.residual and piece.name in self.sent.values:
            self.sent.spend(piece.name, values)

    def recode(self, old: ParameterSlice, new: ParameterSlice, like: Tensor) -> None:
        """Convert the error feedback of a parameter to another codec's coding order.

        `like` has the layout of the gradients. The feedback of a mean is multiplied by the world
        size, by which the next mean divides it again.
        """
        if old.name in self.sent.values or old.name in self.owned.values:
            result = like.new_zeros(old.size, dtype=torch.float32)
            self.take_feedback(old, self.rank, self.world, result)
            self.sent.values[new.name] = bucket.recoded(old, new, like, result).clone()
            self.sent.scales[new.name] = self.sent.scale

    def take_feedback(
        self, piece: ParameterSlice, owner: int, members: int, target: Tensor
    ) -> None:
        """Remove the feedback of a slice, and add it to `target`, for the current loss scale.

        `owner` is the index of this rank among the `members` that average the slice.
        """
        if piece.name in self.sent.values:
            feedback, scale = self.sent.take(piece.name)
            target += feedback * (self.sent.scale / scale)
        if piece.name in self.owned.values:
            feedback, scale = self.owned.take(piece.name)
            target[piece.part(owner)] += feedback * (members * self.sent.scale / scale)

    def begin(self, scale: float, undone: bool) -> None:
        """Set the loss scale of the gradients to come, and whether their step may be undone."""
        self.sent.scale = self.owned.scale = scale
        self.sent.undone = self.owned.undone = undone

    def like(self, codec: str) -> CompressorState:
        """Return a new state of this rank for messages in other codecs."""
        return CompressorState(self.rank, self.world, codec, self.seed, self.device)

    def settle(self, used: bool) -> None:
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
        """Resume from `saved`; drop the error feedback if rank or world size differ."""
        expected = {"format": _FORMAT, "version": _VERSION}
        if not isinstance(saved, Mapping) or not expected.items() <= saved.items():
            description = "the value is not a state of gradient compression"
            raise OptionError(description, do="pass the result of handle.state_dict()")
        if saved["codec"] != self.codec:
            text = (
                f"the state belongs to {saved['codec']}, but gradients are sent with {self.codec}"
            )
            raise OptionError(text, do="use the same codec as before, or start without the state")
        sent, owned = dict(saved["sent"]), dict(saved["owned"])
        is_same_rank = (saved["rank"], saved["world"]) == (self.rank, self.world)
        if (sent or owned) and not is_same_rank:
            warnings.warn(
                f"the state was saved by rank {saved['rank']} of {saved['world']}, but this is rank"
                f" {self.rank} of {self.world}: training resumes without the saved error feedback",
                stacklevel=3,
            )
            sent, owned = {}, {}
        sizes = {piece.name: piece.size for piece in pieces}
        for name in [*sent, *owned]:
            size = sizes.get(name, 0)
            if not size or (name in sent and sent[name].numel() != size):
                description = (
                    f"the state has error feedback of {name}, which has {size} values here"
                )
                raise OptionError(description, do="load the state of the same model")
        self.seed, self.step = saved["seed"], saved["step"]
        self.sent.load(sent, saved["scales"]["sent"])
        self.owned.load(owned, saved["scales"]["owned"])
        self.control = dict(saved["control"])
