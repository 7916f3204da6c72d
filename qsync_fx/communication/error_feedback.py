"""What codecs have left of gradients, to be sent with the next ones, where a GradScaler changes the scale of the loss and leaves steps out.

What is left of a gradient is as large as the scale of its loss, which is kept with it: where the next gradient has another, it is brought
to that as it is used, and not before, so that no change of the scale alone can take it beyond what FP32 holds. A step that the scaler
leaves out is taken back: of what it has left, and of what it was to send of former steps.

Invariant: with scales that are powers of two, as those of a GradScaler are, what is left is that of a training without one in which the
steps that were left out never were, to the last bit but for what is below FP32's normal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

CPU: Final = torch.device("cpu")


@dataclass
class Residuals:
    """What is left of gradients, or of sums of them.

    Attributes:
        values: FP32, by parameter.
        scales: of the loss that they are of, by parameter.
        scale: of the loss whose gradients come now; 1 where none is known.
        undone: whether steps can be taken back, which takes a copy of all that is used.
        device: where values lie.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    scale: float = 1.0
    undone: bool = False
    device: torch.device = CPU
    _before: dict[str, Tensor] = field(default_factory=dict)
    _spent: set[str] = field(default_factory=set)
    _used: list[tuple[str, slice]] = field(default_factory=list)

    def part(self, name: str, size: int, part: slice) -> Tensor:
        """Returns what was left of a part of a parameter of `size` values, in the scale of now, to be changed in place; once a step."""
        if name not in self.values:
            self.values[name] = torch.zeros(size, dtype=torch.float32, device=self.device)
            self.scales[name] = self.scale
        result = self.values[name][part]
        self._used.append((name, part))
        if self.undone:
            if name not in self._before:
                self._before[name] = torch.empty(size, dtype=torch.float32, device=self.device)
            self._before[name][part] = result
        if (factor := self.scale / self.scales[name]) != 1.0:
            result.mul_(factor)
        return result

    def spend(self, name: str, values: Tensor) -> None:
        """Adds all that was left of a parameter to its gradient, which a codec takes that leaves nothing."""
        left = self.part(name, values.numel(), slice(0, values.numel()))
        values += left
        self._spent.add(name)

    def settle(self, used: bool) -> None:
        """Ends a step whose gradients are used, or takes it back."""
        for name, part in self._used:
            if used or not self.undone:
                self.scales[name] = self.scale
            else:
                self.values[name][part] = self._before[name][part]
        if used or not self.undone:
            for name in self._spent:
                del self.values[name], self.scales[name]
        self._used.clear()
        self._spent.clear()

    def take(self, name: str) -> tuple[Tensor, float]:
        """Removes and returns what is left of a parameter, and the scale that it is of."""
        return self.values.pop(name), self.scales.pop(name)

    def saved(self) -> dict[str, Any]:
        """Returns what `load` takes: a copy, on the CPU."""
        return {name: values.to("cpu", copy=True) for name, values in self.values.items()}

    def load(self, values: Mapping[str, Tensor], scales: Mapping[str, float]) -> None:
        """Goes on from these."""
        self.values = {name: item.to(self.device, copy=True) for name, item in values.items()}
        self.scales = {name: scales.get(name, self.scale) for name in values}
        self._used.clear()
        self._spent.clear()


def scale_of(scaler: Any) -> float:
    """Returns what a GradScaler multiplies the loss by now; 1 where there is none."""
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


def finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite; in one pass."""
    if not values.numel():
        return True
    lowest, highest = torch.aminmax(values)
    return math.isfinite(float(lowest)) and math.isfinite(float(highest))
