"""Rank process with a GPU-only default group, as after `init_process_group("nccl")`.

It is started by tests/distributed. The backend is gloo, registered for "cuda" only, so torch
rejects CPU tensors as with NCCL. The model is on the CPU, and DistributedDataParallel reduces its
gradients in another gloo group.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from benchmarks.communication.reductions import reductions
from qsync_fx.distributed import Replanning, average_by_batch, check_replicas, compress, guard
from qsync_fx.profiler.links.collective_times import all_reduce_seconds, buffers_seconds
from qsync_fx.profiler.links.exchange_times import exchanges
from tests.support.distributed.guarded_rank import compiled, data, network, said, train, weights
from tests.support.processes import ranks


def refusals(rank: int) -> list[str]:
    """Return torch's errors for collectives of CPU tensors and objects in the default group."""
    messages = []
    tries: list[Callable[[], Any]] = [
        lambda: distributed.all_reduce(torch.ones(3)),
        distributed.barrier,
        lambda: distributed.all_gather_object([None, None], rank),
    ]
    for give in tries:
        try:
            give()
            messages.append("")
        except (RuntimeError, AssertionError) as error:
            messages.append(str(error))
    return messages


def routes() -> list[list[Any]]:
    """Return [device, is default group] of each measured all-reduce of a GPU model.

    The meta device represents the GPU; all-reduces of its tensors are skipped.
    """
    calls, sends = [], distributed.all_reduce

    def noted(tensor: Tensor, *arguments: Any, group: Any = None, **more: Any) -> Any:
        calls.append([tensor.device.type, group is None])
        return None if tensor.is_meta else sends(tensor, *arguments, group=group, **more)

    with mock.patch.object(distributed, "all_reduce", noted):
        all_reduce_seconds(2**10, 1, torch.device("meta"))
    return calls


def measured(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Measure links, and return torch's errors."""
    norm = nn.BatchNorm1d(8)
    return {
        "refused": refusals(rank),
        "routes": routes(),
        "numbers": [[asdict(item) for item in exchanges()], buffers_seconds(norm)],
        "ways": [reduction.method for reduction in reductions(["qsgd8"], 2**12, 3)],
    }


def trained(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Find a plan, train and replan with compressed gradients, and check different replicas."""
    # The profiler warns and measures less if no step with gradient reduction can be trained.
    warnings.filterwarnings("error", message="no step could be trained")
    model, batch = network(), data(rank, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {
        "device_class": ["fast", "slow"][rank],
        "precisions": ["fp32", "int8"],
        "codecs": ["qsgd8"],
    }
    options |= {
        "optimizer": optimizer,
        "progress": False,
        "repeats": 1,
        "max_replans": 1,
        "hierarchical": False,
    }
    plan = qsync_fx.distributed.measure_and_plan(model, squares, [batch], **options)
    gloo = distributed.new_group(backend="gloo")
    parallel = DistributedDataParallel(compiled(model, plan), process_group=gloo)
    handle = compress(parallel, plan, check_every=1)
    # With this clock, both ranks are slower than predicted.
    options = {
        "compression": handle,
        "free": lambda: None,
        "clock": lambda: 100 * time.perf_counter(),
    }
    replan = Replanning(plan, patience=2, cooldown=2, **options)
    with guard(parallel, check_every=1, replan=replan) as training:
        list(train(parallel, rank, 8))
    results: dict[str, Any] = {
        "plan": plan.to_json(),
        "travelled": [
            collective.backend
            for profile in plan.survey.profiles.values()
            for collective in profile.collectives
        ]
        if plan.survey is not None
        else [],
        "replanned": len(training.replanned),
        "weights": weights(model),
        "compiled": len(qsync_fx.plan_coverage(parallel).operators),
    }
    other = DistributedDataParallel(compiled(network()), process_group=gloo)
    average_by_batch(other)
    with guard(other, check_every=1):
        list(train(other, rank, 2, samples=2 + rank))
    results["weighted"] = weights(other)
    with torch.no_grad():
        other.module.get_parameter("1.bias")[2] += rank
    try:
        check_replicas(other)
    except qsync_fx.RankError as error:
        results["differing"] = said(error)
    return results


def squares(module: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = module(x).square().mean()
    return result


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:], lambda _: True)
