"""AQGB's Fig. 3 over real sockets: overlap of communication and computation.
Ranks in network namespaces send the paper's blocks: 40, 20, 30 and 10 MB, ready at 0.27, 0.41, 0.61
and 0.68 s of a step, with the deadline at 0.765 s. Sleeping replaces computation. The link has 1
Gbps, or alternates between 650 Mbps and 1 Gbps; other rates give the curve of Fig. 3a. Column
"method": "fp32" is uncompressed; AQGB estimates the link rate by the paper's rule, which includes
idle time ("paper's rate"), or by this project's rule, which does not ("our rate"). Other columns:
"by the rule" and "rule_last" are the results of the paper's allocation rule on an ideal link,
"paper" the published number. "overlap" is the fraction of transfer time before the deadline,
"overlap_last" before the last block is ready (0.68 s), and "end" the end of the last transfer in
seconds: medians over the steps of all ranks, without the first step, which learns the block times.
"ratios" are the chosen compression ratios of the blocks, and "ratio" their mean by size. A rank
sends a copy to each other rank, where the paper broadcasts one. On a noisy machine, run it under
`chrt -r 1`, which the result file reports as "real_time".
"""

from __future__ import annotations

import json
import operator
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from qsync_fx.communication import aqgb, point_to_point
from qsync_fx.communication.codecs import codec_named
from qsync_fx.communication.codecs.truncation import Adaptive
from qsync_fx.communication.ddp_hook import DdpCompressor, to_all
from qsync_fx.communication.point_to_point import PendingTransfers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.communication import links
from benchmarks.paper.support.aqgb_simulation import Block, Broadcast, broadcast
from benchmarks.support.harness import Row, arguments, by_size, show, write_json

BLOCKS = ((40e6, 0.27), (20e6, 0.41), (30e6, 0.61), (10e6, 0.68))
DEADLINE = 0.765
SLOW, FAST, TURN = "650mbit", "1gbit", 0.05
WAYS = ("fp32", "paper's rate", "our rate")
PAPER = {"fp32": 0.51, "paper's rate": 0.98}
"""Published overlap on the link with varying rate, to the paper's precision."""


@dataclass(frozen=True)
class Case:
    """Link, whose rates alternate, number of ranks, and methods of sending."""

    rates: tuple[str, ...]
    ranks: int = 2
    methods: tuple[str, ...] = WAYS


CASES = {
    "1 Gbps": Case((FAST,)),
    "650 Mbps and 1 Gbps": Case((SLOW, FAST)),
    **{f"{rate} Mbps": Case((f"{rate}mbit",), methods=WAYS[2:]) for rate in (500, 700, 850, 1200)},
    "1 Gbps, 4 ranks": Case((FAST,), 4, (WAYS[0], WAYS[2])),
}


class Bucket:
    """One block, with the parts of `GradBucket` that the communication hook uses."""

    def __init__(self, index: int, parameter: nn.Parameter, values: Tensor, last: bool) -> None:
        self._index, self._parameter, self._values, self._last = index, parameter, values, last

    def buffer(self) -> Tensor:
        return self._values

    def gradients(self) -> list[Tensor]:
        return [self._values]

    def parameters(self) -> list[nn.Parameter]:
        return [self._parameter]

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "--rank":
        rank(json.loads(sys.argv[2]))
        return
    options = arguments(
        __doc__, steps={"type": int, "default": 12, "help": "steps a case (%(default)s)"}
    )
    reason = links.told_missing("the rule")
    steps, scale = by_size(options.quick, (3, 0.1), (options.steps, 1.0))
    rows: list[Row] = []
    for name, case in CASES.items():
        for variant in case.methods:
            row: dict[str, Any] = {"link": name, "method": variant, "ranks": case.ranks}
            if case.ranks == 2:
                ideal = predicted(variant, case.rates)
                row |= {"by the rule": ideal.overlap(DEADLINE)}
                row["rule_last"] = ideal.overlap(BLOCKS[-1][1])
                if variant != "fp32":
                    row["ratios by the rule"] = [d.ratio for d in ideal.decisions]
            row["paper"] = PAPER.get(variant) if len(case.rates) > 1 else None
            if reason is None:
                row |= measured(variant, case, {"steps": steps, "scale": scale})
            rows.append(row)
    show(rows)
    if options.json:
        write_json(
            options.json,
            rows,
            options.quick,
            steps=steps,
            real_time=os.sched_getscheduler(0) != os.SCHED_OTHER,
        )


def predicted(variant: str, rates: tuple[str, ...]) -> Broadcast:
    """Return the paper's rule on an ideal link, where its rate estimate has little effect."""
    blocks = [Block(size, ready) for size, ready in BLOCKS]
    bits = [links.bits_per_second(rate) for rate in rates]

    def rate(now: float) -> float:
        return bits[int(now / TURN + 1e-9) % len(bits)] / 8

    changes = [TURN * turn for turn in range(1, 60)] if len(bits) > 1 else ()
    return broadcast(blocks, DEADLINE, rate, changes, adaptive=variant != "fp32")


