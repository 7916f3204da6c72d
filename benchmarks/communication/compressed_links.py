"""All-reduce of 26 MB of gradients over slow links: each codec compared with torch's FP16 hook.
Two ranks run in network namespaces with a link of 1 Gbps or 100 Mbps (links.py), and over loopback,
which is not bandwidth-bound. All methods run interleaved. Columns: "seconds" per reduction;
"to_plain" and "to_half" are the speedups over DistributedDataParallel in FP32 and over the FP16
hook; "coding" is the time of encoding and decoding; "wire" and "theory" are bytes sent by a rank,
measured and according to the papers. "model" is the predicted time: 0.1 ms latency per message,
bytes at the link's rate, and "coding". Goals: 8 bits are 1.5 (1.7) times as fast as the FP16 hook
at 1 Gbps (100 Mbps), 4 bits 2.5 (3.2) times; bytes within 1.03 of theory; time within 1.15 (1.10)
of the model. "transport" is point to point over gloo, or gloo's collectives, whose time relative to
the first is "to_pairwise": at most 1.10 at 1 Gbps. Without root only the loopback rows are
measured.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from qsync_fx.communication.codecs import NAMES
from qsync_fx.predictor.replayer.cluster import TRANSPORTS

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.communication import links
from benchmarks.communication.ranks import found_by, requested_job
from benchmarks.communication.reductions import HALF, PLAIN, Reduction, reductions
from benchmarks.support.harness import Row, arguments, by_size, finish

SIZE = 26e6
LATENCY = 1e-4
RATES = {"1gbit": 1.15, "100mbit": 1.10}
"""Maximum ratio of the measured time to the model, by rate."""
GOALS = {
    ("1gbit", "qsgd8"): 1.5,
    ("100mbit", "qsgd8"): 1.7,
    ("1gbit", "qsgd4"): 2.5,
    ("100mbit", "qsgd4"): 3.2,
}
BYTES = 1.03
TO_PAIRWISE = 1.10
"""Maximum time of collectives over gloo relative to messages point to point, at 1 Gbps."""
TORCH = {PLAIN: 4, HALF: 2}
"""Bytes per value of torch's methods."""


def main() -> None:
    if (job := requested_job()) is not None:
        rank(job)
        return
    options = arguments(
        __doc__,
        ranks={"type": int, "default": 2, "help": "how many (%(default)s)"},
        codec={"action": "append", "help": "these alone", "choices": NAMES},
        transport={"action": "append", "help": "these alone", "choices": TRANSPORTS},
        repeats={"type": int, "default": 15, "help": "turns (%(default)s)"},
    )
    torch.set_num_threads(1)
    reason = links.told_missing("loopback")
    rows: list[Row] = []
    for rate in (*(RATES if reason is None else ()), None):
        job = {
            "codecs": options.codec or (by_size(options.quick, ["qsgd8", "aqgb"], list(NAMES))),
            "values": round((by_size(options.quick, SIZE / 100, SIZE)) / 4),
            "repeats": by_size(options.quick, 2, options.repeats),
            "transports": options.transport or TRANSPORTS,
        }
        rows += measured(options.ranks, rate, job)
    finish(options, rows)


def rank(job: dict[str, Any]) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    results = reductions(job["codecs"], job["values"], job["repeats"], transports=job["transports"])
    if distributed.get_rank() == 0:
        Path(job["path"]).write_text(json.dumps([dataclasses.asdict(item) for item in results]))
    distributed.barrier()
    distributed.destroy_process_group()


def measured(ranks: int, rate: str | None, job: dict[str, Any]) -> list[Row]:
    results = [Reduction(**result) for result in found_by(__file__, job, ranks, rate, seconds=1800)]
    return [row(ranks, rate, result, 4 * job["values"]) for result in results]


def row(ranks: int, rate: str | None, reduction: Reduction, size: int) -> Row:
    made: dict[str, Any] = {
        "rate": rate or "loopback",
        "ranks": ranks,
        **dataclasses.asdict(reduction),
    }
    if reduction.wire is not None and reduction.theory is not None:
        made |= {
            "wire_to_theory": reduction.wire / reduction.theory,
            "bytes reached": reduction.wire / reduction.theory <= BYTES,
        }
    if rate is None:
        return made
    # Two ranks exchange full messages in one phase; torch's all-reduce has two phases.
    phases, sent = 2, reduction.theory
    if ranks == 2 and reduction.method not in TORCH:
        phases = 1
    if sent is None:
        sent = 2 * (ranks - 1) / ranks * size * TORCH[reduction.method] / 4
    model = (
        phases * (ranks - 1) * LATENCY
        + 8 * sent / links.bits_per_second(rate)
        + (reduction.coding or 0.0)
    )
    made |= {
        "model": model,
        "to_model": reduction.seconds / model,
        "model reached": reduction.seconds / model <= RATES[rate],
    }
    if reduction.to_pairwise is not None:
        if rate == "1gbit":
            made["transport reached"] = reduction.to_pairwise <= TO_PAIRWISE
    elif ranks == 2 and (goal := GOALS.get((rate, reduction.method))):
        made |= {"goal": goal, "reached": reduction.to_half >= goal}
    return made


if __name__ == "__main__":
    main()
