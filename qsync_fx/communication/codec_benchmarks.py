"""Speed of gradient codecs on this machine, relative to a copy of memory.

Runs are interleaved, so that noise affects all candidates; ratios are medians over rounds.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from qsync_fx.communication.codecs import buffers
from qsync_fx.communication.codecs.codec import Codec, Draw

Clock = Callable[[], float]
VALUES: Final = 26 * 2**18


@dataclass(frozen=True)
class Speed:
    """Measured speed of a codec in FP32 bytes/s, and relative to memcpy in the same rounds."""

    codec: str
    bits: float  # on the wire for each value
    encode: float
    decode: float  # adding to existing values
    read: float  # overwriting the output
    copy: float
    encode_to_copy: float
    decode_to_copy: float
    read_to_copy: float


def measured(
    codecs: Sequence[Codec],
    values: int = VALUES,
    repeats: int = 15,
    clock: Clock = time.process_time,
    device: torch.device | str = "cpu",
    chunk: int | None = None,
    on_device: bool = False,
) -> list[Speed]:
    """Return the speed of each codec on FP32 values, with torch's number of threads.

    On a GPU, the clock must synchronize the device. `chunk` values, or all, are coded at once.
    Coded bytes are copied to and from host memory, unless they stay `on_device`.
    """
    source = (torch.randn(values, generator=torch.Generator().manual_seed(0)) * 1e-3).to(device)
    most = chunk or values
    return [_measured(codec, source, repeats, clock, most, on_device) for codec in codecs]


def _measured(
    codec: Codec, source: Tensor, repeats: int, clock: Clock, most: int, on_device: bool
) -> Speed:
    name, codec = codec.name, codec.fitted((source.numel(),))
    target = torch.zeros_like(source)
    chunks = list(zip(torch.split(source, most), torch.split(target, most), strict=True))
    buffer = partial(buffers.host, device=source.device)
    if on_device:
        buffer = partial(torch.zeros, dtype=torch.uint8, device=source.device)
    wires = [buffer(codec.nbytes(values.numel())) for values, _ in chunks]
    residuals: Sequence[Tensor | None] = [None] * len(chunks)
    if codec.residual:
        residuals = torch.split(torch.zeros_like(source), most)
    size = source.numel() * source.element_size()

    def copy() -> None:
        if buffers.native(source):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
        else:
            target.copy_(source)

    def encode() -> None:
        for (values, _), wire, residual in zip(chunks, wires, residuals, strict=True):
            near = buffers.device_buffer(wire, values)
            codec.encode(values, near, Draw(1, 2), residual)
            if near is not wire:
                wire.copy_(near)

    def decode(**settings: bool) -> None:
        for (_, output), wire in zip(chunks, wires, strict=True):
            codec.decode(buffers.on_device_of(wire, output), output, **settings)

    calls: dict[str, Callable[[], object]] = {"copy": copy, "encode": encode}
    calls |= {"decode": lambda: decode(add=True), "read": lambda: decode(last=True)}
    for call in calls.values():
        call()
    rounds = [{kind: _seconds(call, clock) for kind, call in calls.items()} for _ in range(repeats)]
    result = {"bits": 8 * sum(wire.numel() for wire in wires) / source.numel()}
    for kind in calls:
        result[kind] = size / statistics.median(item[kind] for item in rounds)
        if kind != "copy":
            ratios = [item["copy"] / item[kind] for item in rounds]
            result[f"{kind}_to_copy"] = statistics.median(ratios)
    return Speed(name, **result)


def _seconds(call: Callable[[], object], clock: Clock) -> float:
    begin = clock()
    call()
    return max(clock() - begin, 1e-9)