def measured(variant: str, case: Case, job: dict[str, Any]) -> dict[str, Any]:
    """Return medians over the steps of all ranks."""
    stop, rates = threading.Event(), case.rates
    with tempfile.TemporaryDirectory() as folder, links.shaped(case.ranks, rates[0]) as places:
        turning = None
        if len(rates) > 1:
            turning = threading.Thread(target=turn, args=(places, rates, stop))
        if turning is not None:
            turning.start()
        try:
            command = [
                sys.executable,
                __file__,
                "--rank",
                json.dumps({**job, "method": variant, "folder": folder}),
            ]
            ended = links.run(places, command, {"OMP_NUM_THREADS": "1"}, seconds=600)
        finally:
            stop.set()
            if turning is not None:
                turning.join()
        if any(ended.codes):
            raise SystemExit(f"{variant}: ranks ended with {ended.codes}")
        steps_by_rank = [
            json.loads((Path(folder) / f"{rank_index}.json").read_text())
            for rank_index in range(case.ranks)
        ]
    every = [step for item in steps_by_rank for step in item]

    def overlap(until: float) -> float:
        start = until * job["scale"]
        shares: list[float] = [
            sum(max(0.0, min(end, start) - begin) for begin, end in step["busy"])
            / sum(e - b for b, e in step["busy"])
            for step in every
        ]
        return statistics.median(shares)

    ratios = [
        statistics.median(values)
        for values in zip(*(step["ratios"] for step in every), strict=True)
    ]
    result: dict[str, Any] = {
        "overlap": overlap(DEADLINE),
        "overlap_last": overlap(BLOCKS[-1][1]),
        "end": statistics.median(step["busy"][-1][1] for step in every) / job["scale"],
        "ratios": ratios,
    }
    if ratios:
        sizes = [size for size, _ in BLOCKS]
        result["ratio"] = sum(map(operator.mul, sizes, ratios)) / sum(sizes)
    return result


def turn(places: list[links.Place], rates: tuple[str, ...], stop: threading.Event) -> None:
    """Switch the link rate every `TURN` seconds."""
    start = 0
    while not stop.wait(TURN):
        start += 1
        links.reshape(places, rates[start % len(rates)])


def rank(job: dict[str, Any]) -> None:
    """Run one rank: steps whose blocks are ready at the scheduled times."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank_index, ranks, scale = distributed.get_rank(), distributed.get_world_size(), job["scale"]
    parameters = [nn.Parameter(torch.zeros(round(size * scale / 4))) for size, _ in BLOCKS]
    values = [torch.randn(p.numel()) * 1e-3 for p in parameters]
    buckets = [
        Bucket(index, p, v, index == len(BLOCKS) - 1)
        for index, (p, v) in enumerate(zip(parameters, values, strict=True))
    ]
    adaptive = Adaptive(
        segment=max(2**12, round(2**20 * scale)), elapsed=job["method"] == "paper's rate"
    )
    codec = codec_named("fp32") if job["method"] == "fp32" else adaptive
    named = [(str(index), p) for index, p in enumerate(parameters)]
    assigned = to_all(codec, [1] * len(BLOCKS), 0)
    handle = DdpCompressor(
        distributed.new_group(backend="gloo"),
        rank_index,
        ranks,
        named,
        assigned,
        seed=0,
        check_every=0,
    )
    busy: list[tuple[float, float]] = []
    began = 0.0

    class Recorded(PendingTransfers):
        """Transfers that record when each message is in flight."""

        def __init__(self, group: Any, about: str) -> None:
            super().__init__(group, about)
            self.sent: dict[int, float] = {}

        def send(self, rank: int, message: torch.Tensor, number: int = 0) -> None:
            if message.numel() > 1000:  # headers are smaller
                self.sent[number] = time.perf_counter() - began
            super().send(rank, message, number)

        def wait_received(self, rank: int, number: int = 0) -> None:
            super().wait_received(rank, number)
            if number in self.sent:
                before = busy[-1][1] if busy else 0.0
                busy.append((max(self.sent[number], before), time.perf_counter() - began))

    for module in (aqgb, point_to_point):
        vars(module)["PendingTransfers"] = Recorded
    steps = []
    for step in range(job["steps"]):
        distributed.barrier()
        began = time.perf_counter()
        busy.clear()
        for bucket, (_, ready) in zip(buckets, BLOCKS, strict=True):
            time.sleep(max(0.0, began + ready * scale - time.perf_counter()))
            handle.hook(None, bucket)
        time.sleep(max(0.0, began + DEADLINE * scale - time.perf_counter()))
        handle.wait()
        if step > 0:
            ratios = [entry.ratio for entry in handle.decisions()[-len(BLOCKS) :]]
            steps.append({"busy": list(busy), "ratios": ratios})
    Path(job["folder"], f"{rank_index}.json").write_text(json.dumps(steps))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
