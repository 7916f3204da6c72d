"""What gradients that are sent add to a step that all ranks train together: measured by such steps.

DistributedDataParallel wraps the model, so that graphs are split and buckets are sent as in training. In one step it copies no gradient, in
the next one it copies them into buckets and back, and its hook leaves them; in the third its hook sends them, and in the fourth in a codec,
as `compress` does. What differs is copying, then sending, with all that it takes of cores that compute, and the waiting of ranks for one
another; with a codec another thread, which shares Python's interpreter with the one that computes.

Invariant: all ranks call it together; no parameter is sent to another rank.

What all-reduces, and codecs, take of a rank that computes beside them.

Invariant: all ranks measure together, send as much, and know the same number.
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
"""Seconds that gradients are to travel, at least: for clocks and schedulers not to matter."""
_LONGEST: Final = 0.01
"""Seconds that one message takes at most, where there are shorter ones."""
_LARGEST_BUFFER: Final = 2**22
"""Bytes of a message: a few of them lie in memory, as buckets do, and not in a cache."""
_BESIDE: Final = 4
"""How much longer than they travel a rank computes, so that each has arrived before the next one, slowed down as it is."""
_REPEATS: Final = 21
"""Each is a small difference of two long times: their median is within a tenth where single ones are half of it off."""
_WARMUP_ROUNDS: Final = 16
"""Products of which it is seen how long one takes."""
_CODEC: Final = "qsgd8"
"""What is written beside products: all codecs keep a core as busy."""
_VALUES: Final = 2**20
_SIZE: Final = 256
"""Of the products that a rank computes: they lie in a core's cache, so that cores are what is shared."""


def busy(table: Sequence[tuple[int, float]], device: torch.device = CPU) -> float:
    """Returns what of the seconds that all-reduces travel a rank computes later, between 0 and 1; the same on all ranks, which call it
    together.

    Products are computed by as many threads as torch uses, once alone and once with messages handed over one after the other meanwhile, as
    a backward pass does it. All at once they cost less: what sends is woken up once.

    Args:
        table: bytes and seconds of all-reduces between the ranks, the same on all of them.
        device: what computes, and where messages lie.
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
    """Returns what of the seconds in which a thread writes gradients in a codec a rank computes later, between 0 and 1; the same on all
    ranks, which call it together.

    0 where another core does it, 1 where there is none: a rank of two threads that may use one core, or all ranks of a machine together.
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
    """Returns the mean over all ranks of the medians that they found, between 0 and 1."""
    return min(1.0, max(0.0, mean(statistics.median(result))))


def _computed(
    turns: int, device: torch.device = CPU, messages: Sequence[torch.Tensor] = ()
) -> float:
    """Returns the seconds of so many products, a multiple of the number of messages, which are handed over evenly among them."""
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
"""Of which a small model is to send so many: one alone would travel behind the backward pass."""
_LARGEST_POWER: Final = 25
"""MiB of a bucket at most, as DistributedDataParallel has them."""
_WARMUP_STEPS: Final = 3
"""Rounds until buckets are those that stay."""
_LEAST, _MOST, _SECONDS = 5, 21, 20.0
"""Rounds that are measured, and seconds that are enough."""
_ROW: Final = 0.3
"""Seconds of steps in a row: what sends in one is felt in the next, as where ranks come at different times."""
CODEC: Final = "qsgd8"
"""In which gradients are sent where they are coded: one that many will take, and as quick as most."""


class _Way(Enum):
    """What becomes of gradients in a step."""

    LEFT, COPIED, SENT, CODED = range(4)


def planned_seconds(seconds: float) -> float:
    """Returns how long `together` takes over steps of which one takes so many seconds, without compiling and sending."""
    row, rounds = _rounds(seconds)
    return len(_Way) * (_WARMUP_STEPS + row * rounds) * seconds


@dataclass(frozen=True)
class Unsent:
    """Seconds of steps whose gradients are not sent.

    Attributes:
        left: where they stay as they are computed.
        copied: where they are copied into buckets and back.
    """

    left: float
    copied: float


@dataclass(frozen=True)
class JointSteps:
    """Steps of all ranks at once.

    Attributes:
        own: of this rank, where nothing is sent.
        slowest: the same of the slowest rank.
        sending: seconds of the slowest rank where all gradients are sent.
        bucket_bytes: at which a bucket was full.
        coded: seconds of the slowest rank where all are sent in `CODEC`; None where none was.
    """

    own: Unsent
    slowest: Unsent
    sending: float
    bucket_bytes: int
    coded: float | None = None


@dataclass
class _Hook:
    """Attributes:
    codes: what sends gradients in a codec; None where they are not on the CPU.
    group: over which those go that are sent as they are; None for the default one.
    way: what is done with those that come.
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

    # DistributedDataParallel compares annotations with classes, and these are texts.
    take.__annotations__.clear()


@dataclass
class _Wrapped:
    """What is trained: compiled, by DistributedDataParallel, whose hook is told what to do."""

    model: Any
    parallel: DistributedDataParallel
    hook: _Hook
    training: TrainingStep

    def round(self, row: int) -> list[float]:
        """Returns the seconds of a step of each way, of so many in a row."""
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
    """Measures steps of a model on all ranks.

    Args:
        module: the same on all ranks.
        compiled: compiles it by training it for a step.
        training: of the model; parameters change, on each rank in its own way, where it has an optimizer.
    """
    total = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    mebibytes = min(_LARGEST_POWER, max(1, round(total / _BUCKETS / 2**20)))
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
    # What DistributedDataParallel has hung on parameters goes with it.
    del parallel, wrapped
    gc.collect()
    on_all = None if math.isinf(coded) else coded
    return JointSteps(
        Unsent(left, copied), Unsent(all_left, all_copied), sending, mebibytes * 2**20, on_all
    )


@contextlib.contextmanager
def _coding(module: nn.Module) -> Iterator[DdpCompressor | None]:
    """Gives what sends a model's gradients in a codec; None for a model that is not on the CPU, whose cores do not code them."""
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
    """Returns how many steps in a row, and how often, for a rank's steps that take so long; the same on all ranks."""
    return _rounds(*slowest([seconds]))


def _rounds(seconds: float) -> tuple[int, int]:
    """Returns how many steps of so many seconds in a row, and how often."""
    row = max(1, round(_ROW / seconds))
    return row, min(_MOST, max(_LEAST, round(_SECONDS / (row * len(_Way) * seconds))))


def _leaving_buffers() -> dict[str, Any]:
    """Returns how DistributedDataParallel is told to send no buffers, which torch 2.13 calls otherwise than those before."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {
        next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in names): False
    }
