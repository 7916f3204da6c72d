"""Steps of all ranks together: the cost of copying, sending and coding gradients.

DistributedDataParallel wraps the model, so that graphs are split and buckets are sent as in
training. Steps cycle through the variants of `_Way`, whose differences give the cost of copying
gradients into buckets, of sending them, and of a codec. These include the cores that communication
uses, the waiting for other ranks, and contention for the interpreter lock. `busy` and `coding`
measure the effect on matrix products instead of a model.

Invariant: all ranks call these functions together and return the same fractions; no parameters are
sent.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from qsync_fx.communication.codecs import codec_named
from qsync_fx.communication.codecs.codec import Draw
from qsync_fx.communication.control_group import CPU, carrying, mean, meet, slowest
from qsync_fx.communication.ddp_hook import DdpCompressor, to_all
from qsync_fx.profiler.links.collective_times import finish
from qsync_fx.profiler.run_statistics import faster_half
from qsync_fx.profiler.timing.step_timers import TrainingStep

_TRAVEL: Final = 0.02
"""Minimum total seconds of messages, so that clock resolution and scheduling do not matter."""
_LONGEST: Final = 0.01
"""Maximum seconds of one message, if shorter ones exist."""
_LARGEST_BUFFER: Final = 2**22
"""Bytes of a message; several of them exceed the caches, as buckets do."""
_BESIDE: Final = 4
"""Ratio of compute to transfer time, so that each message arrives before the next one."""
_REPEATS: Final = 21
"""Samples are small differences of long times, off by up to half; their median is within 10%."""
_WARMUP_ROUNDS: Final = 16
"""Products that are timed to estimate the duration of one."""
_CODEC: Final = "qsgd8"
"""Codec that runs concurrently with products; all codecs load a core equally."""
_VALUES: Final = 2**20
_SIZE: Final = 256
"""Rows and columns of the matrices; they fit a core's cache, so only cores are shared."""


