"""`qsync comm`: what it costs to send gradients in fewer bits."""

from __future__ import annotations

import argparse

from qsync_fx.cli import output
from qsync_fx.cli.comm_predict import PREDICT
from qsync_fx.cli.command import Command

_ABOUT = """\
How fast codecs of gradients are on this processor.

Each is timed in turns with a copy of the same memory: 1 means as fast as
memcpy. Decoding adds to what is there, as the sum over ranks does."""

_EXAMPLES = """\
examples:
  qsync comm bench                          all codecs on one core
  qsync comm bench --codec qsgd8 --codec '1bit*' --threads 2 --json"""


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

    import torch

    from qsync_fx.communication.codecs import NAMES, codec_named
    from qsync_fx.communication.speed import measured
    from qsync_fx.errors import OptionError

    for name in ("megabytes", "threads", "repeats"):
        if not getattr(arguments, name) > 0:
            raise OptionError(f"{name} is {getattr(arguments, name)}, and has to be above 0", where="qsync comm bench")
    torch.set_num_threads(arguments.threads)
    codecs = [codec_named(name) for name in arguments.codec or NAMES]
    found = measured(codecs, max(1, round(arguments.megabytes * 2**18)), arguments.repeats)
    if arguments.json:
        output.as_json([dataclasses.asdict(speed) for speed in found])
        return
    rows = (
        (
            speed.codec,
            f"{speed.bits:.3f}",
            f"{speed.encode / 1e9:.1f}",
            f"{speed.decode / 1e9:.1f}",
            f"{speed.encode_to_copy:.2f}",
            f"{speed.decode_to_copy:.2f}",
        )
        for speed in found
    )
    columns = ("codec", "bits a value", "encode GB/s", "decode GB/s", "encode to memcpy", "decode to memcpy")
    output.show(output.table(columns, rows, right=columns[1:]))


COMMAND = Command(
    "what sending gradients in fewer bits costs",
    about="What sending gradients in fewer bits costs, and where it pays.",
    actions={
        "bench": Command("codecs against memcpy on this processor", _bench, _arguments, _ABOUT, _EXAMPLES),
        "predict": PREDICT,
    },
)
