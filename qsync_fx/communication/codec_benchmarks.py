"""Benchmarks of gradient codecs, and of reductions compared with torch's own comm hooks.

`measured` times encoding and decoding against a copy of the same memory; on a GPU this includes the
transfer of the bytes to and from the host. `reductions` times whole reductions on all ranks.

Invariant: runs are interleaved, so that noise affects all candidates; a ratio is the median of the
ratios within a round. Reductions count the slowest rank.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from qsync_fx.communication.codecs import buffers, codec_named
from qsync_fx.communication.codecs.codec import Codec, Draw
from qsync_fx.communication.control_group import CPU, carrying, meet, slowest
from qsync_fx.communication.ddp_hook import DdpCompressor, to_all
from qsync_fx.communication.hierarchical import NodeGroups

Clock = Callable[[], float]
"""Clock that returns seconds."""


@dataclass(frozen=True)
class Speed:
    """Measured speed of a codec.

    Attributes:
        codec: its name.
        bits: bits on the wire for each value.
        encode, decode: FP32 bytes/s; `decode` adds to existing values.
        read: FP32 bytes/s of decoding that overwrites the output.
        copy: bytes/s of memcpy in the same rounds.
        encode_to_copy, decode_to_copy, read_to_copy: speed relative to memcpy.
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
    """Return the speed of each codec with torch's number of threads.

    Args:
        values: number of FP32 values.
        repeats: interleaved rounds.
        clock: process time by default, which sums all threads. On a GPU, the clock must
            synchronize the device.
        stretch: values that are coded at once, as in messages; all if None.
    """
    source = (torch.randn(values, generator=torch.Generator().manual_seed(0)) * 1e-3).to(device)
    target = torch.zeros_like(source)
    most = values if stretch is None else stretch
    return [
        _measured(codec.fitted((values,)), codec.name, source, target, repeats, clock, most)
        for codec in codecs
    ]


def _measured(
    codec: Codec, name: str, source: Tensor, target: Tensor, repeats: int, clock: Clock, most: int
) -> Speed:
    pieces = list(zip(torch.split(source, most), torch.split(target, most), strict=True))
    wires = [buffers.host(codec.nbytes(piece.numel()), source.device) for piece, _ in pieces]
    residuals = (
        torch.split(torch.zeros_like(source), most) if codec.residual else [None] * len(pieces)
    )
    size = source.numel() * source.element_size()

    def copy() -> None:
        if buffers.native(source):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
        else:
            target.copy_(source)

    def encode() -> None:
        for (piece, _), wire, residual in zip(pieces, wires, residuals, strict=True):
            near = buffers.beside(wire, piece)
            codec.encode(piece, near, Draw(1, 2), residual)
            if near is not wire:
                wire.copy_(near)

    def decode(**settings: bool) -> None:
        for (_, into), wire in zip(pieces, wires, strict=True):
            codec.decode(buffers.taken_to(wire, into), into, **settings)

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


PLAIN: Final = "torch fp32"
HALF: Final = "torch fp16"
"""Baselines of torch: all-reduce in FP32, and the comm hook that converts to FP16."""
_WIDTH: Final = 1024
_WARMUP: Final = 3


@dataclass(frozen=True)
class Reduction:
    """Measured method to average gradients.

    Attributes:
        way: name of a codec, or a baseline of torch.
        seconds: duration of one reduction.
        to_plain, to_half: speed relative to torch in FP32 and to its FP16 hook.
        coding: seconds of encoding and decoding in it; None for torch's hooks.
        wire: bytes that a rank sends; None for torch's hooks.
        theory: bytes according to the papers; None for torch's hooks.
    """

    way: str
    seconds: float
    to_plain: float
    to_half: float
    coding: float | None = None
    wire: float | None = None
    theory: float | None = None


@dataclass(frozen=True)
class _Whole:
    """All gradients as one bucket, with the methods of `GradBucket` that hooks call."""

    parameter: nn.Parameter
    values: Tensor

    def buffer(self) -> Tensor:
        return self.values

    def gradients(self) -> list[Tensor]:
        return [self.values.view(self.parameter.shape)]

    def parameters(self) -> list[nn.Parameter]:
        return [self.parameter]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def reductions(
    codecs: Sequence[str],
    values: int = 26 * 2**18,
    repeats: int = 15,
    nodes: NodeGroups | None = None,
) -> list[Reduction]:
    """Return the duration of each method; all ranks call it together and get the same result.

    Args:
        values: number of FP32 values, rounded down to a multiple of 1024 (at least 1024).
        nodes: reduce in FP32 within these nodes, and with the codec between them.
    """
    rank, world, plain = distributed.get_rank(), distributed.get_world_size(), carrying(CPU)
    parameter = nn.Parameter(torch.zeros(max(1, values // _WIDTH), _WIDTH))
    source = torch.randn(parameter.numel(), generator=torch.Generator().manual_seed(rank)) * 1e-3
    bucket = _Whole(parameter, torch.empty_like(source))
    handles: dict[str, DdpCompressor] = {}
    for name in codecs:
        # One group for each codec, as `compress` creates.
        group = distributed.new_group(backend="gloo") if world > 1 else None
        assigned = to_all(codec_named(name), [1], 0)
        handles[name] = DdpCompressor(
            group,
            rank,
            world,
            [("gradient", parameter)],
            assigned,
            seed=0,
            check_every=0,
            nodes=nodes,
        )
    hooks: dict[str, Callable[[Any, Any], Any]] = {
        PLAIN: default_hooks.allreduce_hook,
        HALF: default_hooks.fp16_compress_hook,
        **{name: handle.hook for name, handle in handles.items()},
    }

    def seconds(method: str) -> float:
        bucket.values.copy_(source)
        meet()
        begin = time.perf_counter()
        reduced = hooks[method](plain, bucket)
        if method in handles:
            handles[method].wait()
        reduced.wait()
        return time.perf_counter() - begin

    for method in hooks:
        for _ in range(_WARMUP):
            seconds(method)
    before = {name: handle.report().tally for name, handle in handles.items()}
    methods = list(hooks)
    turns: list[list[float]] = []
    for turn in range(repeats):
        shift = turn % len(methods)
        result = {method: seconds(method) for method in methods[shift:] + methods[:shift]}
        turns.append([result[method] for method in methods])
    # One collective finds the slowest rank of all rounds.
    reported = slowest([used for turn in turns for used in turn])
    times = {method: reported[index :: len(methods)] for index, method in enumerate(methods)}

    made = []
    for method in methods:
        owned, done = times[method], {}
        if method in handles:
            now, then = handles[method].report().tally, before[method]
            coding = now.encode + now.decode - then.encode - then.decode
            done = {
                "coding": coding / repeats,
                "wire": (now.wire - then.wire) / repeats,
                "theory": (now.theory - then.theory) / repeats,
            }
        to = {
            "to_plain": statistics.median(a / b for a, b in zip(times[PLAIN], owned, strict=True)),
            "to_half": statistics.median(a / b for a, b in zip(times[HALF], owned, strict=True)),
        }
        made.append(Reduction(method, statistics.median(owned), **to, **done))
    return made
