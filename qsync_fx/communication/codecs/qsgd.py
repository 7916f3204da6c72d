"""QSGD (D. Alistarh et al., 2017): stochastic rounding between levels.

A unit has one FP32 scale, the largest magnitude or the 2-norm. With layout "sign", a value is its
sign and one of 2**(bits - 1) magnitudes from zero to the scale; with "endpoints", one of 2**bits
points from -scale to scale. If rotated, a unit is a block of a randomized Hadamard transform
(hadamard.py), and the message begins with the counter of its signs.

Invariant: unbiased up to 2**-24 of a step, which the error is below before it is transformed back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from qsync_fx import _C
from qsync_fx.communication.codecs import buffers, torch_kernels
from qsync_fx.communication.codecs.codec import Codec, Draw, Feedback

UNITS = {2: 128, 4: 512, 8: 512, 16: 8192}  # unit sizes of the study by bits (section 4.1)
ROTATED = (2, 4, 8)  # bits of the codecs with a Hadamard transform


@dataclass(frozen=True)
class Qsgd(Codec):
    """QSGD with 2, 4, 8 or 16 bits, of a randomized Hadamard transform if `rotated`."""

    bits: int
    size: int
    norm: Literal["max", "two"] = "max"
    layout: Literal["sign", "endpoints"] = "sign"
    rotated: bool = False  # requires `size` to be a power of two, at least 128

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"qsgd{self.bits}h" if self.rotated else f"qsgd{self.bits}"

    @property
    def unit(self) -> int:
        return self.size

    @property
    def levels(self) -> int:
        """Number of steps from zero to the scale, or with "endpoints" from -scale to scale."""
        bits = {"sign": self.bits - 1, "endpoints": self.bits}[self.layout]
        return (1 << bits) - 1

    def nbytes(self, n: int) -> int:
        return _C.qsgd_bytes(n, self.bits, self.size, self.rotated)

    def theory(self, n: int) -> float:
        if self.rotated:
            n = -(-n // self.size) * self.size  # the last block is padded
        return n * (self.bits + 32 / self.size) / 8

    def variance(self, values: Tensor) -> float:
        n, size = values.numel(), self.size
        if self.rotated:
            # The inverse spreads the variance of a block evenly over its values.
            units = self._variances(torch_kernels.rotated(values, size, Draw()))
            units = units.mean(1, keepdim=True).expand_as(units) / size
        else:
            units = self._variances(functional.pad(values, (0, -n % size)).view(-1, size))
        return float(units.flatten()[:n].sum())

    def _variances(self, units: Tensor) -> Tensor:
        """Return the variance of each value of units [units, size], FP64."""
        units = units.double()
        scale = units.norm(p={"max": math.inf, "two": 2}[self.norm], dim=1, keepdim=True)
        span, inputs = scale, units.abs()
        if self.layout == "endpoints":
            span, inputs = 2 * scale, units + scale
        step = span / self.levels
        # Stochastic rounding of a value u steps above a level has the variance u(1 - u) steps².
        u = torch.where(step > 0, inputs / step, 0.0).frac()
        result: Tensor = step.square() * u * (1 - u)
        return result

    def encode(self, values: Tensor, wire: Tensor, draw: Draw, residual: Feedback = None) -> None:
        n = values.numel()
        settings = self.bits, self.size, self.norm, self.layout
        if not buffers.native(values):
            coded = torch_kernels.qsgd_encode(values, *settings, draw, self.rotated)
            wire[: coded.numel()].copy_(coded)
            return
        source, target = buffers.floats(values), buffers.bytes_of(wire, self.nbytes(n))
        place = draw.seed, draw.stream, draw.first
        threads = torch.get_num_threads()
        _C.qsgd_encode(source, target, n, *settings, *place, threads, rotated=self.rotated)

    def decode(self, wire: Tensor, values: Tensor, add: bool = False, last: bool = False) -> None:
        n = values.numel()
        settings = self.bits, self.size, self.layout
        if not buffers.native(values):
            decoded = torch_kernels.qsgd_decode(wire[: self.nbytes(n)], n, *settings, self.rotated)
            buffers.put(decoded, values, add)
            return
        source, target = buffers.bytes_of(wire, self.nbytes(n)), buffers.floats(values)
        threads = torch.get_num_threads()
        _C.qsgd_decode(source, target, n, *settings, add, threads, last=last, rotated=self.rotated)


CODECS: Final = (
    *(Qsgd(bits, size) for bits, size in UNITS.items()),
    *(Qsgd(bits, UNITS[bits], rotated=True) for bits in ROTATED),
)
