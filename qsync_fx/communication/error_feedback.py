"""Error feedback of gradient codecs, with GradScaler support.

Error feedback is stored with the loss scale of its gradient. It is rescaled only when it is used,
so that a change of the scale alone cannot overflow FP32. A step that the scaler skips is rolled
back: both the feedback that it stored and the feedback that it consumed.

Invariant: with powers of two as scales, as GradScaler has, the feedback is bit-identical to
training without a scaler and without the skipped steps, except for denormal FP32 values.
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
    """Error feedback of gradients, or of their means.

    Attributes:
        values: FP32 tensors by parameter name, 1-D in coding order.
        scales: loss scale of each tensor in `values`.
        scale: loss scale of the current gradients; 1 if unknown.
        undone: whether a step can be rolled back, which needs a copy of all feedback in use.
        device: device of the values.
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
        """Return the feedback of a part, in the current loss scale, for in-place update.

        Call it once a step for each part of a parameter of `size` values.
        """
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
        """Add all feedback of a parameter to its gradient, for a codec without error feedback."""
        left = self.part(name, values.numel(), slice(0, values.numel()))
        values += left
        self._spent.add(name)

    def settle(self, used: bool) -> None:
        """End a step whose gradients are used; otherwise roll it back if `undone` is set."""
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
        """Remove and return the feedback of a parameter and its loss scale."""
        return self.values.pop(name), self.scales.pop(name)

    def saved(self) -> dict[str, Any]:
        """Return a CPU copy of the values for `load`."""
        return {name: values.to("cpu", copy=True) for name, values in self.values.items()}

    def load(self, values: Mapping[str, Tensor], scales: Mapping[str, float]) -> None:
        """Restore copies of these values and scales."""
        self.values = {name: item.to(self.device, copy=True) for name, item in values.items()}
        self.scales = {name: scales.get(name, self.scale) for name in values}
        self._used.clear()
        self._spent.clear()


def scale_of(scaler: Any) -> float:
    """Return the current scale of a GradScaler; 1 without one."""
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


def finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite, in one pass over the values."""
    if not values.numel():
        return True
    lowest, highest = torch.aminmax(values)
    return math.isfinite(float(lowest)) and math.isfinite(float(highest))