def busy(table: Sequence[tuple[int, float]], device: torch.device = CPU) -> float:
    """Return the delay of concurrent computation as a fraction of all-reduce time, in [0, 1].

    Matrix products run with as many threads as torch uses, once alone and once with all-reduces
    issued one after another, as in a backward pass. Issuing them at once would cost less, as the
    sending thread would wake up only once. The result is equal on all ranks.

    Args:
        table: bytes and seconds of all-reduces between the ranks, equal on all of them.
        device: device of the computation and the messages.
    """
    short = [item for item in table if item[0] <= _LARGEST_BUFFER and item[1] <= _LONGEST]
    nbytes, seconds = max(short, default=min(table))
    messages = [
        torch.zeros(max(1, nbytes // 4), device=device) for _ in range(math.ceil(_TRAVEL / seconds))
    ]
    travel = len(messages) * seconds
    every = max(1, round(_BESIDE * seconds * _WARMUP_ROUNDS / _computed(_WARMUP_ROUNDS, device)))
    result = []
    for _ in range(_REPEATS):
        meet()
        alone = _computed(every * len(messages), device)
        meet()
        neighbours = _computed(every * len(messages), device, messages)
        result.append((neighbours - alone) / travel)
    return _agreed(result)


def coding() -> float:
    """Return the delay of concurrent computation as a fraction of encoding time, in [0, 1].

    0 if another core encodes; 1 if there is none, such as for a rank of two threads on one core, or
    if the ranks of a machine occupy all cores. The result is equal on all ranks.
    """
    codec = codec_named(_CODEC)
    values = torch.randn(_VALUES)
    wire = torch.empty(codec.nbytes(_VALUES), dtype=torch.uint8)

    def write(many: int) -> float:
        begin = time.perf_counter()
        for _ in range(many):
            codec.encode(values, wire, Draw(0, 0))
        return time.perf_counter() - begin

    each = write(_REPEATS) / _REPEATS
    turns = round(_BESIDE * _TRAVEL / _computed(_WARMUP_ROUNDS) * _WARMUP_ROUNDS)
    many = max(1, round(_TRAVEL / each))
    result = []
    for _ in range(_REPEATS // 2):
        meet()
        coded, alone = write(many), _computed(turns)
        meet()
        other = threading.Thread(target=write, args=(many,))
        other.start()
        neighbours = _computed(turns)
        other.join()
        result.append((neighbours - alone) / coded)
    return _agreed(result)


def _agreed(result: Sequence[float]) -> float:
    """Return the mean over all ranks of each rank's median, clamped to [0, 1]."""
    return min(1.0, max(0.0, mean(statistics.median(result))))


def _computed(
    turns: int, device: torch.device = CPU, messages: Sequence[torch.Tensor] = ()
) -> float:
    """Return the seconds of `turns` products, with the messages issued evenly among them.

    Args:
        turns: a multiple of the number of messages.
    """
    values, out = torch.ones(_SIZE, _SIZE, device=device), torch.empty(_SIZE, _SIZE, device=device)
    group = carrying(device) if messages else None
    every = turns // max(1, len(messages))
    works = []
    begin = time.perf_counter()
    for turn in range(turns):
        if messages and turn % every == 0:
            works.append(
                distributed.all_reduce(messages[turn // every], group=group, async_op=True)
            )
        torch.mm(values, values, out=out)
    finish(device)
    used = time.perf_counter() - begin
    for work in works:
        if work is not None:
            work.wait()
    return used


_BUCKETS: Final = 6
"""Buckets of a small model; a single one would be sent only after the backward pass."""
_LARGEST_BUCKET_MIB: Final = 25
"""Maximum size of a bucket, as in DistributedDataParallel."""
_WARMUP_STEPS: Final = 3
"""Rounds until DistributedDataParallel's buckets are final."""
_LEAST, _MOST, _SECONDS = 5, 21, 20.0
"""Minimum and maximum number of measured rounds, and the target duration in seconds."""
_ROW: Final = 0.3
"""Seconds of consecutive steps of one variant: sending in a step affects the next one."""
CODEC: Final = "qsgd8"
"""Codec of the coded steps: a likely choice of users, and as fast as most."""


class _Way(Enum):
    """Treatment of gradients in a step: not copied, copied into buckets, all-reduced, or coded."""

    LEFT, COPIED, SENT, CODED = range(4)


def planned_seconds(seconds: float) -> float:
    """Return the seconds of the steps of `together`, without compiling and sending.

    Args:
        seconds: duration of one step.
    """
    row, rounds = _rounds(seconds)
    return len(_Way) * (_WARMUP_STEPS + row * rounds) * seconds


@dataclass(frozen=True)
class Unsent:
    """Seconds of steps without sent gradients.

    Attributes:
        left: gradients are not copied.
        copied: gradients are copied into buckets and back.
    """

    left: float
    copied: float


@dataclass(frozen=True)
class JointSteps:
    """Times of steps of all ranks at once.

    Attributes:
        own: this rank's steps without sending.
        slowest: the slowest rank's steps without sending.
        sending: seconds of the slowest rank's steps with all-reduces.
        bucket_bytes: size limit of a bucket.
        coded: seconds of the slowest rank's steps with gradients in `CODEC`; None if not measured.
    """

    own: Unsent
    slowest: Unsent
    sending: float
    bucket_bytes: int
    coded: float | None = None


@dataclass
class _Hook:
    """Communication hook of DistributedDataParallel.

    Attributes:
        codes: sends gradients in a codec; None for gradients that are not on the CPU.
        group: process group of the all-reduces; None for the default one.
        way: treatment of the next gradients.
    """

    codes: DdpCompressor | None
    group: distributed.ProcessGroup | None
    way: _Way = _Way.SENT

    def take(self, state: object, bucket: Any) -> Future[torch.Tensor]:
        if self.way is _Way.CODED and self.codes is not None:
            return self.codes.hook(state, bucket)
        if self.way is _Way.SENT:
            work = distributed.all_reduce(bucket.buffer(), group=self.group, async_op=True)
            assert work is not None
            future: Future[Any] = work.get_future()
            return future.then(lambda done: done.value()[0])
        left: Future[torch.Tensor] = Future()
        left.set_result(bucket.buffer())
        return left

    # DistributedDataParallel compares annotations with classes, but these are strings.
    take.__annotations__.clear()


@dataclass
class _Wrapped:
    """A model that is wrapped and compiled, and its hook."""

    model: Any
    parallel: DistributedDataParallel
    hook: _Hook
    training: TrainingStep

    def round(self, row: int) -> list[float]:
        """Return the seconds per step of each variant, over `row` consecutive steps."""
        result = []
        for self.hook.way in _Way:
            if self.hook.way is _Way.CODED and self.hook.codes is None:
                break
            meet()
            begin = time.perf_counter()
            with (
                self.parallel.no_sync() if self.hook.way is _Way.LEFT else contextlib.nullcontext()
            ):
                for _ in range(row):
                    self.training.run(self.model)
            if self.parallel.device_type == "cuda":
                torch.cuda.synchronize(self.parallel.device)
            result.append((time.perf_counter() - begin) / row)
        return result


def together(
    module: nn.Module, compiled: Callable[[nn.Module, TrainingStep], Any], training: TrainingStep
) -> JointSteps:
    """Measure steps of a model on all ranks.

    Args:
        module: the same on all ranks.
        compiled: compiles a module by training it for a step.
        training: step of the model; with an optimizer, parameters change differently on each rank.
    """
    total = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    mebibytes = min(_LARGEST_BUCKET_MIB, max(1, round(total / _BUCKETS / 2**20)))
    group = carrying(next(module.parameters()).device)
    settings = {"process_group": group, "bucket_cap_mb": mebibytes, **_leaving_buffers()}
    parallel = DistributedDataParallel(module, init_sync=False, **settings)
    with _coding(module) as codes:
        hook = _Hook(codes, group)
        parallel.register_comm_hook(None, hook.take)
        training = replace(training, zero=module.zero_grad)
        wrapped = _Wrapped(compiled(parallel, training), parallel, hook, training)
        warm = [wrapped.round(1) for _ in range(_WARMUP_STEPS)]
        row, rounds = _many(max(warm[-1]))
        result = [wrapped.round(row) for _ in range(rounds)]
    left, copied, *_ = owned = [faster_half(method) for method in zip(*result, strict=True)]
    all_left, all_copied, sending, coded = slowest([*owned, *[math.inf] * (len(_Way) - len(owned))])
    # This frees the hooks that DistributedDataParallel registered on parameters.
    del parallel, wrapped
    gc.collect()
    on_all = None if math.isinf(coded) else coded
    return JointSteps(
        Unsent(left, copied), Unsent(all_left, all_copied), sending, mebibytes * 2**20, on_all
    )


@contextlib.contextmanager
def _coding(module: nn.Module) -> Iterator[DdpCompressor | None]:
    """Yield the compressor of a model's gradients; None for a model that is not on the CPU."""
    group = distributed.new_group(backend="gloo")
    named = [(name, item) for name, item in module.named_parameters() if item.requires_grad]
    assigned = to_all(codec_named(CODEC), [item.numel() for _, item in named])
    try:
        if all(item.device.type == "cpu" for _, item in named):
            yield DdpCompressor(
                group, distributed.get_rank(), distributed.get_world_size(), named, assigned, 0, 0
            )
        else:
            yield None
    finally:
        distributed.destroy_process_group(group)


def _many(seconds: float) -> tuple[int, int]:
    """Return consecutive steps and rounds for this rank's step time; equal on all ranks."""
    return _rounds(*slowest([seconds]))


def _rounds(seconds: float) -> tuple[int, int]:
    row = max(1, round(_ROW / seconds))
    return row, min(_MOST, max(_LEAST, round(_SECONDS / (row * len(_Way) * seconds))))


def _leaving_buffers() -> dict[str, Any]:
    """Return DistributedDataParallel's option against sending buffers; torch 2.13 renames it."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {
        next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in names): False
    }
