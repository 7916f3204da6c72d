"""All-reduce of 26 MB of gradients on two nodes of two ranks, compared with its prediction.
Gradients are FP32 inside a node and compressed between nodes. Each node is a network namespace with
one link of 1 Gbps or 100 Mbps (links.py), and its ranks communicate inside it. The prediction uses
times of exchanges inside and between nodes, and codec speeds in CPU time, measured in the same run
by all ranks concurrently (docs/replayer.md). Columns: "model" is the predicted time with pipelined
coding and transfer, "in turns" without pipelining, and "to_*" the measured "seconds" divided by
each. "transport" is point to point over gloo, or gloo's collectives in groups of a node and between
nodes; "to_pairwise" is the time of the second relative to the first. Without root only loopback is
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

from qsync_fx import Cluster
from qsync_fx.communication import codec_benchmarks
from qsync_fx.communication.allreduce import NodeGroups
from qsync_fx.communication.codec_cost_model import coded, of_speeds
from qsync_fx.communication.codecs import PLAIN, codec_named
from qsync_fx.distributed import node_topology
from qsync_fx.predictor.cost_mapper.times import Parameter
from qsync_fx.predictor.replayer import cluster
from qsync_fx.predictor.replayer.cluster import TRANSPORTS
from qsync_fx.predictor.replayer.cluster_step import SimulatedBucket, travel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.communication import links
from benchmarks.communication.ranks import found_by, requested_job
from benchmarks.communication.reductions import Reduction, reductions
from benchmarks.support.harness import Row, arguments, by_size, finish

RATES = ("1gbit", "100mbit")
NODES = NodeGroups(((0, 1), (2, 3)))
VALUES = round(26e6 / 4)
CODECS = ("qsgd8", "qsgd4", "1bit*", "fp16")


def main() -> None:
    if (job := requested_job()) is not None:
        rank(job)
        return
    options = arguments(
        __doc__,
        repeats={"type": int, "default": 15, "help": "turns (%(default)s)"},
        transport={"action": "append", "help": "these alone", "choices": TRANSPORTS},
    )
    torch.set_num_threads(1)
    rows: list[Row] = []
    ranks = len(NODES.ranks) * NODES.size
    for rate in RATES if links.told_missing("loopback") is None else (None,):
        job = {
            "codecs": by_size(options.quick, CODECS[:1], CODECS),
            "values": by_size(options.quick, VALUES // 100, VALUES),
            "repeats": by_size(options.quick, 2, options.repeats),
            "transports": options.transport or TRANSPORTS,
        }
        result = found_by(__file__, job, ranks, rate, seconds=1800, node=NODES.size)
        rows += [
            {"rate": rate or "loopback", "nodes": len(NODES.ranks), "ranks": ranks, **row}
            for row in result
        ]
    finish(options, rows)


def rank(job: dict[str, Any]) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    measured = node_topology.measured(NODES)
    distributed.barrier()
    codecs = [codec_named(name) for name in (PLAIN.name, *job["codecs"])]
    speeds = codec_benchmarks.measured(codecs, job["values"], job["repeats"])
    results = reductions(
        job["codecs"], job["values"], job["repeats"], NODES, transports=job["transports"]
    )
    if distributed.get_rank() == 0:
        world = distributed.get_world_size()
        device = cluster.ClusterDevice(world, node=cluster.Node(NODES.size))
        fleet = Cluster({"all": device}, cluster.Network(exchanges=measured))
        rows = [
            row(result, fleet, speeds, job["values"])
            for result in results
            if result.coding is not None
        ]
        Path(job["path"]).write_text(json.dumps(rows))
    distributed.barrier()
    distributed.destroy_process_group()


def row(
    reduction: Reduction, fleet: Cluster, speeds: list[codec_benchmarks.Speed], values: int
) -> Row:
    parameter = Parameter("gradient", values)
    transfer = coded(
        [parameter],
        {"gradient": reduction.method},
        fleet.ranks,
        of_speeds(speeds, "here"),
        size=NODES.size,
    )
    models = {"model": transfer, "in turns": dataclasses.replace(transfer, stretches=1)}
    seconds_by_model = {
        name: float(
            travel(fleet, [SimulatedBucket(("gradient",), 4 * values, model.nbytes, model)])[0]
        )
        for name, model in models.items()
    }
    ratios = {
        f"to_{name}": reduction.seconds / seconds for name, seconds in seconds_by_model.items()
    }
    return {
        **dataclasses.asdict(reduction),
        "predicted coding": transfer.coding,
        "stretches": transfer.stretches,
        **seconds_by_model,
        **ratios,
    }


if __name__ == "__main__":
    main()
