"""Accuracy, bytes and noise by the parameters of codecs: bucket size, scale, layers.
The study of low-precision communication (Grubic et al., EDBT 2018, section 5.1) compares QSGD in 4
bits with 512 and 8192 values per bucket, 1bitSGD* with 64 and 512, scales by the largest magnitude
and by the 2-norm, levels at equal distances and at powers of two, QSGD with one bit, and quantized
convolutions only against all layers. AQGB's fewest bits are compared with and without error
feedback. Two processes train as in codec_accuracy.py, whose codecs have the first of each pair of
parameters. Rows are as codec_trainings.py describes them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from qsync_fx.communication.codecs.casts import PLAIN
from qsync_fx.communication.codecs.codec import Codec, Draw, Feedback
from qsync_fx.communication.codecs.onebit import Reshaped
from qsync_fx.communication.codecs.qsgd import Qsgd
from qsync_fx.communication.codecs.truncation import Truncated
from qsync_fx.distributed import compress

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paper.support import codec_trainings
from benchmarks.paper.support.studied import Training

KERNEL_DIMENSIONS = 4


@dataclass(frozen=True)
class ByLayer(Codec):
    """Codec of convolutions only, or of all other layers only; FP32 elsewhere.

    The kernel of a convolution is a parameter [out, in, height, width].
    """

    codec: Codec
    convolutions: bool

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.codec.name}, {'convolutions' if self.convolutions else 'other layers'}"

    @property
    def residual(self) -> bool:  # type: ignore[override]
        return self.codec.residual

    @property
    def unit(self) -> int:
        return self.codec.unit

    def fitted(self, shape: Sequence[int]) -> Codec:
        is_kernel = len(shape) == KERNEL_DIMENSIONS
        return self.codec if is_kernel == self.convolutions else PLAIN

    def nbytes(self, n: int) -> int:
        return self.codec.nbytes(n)

    def encode(self, values: Tensor, wire: Tensor, draw: Draw, residual: Feedback = None) -> None:
        self.codec.encode(values, wire, draw, residual)

    def decode(self, wire: Tensor, values: Tensor, add: bool = False, last: bool = False) -> None:
        self.codec.decode(wire, values, add, last)


@dataclass(frozen=True)
class PowersOfTwo(Codec):
    """QSGD in 4 bits with the levels 0, 1/64, 1/32, ..., 1 of the largest magnitude of a unit."""

    size: int = 512
    name: str = "qsgd4, powers of two"

    @property
    def unit(self) -> int:
        return self.size

    def nbytes(self, n: int) -> int:
        return -(-n // self.size) * (4 + self.size // 2)

    def encode(self, values: Tensor, wire: Tensor, draw: Draw, residual: Feedback = None) -> None:
        units = functional.pad(values, (0, -values.numel() % self.size)).view(-1, self.size)
        scale = units.abs().amax(1, keepdim=True)
        inputs = torch.where(scale > 0, units.abs() / scale, 0.0)
        lower = torch.bucketize(inputs, LEVELS[:-1], right=True) - 1
        begins, ends = LEVELS[lower], LEVELS[lower + 1]
        random = _random(units, draw)
        codes = lower + (random < (inputs - begins) / (ends - begins)) + 8 * (units < 0)
        codes = codes.to(torch.uint8).flatten()
        coded = [scale.flatten().view(torch.uint8), codes[0::2] | codes[1::2] << 4]
        wire[: self.nbytes(values.numel())].copy_(torch.cat(coded))

    def decode(self, wire: Tensor, values: Tensor, add: bool = False, last: bool = False) -> None:
        n = values.numel()
        count = -(-n // self.size)
        scale = wire[: 4 * count].clone().view(torch.float32)
        packed = wire[4 * count : self.nbytes(n)]
        codes = torch.stack([packed & 15, packed >> 4], 1).view(count, self.size).long()
        signed = torch.where(codes < 8, 1.0, -1.0) * LEVELS[codes % 8]
        decoded = (scale[:, None] * signed).flatten()[:n]
        values.copy_(values + decoded if add else decoded)


@dataclass(frozen=True)
class OneBit(Codec):
    """QSGD in 1 bit: each value becomes plus or minus the largest magnitude of its unit."""

    size: int = 128
    name: str = "qsgd1"

    @property
    def unit(self) -> int:
        return self.size

    def nbytes(self, n: int) -> int:
        return -(-n // self.size) * (4 + self.size // 8)

    def encode(self, values: Tensor, wire: Tensor, draw: Draw, residual: Feedback = None) -> None:
        units = functional.pad(values, (0, -values.numel() % self.size)).view(-1, self.size)
        scale = units.abs().amax(1, keepdim=True)
        positive = torch.where(scale > 0, 0.5 + 0.5 * units / scale, 0.5)
        bits = (_random(units, draw) < positive).view(-1, 8).to(torch.uint8)
        codes = (bits << SHIFTS).sum(1, dtype=torch.uint8)
        coded = torch.cat([scale.flatten().view(torch.uint8), codes])
        wire[: self.nbytes(values.numel())].copy_(coded)

    def decode(self, wire: Tensor, values: Tensor, add: bool = False, last: bool = False) -> None:
        n = values.numel()
        count = -(-n // self.size)
        scale = wire[: 4 * count].clone().view(torch.float32)
        bits = (wire[4 * count : self.nbytes(n)][:, None] >> SHIFTS) & 1
        decoded = (scale[:, None] * (2.0 * bits.view(count, self.size) - 1)).flatten()[:n]
        values.copy_(values + decoded if add else decoded)


def _random(units: Tensor, draw: Draw) -> Tensor:
    """Return uniform random numbers in [0, 1) for units, which depend on the draw."""
    generator = torch.Generator().manual_seed(hash((draw.seed, draw.stream, draw.first)))
    return torch.rand(units.shape, generator=generator)


SHIFTS = torch.arange(8, dtype=torch.uint8)
LEVELS = torch.tensor([0.0, *(2.0**power for power in range(-6, 1))])
QSGD, ONEBIT = Qsgd(4, 512), Reshaped(64)
ALL: dict[str, Codec] = {
    "qsgd4, 512": QSGD,
    "qsgd4, 8192": Qsgd(4, 8192),
    "qsgd4, 512, 2-norm": Qsgd(4, 512, "two"),
    "qsgd4, 512, powers of two": PowersOfTwo(),
    "qsgd2, 128": Qsgd(2, 128),
    "qsgd2, 128, 2-norm": Qsgd(2, 128, "two"),
    "qsgd1, 128": OneBit(),
    "1bit*, 64": ONEBIT,
    "1bit*, 512": Reshaped(512),
    "aqgb12": Truncated(12),
    "aqgb12, error feedback": Truncated(12, feedback=True),
}
LAYERS: dict[str, Codec] = {
    "qsgd2, 128, convolutions": ByLayer(ALL["qsgd2, 128"], convolutions=True),
    "qsgd2, 128, other layers": ByLayer(ALL["qsgd2, 128"], convolutions=False),
    "1bit*, 512, convolutions": ByLayer(ALL["1bit*, 512"], convolutions=True),
    "1bit*, 512, other layers": ByLayer(ALL["1bit*, 512"], convolutions=False),
}
"""Codecs of some layers, for networks with convolutions."""
CODECS = {**ALL, **LAYERS}
METHODS = {
    "ResNet-8, images": [*CODECS],
    "LSTM, texts": [*ALL],
    "GPT, next word": [*ALL],
}


def install(
    ddp: DistributedDataParallel, method: str, training: Training, optimizer: Optimizer, seed: int
) -> Any:
    """Install a codec of `CODECS`; return its compressor, or None in FP32."""
    return None if method == codec_trainings.WHOLE else compress(ddp, CODECS[method], seed=seed)


if __name__ == "__main__":
    codec_trainings.main(__file__, __doc__, METHODS, install)
