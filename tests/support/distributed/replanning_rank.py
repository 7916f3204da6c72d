"""Rank process that replans during training, started by tests/distributed."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import qsync_fx
from qsync_fx import ClusterPlan
from qsync_fx.distributed import (
    DistributedBatchSampler,
    Replanning,
    average_by_batch,
    compress,
    guard,
)
from qsync_fx.distributed.fleet_plan import FleetConditions, FleetPlan, PlanSurvey
from qsync_fx.distributed.memory_use import held_bytes
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.predictor.replayer.cluster import Exchange
from qsync_fx.profiler.batch_interpolation import merge_batch_sizes
from qsync_fx.profiler.links import link_measurement
from qsync_fx.profiler.profile import Collective, Profile
from tests.support.communication.compressed_training import refusal
from tests.support.distributed.guarded_rank import weights
from tests.support.processes import ranks

BATCHES, WIDTH = (1536, 512), 256
"""Batch sizes by rank: rank 0 is slower in FP32, under any load, until rank 1 is slowed down."""
STEPS, FROM = 45, 15


class Slowed(nn.Module):
    """Module that busy-waits in both passes to multiply the CPU time of its content."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.times = module, 1.0
        self._since = 0.0
        first = next(module.parameters())
        first.register_post_accumulate_grad_hook(lambda _: self._burn())

    def forward(self, x: Tensor) -> Tensor:
        self._since = time.thread_time()
        out: Tensor = self.module(x)
        self._burn()
        if out.requires_grad:
            out.register_hook(self._begins)
        return out

    def _begins(self, _: Tensor) -> None:
        self._since = time.thread_time()

    def _burn(self) -> None:
        until = time.thread_time() + (self.times - 1) * (time.thread_time() - self._since)
        while time.thread_time() < until:
            pass


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(
        BATCHES[rank], WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)
    )


