"""`qsync comm`: what it costs to send gradients in fewer bits."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from qsync_fx import environment
from qsync_fx.cli import output
from qsync_fx.cli.comm_predict import PREDICT
from qsync_fx.cli.command import Command

_ABOUT = """\
How fast codecs of gradients are on this processor.

Each is timed in turns with a copy of the same memory: 1 means as fast as
memcpy. GB are of FP32, whatever its bytes on the wire. Decoding adds to what is
there, as the sum over ranks does.

Run by several ranks (torchrun, benchmarks/communication/links.py) it averages gradients
over their process group in each codec, in turns with torch's all-reduce and
its FP16 hook, and says how long the slowest rank takes."""

_EXAMPLES = """\
examples:
  qsync comm bench                          all codecs on one core
  qsync comm bench --codec qsgd8 --codec '1bit*' --threads 2 --json
  torchrun --standalone --nproc-per-node 2 -m qsync_fx.cli comm bench
  python benchmarks/communication/links.py --rate 100mbit --ranks 2 -- qsync comm bench"""


_ALONE: Final = {
    "1bit": "1bit codes the columns of each parameter; here all values are one column.",
    "aqgb": "aqgb chooses its levels as it trains; here it sends all bits, as aqgb32 does.",
}
"""What codecs are that are timed without a model."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--codec", action="append", metavar="NAME", help="this one, and others that are named so; by default all"
    )
    parser.add_argument("--megabytes", type=float, default=26.0, help="FP32 gradients of so many MiB (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (%(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="turns, of which the median counts (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON list for other programs")


def _bench(arguments: argparse.Namespace) -> None:
    import dataclasses
    import statistics

    import torch

    from qsync_fx.communication.codecs import NAMES, codec_named
    from qsync_fx.communication.duo.rates import DUOS
    from qsync_fx.communication.speeds.speed import measured
    from qsync_fx.errors import OptionError

    for name in ("megabytes", "threads", "repeats"):
        if not getattr(arguments, name) > 0:
            raise OptionError(f"{name} is {getattr(arguments, name)}, and has to be above 0", where="qsync comm bench")
    torch.set_num_threads(arguments.threads)
    for name in arguments.codec or ():
        if name in DUOS:
            do = f"train with it: compress(ddp, {name!r}, optimizer=optimizer); or time the codec that it sends in"
            raise OptionError(
                f"{name} is DUO, which looks ahead while a model trains, and no codec", where="--codec", do=do
            )
    codecs = [codec_named(name) for name in arguments.codec or NAMES]
    values = max(1, round(arguments.megabytes * 2**18))
    if (environment.launcher_number("WORLD_SIZE") or 1) > 1:
        _between_ranks([codec.name for codec in codecs], values, arguments)
        return
    found = measured(codecs, values, arguments.repeats)
    if arguments.json:
        output.as_json([dataclasses.asdict(speed) for speed in found])
        return
    rows = (
        (
            speed.codec,
            f"{speed.bits:.3f}",
            f"{speed.encode / 1e9:.1f}",
            f"{speed.read / 1e9:.1f}",
            f"{speed.decode / 1e9:.1f}",
            f"{speed.encode_to_copy:.2f}",
            f"{speed.read_to_copy:.2f}",
            f"{speed.decode_to_copy:.2f}",
        )
        for speed in found
    )
    print(f"{_what(values, arguments)}; memcpy {statistics.median(speed.copy for speed in found) / 1e9:.1f} GB/s\n")
    what = ("encode", "decode", "decode and add")
    columns = ("codec", "bits a value", *(f"{one} GB/s" for one in what), *(f"{one} to memcpy" for one in what))
    output.show(output.table(columns, rows, right=columns[1:]))
    if told := [_ALONE[speed.codec] for speed in found if speed.codec in _ALONE]:
        print("\n" + "\n".join(told))


def _between_ranks(codecs: Sequence[str], values: int, arguments: argparse.Namespace) -> None:
    import dataclasses

    from torch import distributed

    from qsync_fx.communication.speeds.reduction_speed import reductions

    distributed.init_process_group("gloo")
    found, rank = reductions(codecs, values, arguments.repeats), distributed.get_rank()
    world = distributed.get_world_size()
    distributed.barrier()
    distributed.destroy_process_group()
    if rank != 0:
        return
    if arguments.json:
        output.as_json([dataclasses.asdict(one) for one in found])
        return
    rows = (
        (
            one.way,
            f"{1e3 * one.seconds:.2f}",
            f"{one.to_plain:.2f}",
            f"{one.to_half:.2f}",
            "" if one.coding is None else f"{1e3 * one.coding:.2f}",
            "" if one.wire is None else f"{one.wire / 1e6:.3f}",
        )
        for one in found
    )
    print(f"{_what(values, arguments)}; {world} ranks, of which the slowest counts\n")
    columns = ("gradients by", "ms", "times torch fp32", "times torch fp16", "of it coding, ms", "MB sent by a rank")
    output.show(output.table(columns, rows, right=columns[1:]))


def _what(values: int, arguments: argparse.Namespace) -> str:
    from qsync_fx import _C
    from qsync_fx.report.numbers import many

    how = f"{many(arguments.threads, 'thread')}, {_C.isa()} kernels, medians of {many(arguments.repeats, 'turn')}"
    return f"{values / 2**18:.3g} MiB of FP32 gradients, {how}"


COMMAND = Command(
    "what sending gradients in fewer bits costs",
    about="What sending gradients in fewer bits costs, and where it pays.",
    actions={
        "bench": Command(
            "codecs against memcpy on this processor, or between ranks", _bench, _arguments, _ABOUT, _EXAMPLES
        ),
        "predict": PREDICT,
    },
)
