"""Benchmarks of gradient codecs, and of reductions compared with torch's own comm hooks.

Runs are interleaved, so that noise affects all candidates; ratios are medians over rounds.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from qsync_fx.communication.allreduce import NodeGroups
from qsync_fx.communication.codecs import buffers, codec_named
from qsync_fx.communication.codecs.codec import Codec, Draw
from qsync_fx.communication.control_group import CPU, carrying, meet, slowest
from qsync_fx.communication.ddp_hook import DdpCompressor, to_all

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
) -> list[Speed]:
    """Return the speed of each codec on FP32 values, with torch's number of threads.

    On a GPU, the clock must synchronize the device. `chunk` values, or all, are coded at once.
    """
    source = (torch.randn(values, generator=torch.Generator().manual_seed(0)) * 1e-3).to(device)
    return [_measured(codec, source, repeats, clock, chunk or values) for codec in codecs]


def _measured(codec: Codec, source: Tensor, repeats: int, clock: Clock, most: int) -> Speed:
    name, codec = codec.name, codec.fitted((source.numel(),))
    target = torch.zeros_like(source)
    chunks = list(zip(torch.split(source, most), torch.split(target, most), strict=True))
    wires = [buffers.host(codec.nbytes(values.numel()), source.device) for values, _ in chunks]
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


PLAIN: Final = "torch fp32"  # all-reduce
HALF: Final = "torch fp16"  # comm hook that converts to FP16
_WIDTH: Final = 1024
_WARMUP: Final = 3


@dataclass(frozen=True)
class Reduction:
    """Measured method to average gradients: a codec, or a baseline of torch."""

    way: str
    seconds: float
    to_plain: float  # speed relative to torch in FP32
    to_half: float  # speed relative to torch's FP16 hook
    coding: float | None = None  # seconds of encoding and decoding; None for torch's hooks
    wire: float | None = None
    theory: float | None = None


def reductions(
    codecs: Sequence[str], values: int = VALUES, repeats: int = 15, nodes: NodeGroups | None = None
) -> list[Reduction]:
    """Return the duration of each method; all ranks call it together and get the same result.

    The number of FP32 values is rounded to 1024. With `nodes`, the codec is used between them.
    """
    rank, world, plain = distributed.get_rank(), distributed.get_world_size(), carrying(CPU)
    parameter = nn.Parameter(torch.zeros(max(1, values // _WIDTH), _WIDTH))
    source = torch.randn(parameter.numel(), generator=torch.Generator().manual_seed(rank)) * 1e-3
    values_of_bucket = torch.empty_like(source)
    # All gradients as one bucket, with the methods of `GradBucket` that hooks call.
    bucket = SimpleNamespace(
        buffer=lambda: values_of_bucket,
        gradients=lambda: [values_of_bucket.view(parameter.shape)],
        parameters=lambda: [parameter],
        index=lambda: 0,
        is_last=lambda: True,
    )
    hooks: dict[str, Callable[[Any, Any], Any]] = {PLAIN: default_hooks.allreduce_hook}
    hooks[HALF] = default_hooks.fp16_compress_hook
    handles: dict[str, DdpCompressor] = {}
    for name in codecs:
        # One group for each codec, as `compress` creates.
        group = distributed.new_group(backend="gloo") if world > 1 else None
        codec, named = to_all(codec_named(name), [1], 0), [("gradient", parameter)]
        handle = DdpCompressor(group, rank, world, named, codec, seed=0, check_every=0, nodes=nodes)
        handles[name], hooks[name] = handle, handle.hook

    def seconds(method: str) -> float:
        values_of_bucket.copy_(source)
        meet()
        begin = time.perf_counter()
        reduced = hooks[method](plain, bucket)
        if method in handles:
            handles[method].wait()
        reduced.wait()
        return time.perf_counter() - begin

    methods = list(hooks)
    for method in methods:
        for _ in range(_WARMUP):
            seconds(method)
    before = {name: handle.report().tally for name, handle in handles.items()}
    rounds: list[float] = []
    for turn in range(repeats):
        shift = turn % len(methods)
        times = {method: seconds(method) for method in methods[shift:] + methods[:shift]}
        rounds += [times[method] for method in methods]
    # One collective finds the slowest rank of all rounds.
    reported = slowest(rounds)
    by_method = {method: reported[index :: len(methods)] for index, method in enumerate(methods)}

    def speedup(baseline: str, method: str) -> float:
        pairs = zip(by_method[baseline], by_method[method], strict=True)
        return statistics.median(a / b for a, b in pairs)

    result = []
    for method in methods:
        traffic = {}
        if method in handles:
            now, then = handles[method].report().tally, before[method]
            for name in ("coding", "wire", "theory"):
                traffic[name] = (getattr(now, name) - getattr(then, name)) / repeats
        ratios = speedup(PLAIN, method), speedup(HALF, method)
        result.append(Reduction(method, statistics.median(by_method[method]), *ratios, **traffic))
    return result
