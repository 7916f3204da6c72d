"""How fast codecs are on this processor, against a copy of the same memory; on a GPU with the way of their bytes to its host, and back.

Invariant: encoding, decoding and the copy take turns, so that whatever else the machine does falls on all of them; a ratio is the median of
the ratios within a turn. Time is by default this process's own, all threads together.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qsync_fx.communication.codecs import Codec, Draw, memory

Clock = Callable[[], float]
"""Seconds."""


@dataclass(frozen=True)
class Speed:
    """One codec.

    Attributes:
        codec: its name.
        bits: on the wire, for each value.
        encode, decode: bytes of FP32 a second that are encoded, and that are decoded and added to others.
        read: bytes of FP32 a second that are decoded to where nothing is yet.
        copy: bytes a second that memcpy copies meanwhile.
        encode_to_copy, decode_to_copy, read_to_copy: how many times as fast as memcpy.
    """

    codec: str
    bits: float
    encode: float
    decode: float
    read: float
    copy: float
    encode_to_copy: float
    decode_to_copy: float
    read_to_copy: float


def measured(
    codecs: Sequence[Codec],
    values: int = 26 * 2**18,
    repeats: int = 15,
    clock: Clock = time.process_time,
    device: torch.device | str = "cpu",
    stretch: int | None = None,
) -> list[Speed]:
    """Returns the speed of each codec on so many values, with as many threads as torch has; on a GPU the clock waits for it.

    Args:
        stretch: how many of them are coded at once, as messages are; all where None.
    """
    source = (torch.randn(values, generator=torch.Generator().manual_seed(0)) * 1e-3).to(device)
    target = torch.zeros_like(source)
    most = values if stretch is None else stretch
    return [_measured(codec.fitted((values,)), codec.name, source, target, repeats, clock, most) for codec in codecs]


def _measured(codec: Codec, name: str, source: Tensor, target: Tensor, repeats: int, clock: Clock, most: int) -> Speed:
    pieces = list(zip(torch.split(source, most), torch.split(target, most), strict=True))
    wires = [memory.host(codec.nbytes(piece.numel()), source.device) for piece, _ in pieces]
    residuals = torch.split(torch.zeros_like(source), most) if codec.residual else [None] * len(pieces)
    size = source.numel() * source.element_size()

    def copy() -> None:
        if memory.native(source):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
        else:
            target.copy_(source)

    def encode() -> None:
        for (piece, _), wire, residual in zip(pieces, wires, residuals, strict=True):
            near = memory.beside(wire, piece)
            codec.encode(piece, near, Draw(1, 2), residual)
            if near is not wire:
                wire.copy_(near)

    def decode(**how: bool) -> None:
        for (_, into), wire in zip(pieces, wires, strict=True):
            codec.decode(memory.taken_to(wire, into), into, **how)

    calls: dict[str, Callable[[], object]] = {
        "copy": copy,
        "encode": encode,
        "decode": lambda: decode(add=True),
        "read": lambda: decode(last=True),
    }
    for call in calls.values():
        call()
    turns = [{kind: _seconds(call, clock) for kind, call in calls.items()} for _ in range(repeats)]

    def speed(kind: str) -> float:
        return size / statistics.median(turn[kind] for turn in turns)

    def to_copy(kind: str) -> float:
        return statistics.median(turn["copy"] / turn[kind] for turn in turns)

    return Speed(
        name,
        8 * sum(wire.numel() for wire in wires) / source.numel(),
        speed("encode"),
        speed("decode"),
        speed("read"),
        speed("copy"),
        to_copy("encode"),
        to_copy("decode"),
        to_copy("read"),
    )


def _seconds(call: Callable[[], object], clock: Clock) -> float:
    begin = clock()
    call()
    return max(clock() - begin, 1e-9)
