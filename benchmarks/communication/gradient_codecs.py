"""Throughput of the gradient codecs on one core, for each ISA variant, compared with memcpy.
The data are 26 MiB of FP32, the size of a DistributedDataParallel bucket. Encoding, decoding,
decoding with accumulation and copying run interleaved, timed in CPU time of the process. Columns:
"encode", "decode" (accumulates) and "read" (overwrites) are FP32 bytes per second, and "copy" bytes
per second of memcpy. "*_to_copy" are speeds relative to memcpy: the goals are 0.85 for encoding and
1.5 for decoding. They exclude codecs with a Hadamard transform, whose names end in h. "times
piquant" is the speedup of encoding over piquant's stochastic quantizer, if installed, with a given
scale (goal: 10) and with computation of the scale. A row with a "load" was measured on its "date",
while other processes used the machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from qsync_fx import _C
from qsync_fx.communication.codec_benchmarks import measured
from qsync_fx.communication.codecs import NAMES, Draw, codec_named
from qsync_fx.communication.codecs.onebit import Reshaped

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.communication.piquant_peer import encoders
from benchmarks.support.harness import Row, arguments, by_size, finish, measure

GOALS = {"encode_to_copy": 0.85, "read_to_copy": 1.5, "decode_to_copy": 1.5}
OF_OURS = ("qsgd2", "qsgd4", "qsgd8", "qsgd16", "1bit*", "1bit* of 512")
TO_PIQUANT = 10


def rows(quick: bool) -> list[Row]:
    values, repeats = by_size(quick, (2**18, 3), (26 * 2**18, 15))
    # "1bit" encodes columns of a matrix shape, and "aqgb" depends on its levels.
    codecs = [codec_named(name) for name in NAMES if name not in ("1bit", "aqgb")] + [
        Reshaped(512, "1bit* of 512")
    ]
    result, peers = measured(codecs, values, repeats), to_piquant(values, repeats)
    return [
        {
            "isa": _C.isa(),
            **dataclasses.asdict(speed),
            **{
                f"{kind} reached": getattr(speed, kind) >= goal
                for kind, goal in GOALS.items()
                if speed.codec in OF_OURS
            },
            **peers.get(speed.codec, {}),
        }
        for speed in result
    ]


def to_piquant(values: int, repeats: int) -> dict[str, Row]:
    """Return the encoding speedup over piquant at equal bits, by codec; empty if not installed."""
    source, quantization = (
        torch.randn(values, generator=torch.Generator().manual_seed(0)) * 1e-3,
        dict[str, Row](),
    )
    for bits, peers in encoders(source).items():
        codec = codec_named(f"qsgd{bits}")
        wire = torch.zeros(codec.nbytes(values), dtype=torch.uint8)
        ours = {"ours": lambda codec=codec, wire=wire: codec.encode(source, wire, Draw(1, 2))}
        times = measure({**ours, **peers}, repeats, clock=time.process_time)
        faster = {f"times {name}": times.ratio(name, "ours") for name in peers}
        quantization[codec.name] = {
            **faster,
            "piquant reached": faster["times piquant"] >= TO_PIQUANT,
        }
    return quantization


def main() -> None:
    options = arguments(
        __doc__, isa={"help": "this path alone, and its rows as JSON", "action": "store_true"}
    )
    if options.isa:
        print(json.dumps(rows(options.quick)))
        return
    all_rows: list[Row] = []
    for isa in _C.available_isas():
        # The ISA variant is selected once per process.
        command = [
            sys.executable,
            __file__,
            "--isa",
            "--threads",
            str(options.threads),
            *["--quick"] * options.quick,
        ]
        environment = {**os.environ, "QSYNC_CPU_ISA": isa}
        all_rows += json.loads(
            subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True
            ).stdout
        )
    finish(options, all_rows)


if __name__ == "__main__":
    main()
