"""How fast this processor, or its GPU, writes and reads gradients in each codec, as profiles hold it.

Invariant: of a device and a number of threads it is measured once in a process.
"""

from __future__ import annotations

import functools

import torch

from qsync_fx.communication.codecs import NAMES, codec_named
from qsync_fx.communication.codecs.truncation import Adaptive
from qsync_fx.communication.speeds.speed import measured
from qsync_fx.communication.wire.stretches import VALUES
from qsync_fx.profiling.measuring.queued import clock_of
from qsync_fx.profiling.measuring.steps import clock_for
from qsync_fx.profiling.profile import CodecSpeed

_VALUES = 2**23
"""More than a bucket of DistributedDataParallel holds, which lies in memory, and not in a cache. It is coded stretch by stretch."""
_REPEATS = 5


def coding_speeds(device: torch.device | None = None) -> list[CodecSpeed]:
    """Returns the speed of each codec on a device, with as many threads as torch has."""
    return list(_with_threads(torch.get_num_threads(), device or torch.device("cpu")))


@functools.cache
def _with_threads(threads: int, device: torch.device) -> tuple[CodecSpeed, ...]:
    # No bucket is foreseen by shapes of parameters, which a profile does not hold, nor by levels that the link decides.
    named = [codec_named(name) for name in NAMES]
    codecs = [codec for codec in named if codec.fitted((3, 5)) == codec and not isinstance(codec, Adaptive)]
    clock = clock_for(threads) if device.type == "cpu" else clock_of(device)
    found = measured(codecs, _VALUES, _REPEATS, clock, device, VALUES)
    return tuple(CodecSpeed(one.codec, one.encode, one.decode) for one in found)
