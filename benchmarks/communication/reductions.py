"""Average of gradients over the process group of several ranks, with each codec and torch's hooks.

    torchrun --standalone --nproc-per-node 2 benchmarks/communication/reductions.py
    python benchmarks/communication/links.py --rate 1gbit --ranks 2 -- \\
        python benchmarks/communication/reductions.py --codec qsgd8

Runs are interleaved with torch's all-reduce and its FP16 hook, so that noise affects all methods;
"seconds" are of the slowest rank, and ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from qsync_fx.communication.allreduce import NodeGroups
from qsync_fx.communication.codec_benchmarks import VALUES
from qsync_fx.communication.codecs import NAMES, codec_named
from qsync_fx.communication.control_group import CPU, carrying, meet, slowest
from qsync_fx.communication.ddp_hook import DdpCompressor, to_all
from qsync_fx.communication.transport import COLLECTIVE, POINT_TO_POINT
from qsync_fx.distributed.agreement import patience
from qsync_fx.distributed.gradient_groups import gradient_groups
from qsync_fx.predictor.replayer.cluster import TRANSPORTS

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import show

PLAIN: Final = "torch fp32"  # all-reduce
HALF: Final = "torch fp16"  # comm hook that converts to FP16
_WIDTH: Final = 1024
_WARMUP: Final = 3
_BY: Final = " by "


@dataclass(frozen=True)
class Reduction:
    """Measured method to average gradients: a codec, or a baseline of torch."""

    method: str
    seconds: float
    to_plain: float  # speed relative to torch in FP32
    to_half: float  # speed relative to torch's FP16 hook
    coding: float | None = None  # seconds of encoding and decoding; None for torch's hooks
    wire: float | None = None
    theory: float | None = None
    transport: str | None = None  # of a codec
    to_pairwise: float | None = None  # time relative to the same codec point to point


def reductions(
    codecs: Sequence[str],
    values: int = VALUES,
    repeats: int = 15,
    nodes: NodeGroups | None = None,
    transports: Sequence[str] = (POINT_TO_POINT,),
) -> list[Reduction]:
    """Return the duration of each method; all ranks call it together and get the same result.

    The number of FP32 values is rounded to 1024. With `nodes`, the codec is used between them. AQGB
    is measured point to point only.
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
    for name, transport in itertools.product(codecs, transports):
        if transport == COLLECTIVE and codec_named(name).on_host:
            continue
        # Groups for each codec, as `compress` creates.
        group = collectives = None
        if world > 1:
            group, collectives = gradient_groups(transport, CPU, nodes, patience())
        codec, named = to_all(codec_named(name), [1], 0), [("gradient", parameter)]
        settings = group, rank, world, named, codec, 0, 0, None, nodes, collectives
        handle, method = DdpCompressor(*settings), method_of(name, transport)
        handles[method], hooks[method] = handle, handle.hook

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
        name, _, transport = method.partition(_BY)
        to_pairwise = speedup(method, name) if transport and name in by_method else None
        result.append(
            Reduction(
                name,
                statistics.median(by_method[method]),
                *ratios,
                **traffic,
                transport=(transport or POINT_TO_POINT) if method in handles else None,
                to_pairwise=to_pairwise,
            )
        )
    return result


def method_of(codec: str, transport: str) -> str:
    """Return the name of a measured method."""
    return codec if transport == POINT_TO_POINT else f"{codec}{_BY}{transport}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codec", action="append", choices=NAMES, help="these alone")
    parser.add_argument("--megabytes", type=float, default=26.0, help="of gradients (%(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="turns (%(default)s)")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="these alone")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    options = parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    values, rank = max(1, round(options.megabytes * 2**18)), distributed.get_rank()
    result = [
        dataclasses.asdict(item)
        for item in reductions(
            options.codec or NAMES,
            values,
            options.repeats,
            transports=options.transport or TRANSPORTS,
        )
    ]
    distributed.barrier()
    distributed.destroy_process_group()
    if rank == 0 and options.json:
        print(json.dumps(result, indent=2))
    elif rank == 0:
        show(result)


if __name__ == "__main__":
    main()