def loss_of(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def found_plan(rank: int, model: nn.Module, optimizer: Any, **wishes: Any) -> Any:
    return qsync_fx.distributed.measure_and_plan(
        model,
        loss_of,
        [batch(rank, 0)],
        optimizer=optimizer,
        device_class=["fast", "slow"][rank],
        precisions=[["fp32"], ["fp32", "bf16"]][rank],
        progress=False,
        repeats=2,
        **{"max_replans": 1, **wishes},
    )


def changes(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Replan after rank 1 slows down, and in a second training after its free memory shrinks."""
    model = network()
    plan = found_plan(rank, model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    odd = rank == 1

    def slows(step: int, slowed: Slowed, used_bytes: int) -> None:
        slowed.times = job["times"] if odd and step >= FROM else 1.0

    settings = Replanning(plan, tolerance=1.0, patience=5, cooldown=10, clock=time.thread_time)
    slower = trained(plan, rank, settings, slows)
    free = [math.inf]

    def takes_memory(step: int, slowed: Slowed, used_bytes: int) -> None:
        allowed = job["share"] * float(plan.classes["slow"].notes["peak"])
        free[0] = allowed - used_bytes if odd and step >= FROM else math.inf

    # No step is a hundred times as slow, so only memory causes replanning.
    settings = Replanning(plan, tolerance=100.0, patience=5, cooldown=10, free=lambda: free[0])
    less = trained(plan, rank, settings, takes_memory)
    other = False
    if plan.survey is not None:  # on rank 0
        slowed = FleetConditions(slowdowns={"slow": job["times"]})
        other = plan.survey.answer(slowed).as_plan().classes["slow"] != plan.classes["slow"]
    return {"before": plan.to_json(), "slower": slower, "memory": less, "other": other}


def coded(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Find a plan with codecs, train under it, and switch to another plan as in replanning."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    request = {
        "codecs": ("qsgd8", "1bit*"),
        "objective": "fastest",
        "budget": 1e9,
        "max_replans": 0,
    }
    # With links of 5 MB/s, codecs reduce the step time.
    table = [(2**10, 1e-3), (2**20, 0.2)]
    slow_links = {
        "collectives": [Collective("gloo", 2, table)],
        "exchanges": [Exchange("point_to_point", "all", 2, table)],
    }
    with contextlib.ExitStack() as patches:
        for name, value in slow_links.items():
            patch = mock.patch.object(link_measurement, name, return_value=value)
            patches.enter_context(patch)
        plan = found_plan(rank, model, optimizer, **request)
    parallel = DistributedDataParallel(
        torch.compile(model, backend="qsync", options={"plan": plan})
    )
    results: dict[str, Any] = {
        "plan": plan.to_json(),
        "codecs": dict(plan.codecs),
        "note": plan.notes["codecs"],
    }
    refusal(results, "none", lambda: Replanning(plan))
    handle = compress(parallel, plan, check_every=2)
    # The link times are simulated, so do not replan for them.
    settings = Replanning(plan, tolerance=100.0, links=1e9, patience=3, compression=handle)
    with guard(parallel, check_every=5, same_batch=False, replan=settings) as training:
        for step in range(10):
            optimizer.zero_grad()
            loss_of(parallel, batch(rank, step)).backward()
            optimizer.step()
            if step == 4:
                replanner: Any = training._replanner
                replanner._switch(
                    ClusterPlan(
                        plan.classes, plan.devices, plan.ranks, plan.notes, {"0.weight": "qsgd4"}
                    )
                )
        active = training.plan
    assert active is not None
    refusal(results, "other", lambda: Replanning(plan, compression=handle))
    report = handle.report()
    results |= {
        "weights": hashlib.sha256(weights(model).encode()).hexdigest(),
        "after": dict(active.codecs),
        "name": report.codec,
        "checks": report.tally.checks,
        "ratio": report.ratio,
    }
    return results


SAMPLES, EPOCHS = 12 * 512, 5


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, WIDTH, generator=draw), torch.arange(SAMPLES))


def proportional_profile(precisions: list[str]) -> Profile:
    """Return a profile of several batch sizes with times proportional to the batch size."""
    sizes = 256, 64, 512
    profiles = [
        qsync_fx.catalog_profile("t4", network(), loss_of, dataset()[:size][0], precisions)
        for size in sizes
    ]
    links = [Collective("gloo", 2, [(2**10, 1e-9), (2**30, 1e-8)])]
    return merge_batch_sizes(
        [
            replace(
                profile,
                runs=[run.at_pace(size / sizes[0]) for run in profiles[0].runs],
                collectives=links,
            )
            for size, profile in zip(sizes, profiles, strict=True)
        ]
    )


def surveyed(profile: Profile) -> PlanSurvey:
    """Return a plan survey of two equal devices."""
    adjustable = [item.id for item in profile.graph.operators if item.kind == "adjustable"]
    variance = {operator: {"fp16": 1.0} for operator in adjustable}
    request: dict[str, Any] = {"objective": "hybrid", "budget": None, "target": None}
    request |= {"memory": None, "margin": None, "codecs": (), "inside_codecs": ()}
    request["sensitivity"] = Sensitivity("second_order", "", variance, steps=1)
    sizing = {"batch": "global", "min_batch": 4}
    names, profiles = ["fast", "slow"], [profile, profile]
    return PlanSurvey.of(names, profiles, request, [256, 256], sizing=sizing)


def planned_batches(rank: int) -> FleetPlan:
    """Return a plan of two equal devices from predicted times."""
    text, result = [""], None
    if rank == 0:
        survey = surveyed(proportional_profile(["fp32"]))
        answer = survey.answer()
        result = FleetPlan.of(answer, survey.at_batches(answer))
        text = [result.to_json()]
    torch.distributed.broadcast_object_list(text)
    return result or FleetPlan(ClusterPlan.from_json(text[0]))


def moves(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Slow down rank 1 after some steps, so that replanning moves samples to rank 0.

    The loader of rank 1 prefetches batches in a worker process.
    """
    plan, model = planned_batches(rank), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {"plan": plan, "inner_backend": "aot_eager"}
    slowed = Slowed(torch.compile(model, backend="qsync", options=options))
    parallel = DistributedDataParallel(slowed)
    sampler = DistributedBatchSampler(range(SAMPLES), plan)
    loader = DataLoader(dataset(), batch_sampler=sampler, num_workers=rank)
    result: dict[str, Any] = {"before": dict(plan.batches), "samples": []}
    other = DistributedBatchSampler(range(SAMPLES), [1, 511])
    refusal(result, "other batches", lambda: Replanning(plan, sampler=other))
    # Only a much slower rank causes replanning; the first decision corrects predicted times.
    settings = Replanning(
        plan,
        tolerance=3.0,
        patience=4,
        cooldown=8,
        gain=0.3,
        clock=time.thread_time,
        sampler=sampler,
    )
    average_by_batch(parallel)
    step = 0
    with guard(parallel, check_every=5, replan=settings) as training:
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for x, indices in loader:
                slowed.times = job["times"] if rank == 1 and step >= FROM else 1.0
                result["samples"].append(indices.tolist())
                optimizer.zero_grad()
                loss_of(parallel, x).backward()
                optimizer.step()
                step += 1
    assert training.plan is not None
    return result | {
        "after": dict(training.plan.batches),
        "replanned": [decided.to_dict() for decided in training.replanned],
        "weights": [p.flatten().tolist() for p in model.parameters()],
    }


def trained(
    plan: Any, rank: int, settings: Replanning, each: Callable[[int, Slowed, int], None]
) -> dict[str, Any]:
    """Train under a plan; return the decisions and the active plan."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled: Any = torch.compile(model, backend="qsync", options={"plan": plan})
    slowed = Slowed(compiled)
    parallel = DistributedDataParallel(slowed)
    with guard(parallel, check_every=5, same_batch=False, replan=settings) as training:
        for step in range(STEPS):
            each(step, slowed, held_bytes(parallel, [optimizer], parallel))
            optimizer.zero_grad()
            loss_of(parallel, batch(rank, step)).backward()
            optimizer.step()
        active = training.plan
    assert active is not None
    ran = (
        operator
        for operator in qsync_fx.plan_coverage(compiled).operators
        if operator.kind == "adjustable"
    )
    return {
        "weights": hashlib.sha256(weights(model).encode()).hexdigest(),
        "replanned": [decided.to_dict() for decided in training.replanned],
        "told": [str(decided) for decided in training.replanned],
        "after": active.to_json(),
        "used": [str(operator.precision) for operator in ran],
        "steps": int(next(iter(optimizer.state.values()))["step"]),
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    ranks.play(globals(), sys.argv[1:])
