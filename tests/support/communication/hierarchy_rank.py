"""Rank process of the tests of hierarchical compression, started by tests/communication."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx.allocator import PlanEvaluator
from qsync_fx.communication import point_to_point
from qsync_fx.communication.codecs import Codec, codec_named
from qsync_fx.communication.codecs.codec import Draw
from qsync_fx.communication.ddp_hook import by_plan
from qsync_fx.distributed import Replanning, check_replicas, compress, guard, measure_and_plan
from qsync_fx.distributed.agreement import Meeting
from qsync_fx.distributed.drift import Drift, LinkTimes, WindowSummary
from qsync_fx.distributed.node_topology import nodes_to_plan_for
from qsync_fx.plan import ClusterPlan, Plan
from qsync_fx.plan.cluster_plan import BETWEEN_NODES, TRANSPORT, between_nodes
from qsync_fx.predictor.replayer.collectives import MeasuredCollectives
from tests.support.communication.compressed_training import (
    parallel,
    refusal,
    said,
    sgd,
    train,
    weights,
)
from tests.support.communication.scaled_rank import Linear, given
from tests.support.processes import ranks

EXACT = ("fp32", "1bit*")
"""Codecs without random numbers, whose means the tests compute exactly."""


def codecs(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare two steps of each codec with a reference in one process, and train with it."""
    results: dict[str, Any] = {}
    for name in job["codecs"]:
        model = DistributedDataParallel(Linear(), bucket_cap_mb=0.004)
        handle = compress(model, name, hierarchical=job["size"], least=0, check_every=1)
        feedback: dict[Any, Tensor] = {}
        equal = []
        for step in range(2):
            model.zero_grad()
            model(given(rank, step)).backward()
            if name not in EXACT:
                continue
            gradients = [
                [given(other, step)[index].flatten() for other in range(world)]
                for index in range(2)
            ]
            expected = [
                mean(codec_named(name), index, ranks, job["size"], feedback)
                for index, ranks in enumerate(gradients)
            ]
            equal.append(
                [
                    torch.equal(p.grad.flatten(), e)
                    for p, e in zip(model.parameters(), expected, strict=True)
                ]
            )
        trained = parallel()
        report = compress(trained, name, hierarchical=job["size"], check_every=2)
        list(train(trained, sgd(trained), range(5)))
        check_replicas(trained)
        tally = report.report().tally
        results[name] = {
            "equal": equal,
            "weights": weights(trained),
            "wire": [tally.wire, tally.theory, tally.raw, tally.inside],
            "buckets": tally.buckets,
            "checks": tally.checks,
            "printed": str(handle.report()),
        }
    return results


def mean(
    codec: Codec, index: int, gradients: list[Tensor], size: int, feedback: dict[Any, Tensor]
) -> Tensor:
    """Return a parameter's mean gradient: FP32 mean inside nodes, then the codec between them."""
    values, nodes = gradients[0].numel(), len(gradients) // size
    result = torch.empty(values)
    for position in range(size):
        part = cut(values, codec.unit, size, (position - index) % size)
        inside = [
            torch.stack(gradients[node * size : (node + 1) * size])[:, part].sum(0) / size
            for node in range(nodes)
        ]
        total, count = torch.zeros(part.stop - part.start), part.stop - part.start
        stream = index * size + position
        sent = [
            through(
                codec,
                inside[node],
                feedback.setdefault((index, position, node), torch.zeros(count)),
            )
            for node in range(nodes)
        ]
        for message in sent:
            total = total + message
        total = total / nodes
        if nodes > 2 and codec.name != "fp32":
            for owner in range(nodes):
                owned = cut(count, codec.unit, nodes, (owner - stream) % nodes)
                left = feedback.setdefault(
                    (index, position, "mean", owner), torch.zeros(owned.stop - owned.start)
                )
                total[owned] = through(codec, total[owned], left)
        result[part] = total
    return result


def cut(values: int, unit: int, parts: int, index: int) -> slice:
    units = -(-values // unit)
    return slice(
        min(units * index // parts * unit, values), min(units * (index + 1) // parts * unit, values)
    )


def through(codec: Codec, values: Tensor, left: Tensor) -> Tensor:
    """Return values after encoding and decoding; update the error feedback `left`."""
    wire, decoded = (
        torch.zeros(codec.nbytes(values.numel()), dtype=torch.uint8),
        torch.empty_like(values),
    )
    codec.encode(values.contiguous(), wire, Draw(), left if codec.residual else None)
    codec.decode(wire, decoded)
    return decoded


def nodes(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return node layouts from torchrun's variables and from hosts, and errors of invalid ones."""
    results: dict[str, Any] = {}
    says = partial(refusal, results)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = compress(parallel(), "qsgd8", hierarchical=True)
    results["one host"] = (
        [str(warning.message) for warning in caught],
        handle.statement()["node layout"],
    )
    os.environ |= {"GROUP_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": str(world // 2)}
    results["torchrun"] = compress(parallel(), "qsgd8", hierarchical=True).statement()[
        "node layout"
    ]
    os.environ["GROUP_RANK"] = str(int(rank == 3))
    says("unequal", lambda: compress(parallel(), "qsgd8", hierarchical=True))
    says("number", lambda: compress(parallel(), "qsgd8", hierarchical=3))
    says("differ", lambda: compress(parallel(), "qsgd8", hierarchical=2 if rank else False))
    says("aqgb", lambda: compress(parallel(), "aqgb", hierarchical=2))

    uninterrupted = parallel()
    compress(uninterrupted, "1bit*", hierarchical=2)
    list(train(uninterrupted, sgd(uninterrupted), range(4)))
    model = parallel()
    handle, optimizer = compress(model, "1bit*", hierarchical=2), sgd(model)
    list(train(model, optimizer, range(2)))
    saved = model.state_dict(), optimizer.state_dict(), handle.state_dict()
    again = parallel()
    handle, optimizer = compress(again, "1bit*", hierarchical=2), sgd(again)
    for part, state in zip((again, optimizer, handle), saved, strict=True):
        part.load_state_dict(state)
    list(train(again, optimizer, range(2, 4)))
    results["resumed"] = [weights(uninterrupted), weights(again)]
    says("flat", lambda: compress(parallel(), "1bit*").load_state_dict(saved[2]))

    def plan(notes: dict[str, str]) -> ClusterPlan:
        return ClusterPlan(
            {"all": Plan.uniform("fp32")}, notes=notes, codecs={"first.weight": "qsgd8"}
        )

    os.environ["GROUP_RANK"] = str(rank % 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        followed = [compress(parallel(), plan(between_nodes(2, row))) for row in (False, True)]
        compress(parallel(), plan(between_nodes(2)), hierarchical=2)
        results["plan"] = (
            [handle.statement()["node layout"][0] for handle in followed],
            len(caught),
        )
        compress(parallel(), plan(between_nodes(2)), hierarchical=False)
        compress(parallel(), plan(between_nodes(4)))
    results["plan of others"] = [str(warning.message) for warning in caught]
    results["planned"] = planned(rank, world)
    return results


def planned(rank: int, world: int) -> dict[str, Any]:
    """Return the nodes detected for planning, and entries of a plan for torchrun's nodes."""
    results: dict[str, Any] = {}
    for name, setting, node in (
        ("one host", None, 0),
        ("uneven", None, int(rank == 3)),
        ("alone", None, rank),
        ("flat", False, rank % 2),
        ("torchrun", None, rank % 2),
        ("in a row", 2, 0),
    ):
        os.environ |= {"GROUP_RANK": str(node), "LOCAL_WORLD_SIZE": str(world // 2)}
        with Meeting(60, None, collectives=False) as meeting:
            nodes, uneven = nodes_to_plan_for(meeting, setting if rank == 0 else True, 60)
        results[name] = [str(nodes), uneven]
    os.environ["GROUP_RANK"] = str(rank % 2)
    torch.manual_seed(0)
    plan = measure_and_plan(
        nn.Linear(64, 32),
        lambda model, x: model(x).square().mean(),
        [torch.randn(4, 64)],
        device_class="cpu",
        precisions=["fp32"],
        target=60.0,
        codecs=("qsgd8",),
        max_replans=0,
        repeats=1,
        progress=False,
    )
    results["notes"] = plan.notes[BETWEEN_NODES]
    refusal(results, "replanning", lambda: Replanning(plan))
    if plan.answer is not None:
        problem = plan.answer.problem
        results["cluster"] = asdict(problem.cluster)
        results["flat table"] = problem.cluster.all_reduce == MeasuredCollectives(
            tuple(
                (float(nbytes), seconds)
                for nbytes, seconds in plan.survey.profiles["cpu"].collectives[0].seconds
            ),
            4,
        )
        coded = PlanEvaluator(problem, plan.answer.plans).options.coded[0]["qsgd8"]
        results["sent"] = [coded.nbytes, coded.inside]
    return results


def changes(rank: int, world: int, job: dict[str, Any]) -> dict[str, float]:
    """Change between codecs with error feedback, and finally to FP32.

    Return the relative error of the summed gradients. FP32 steps send the remaining feedback.
    """
    model = DistributedDataParallel(Linear(), bucket_cap_mb=0.004)
    handle = compress(model, "1bit*", hierarchical=2, least=0)
    names = [name for name, p in model.module.named_parameters() if p.requires_grad]
    total = [torch.zeros(p.shape) for p in model.parameters()]
    truth = [torch.zeros(p.shape) for p in model.parameters()]
    errors = {}
    for step, codec in enumerate(("1bit*", "1bit", "1bit*", "1bit", "fp32", "fp32")):
        handle.change(by_plan({} if codec == "fp32" else dict.fromkeys(names, codec), names))
        model.zero_grad()
        model(given(rank, step)).backward()
        for index, p in enumerate(model.parameters()):
            assert p.grad is not None
            total[index] += p.grad
            exact = sum(given(other, step)[index] for other in range(world)) / world
            truth[index] += exact.view(p.shape)
        apart = [float((a - b).norm() / b.norm()) for a, b in zip(total, truth, strict=True)]
        errors["unexplained" if codec == "fp32" else "lost"] = max(apart)
    check_replicas(model)
    return errors


def two_levels(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare a plan with two-level codecs with models of one codec for all parameters."""

    def gradients(codec: Any, **settings: Any) -> tuple[Any, list[Tensor]]:
        model = DistributedDataParallel(Linear(), bucket_cap_mb=0.004)
        handle = compress(model, codec, transport=job["transport"], **settings)
        for step in range(2):
            model.zero_grad()
            model(given(rank, step)).backward()
        return handle, [p.grad for p in model.parameters() if p.grad is not None]

    def plan(first: str, second: str) -> ClusterPlan:
        notes = {**between_nodes(2, in_a_row=True), TRANSPORT: "point_to_point"}
        codecs = {"first": first, "second": second}
        return ClusterPlan({"all": Plan.uniform("fp32")}, notes=notes, codecs=codecs)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle, (first, second) = gradients(plan("qsgd4/qsgd8", "qsgd4"))
    settings: dict[str, Any] = {"hierarchical": 2, "least": 0}
    _, (coded, _) = gradients("qsgd4", inside="qsgd8", **settings)
    _, (_, plain) = gradients("qsgd4", **settings)
    narrow, wide = codec_named("qsgd4"), codec_named("qsgd8")
    results: dict[str, Any] = {
        "equal": [torch.equal(first, coded), torch.equal(second, plain)],
        "statement": handle.statement()["tensor codec"],
        "expected": [
            f"first: 2077 values by {narrow!r}, {wide!r} inside nodes",
            f"second: 500 values by {narrow!r}",
        ],
        "printed": str(handle.report()),
        "warned": [str(item.message) for item in caught],
    }
    swapped = plan("qsgd4", "qsgd4/qsgd8") if rank else plan("qsgd4/qsgd8", "qsgd4")
    refusal(results, "differ", lambda: compress(DistributedDataParallel(Linear()), swapped))
    return results


def at_100_kilobytes_per_s(remeasure: Any, results: dict[str, Any], nodes: Any) -> LinkTimes:
    """Measure links again, and return durations at 100 KB/s for the same exchanges."""
    times = remeasure(nodes)
    results["groups"] = [(item.group, item.ranks) for item in times.exchanges]
    exchanges = [
        replace(item, seconds=[(size, size / 1e5) for size, _ in item.seconds])
        for item in times.exchanges
    ]
    return LinkTimes([(size, size / 1e5) for size, _ in times.all_reduce], exchanges)


def replanned(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train under a plan for two nodes, and replan for links of 100 KB/s on both levels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))

    def loss(net: Any, x: Tensor) -> Any:
        return net(x).square().mean()

    plan = measure_and_plan(
        model,
        loss,
        [torch.randn(4, 64)],
        device_class="cpu",
        precisions=["fp32"],
        codecs=("qsgd8",),
        inside_codecs=("qsgd8",),
        target=60.0,
        hierarchical=2,
        max_replans=0,
        repeats=1,
        progress=False,
    )
    options = {"plan": plan}
    parallel = DistributedDataParallel(torch.compile(model, backend="qsync", options=options))
    handle = compress(parallel, plan, check_every=2)
    results: dict[str, Any] = {"before": dict(plan.codecs)}
    flat = compress(DistributedDataParallel(nn.Linear(3, 3)), "qsgd8")
    refusal(results, "flat", lambda: Replanning(plan, compression=flat))
    settings = Replanning(plan, tolerance=100.0, links=1e9, patience=3, compression=handle)
    optimizer = sgd(parallel)
    with guard(parallel, check_every=2, same_batch=False, replan=settings) as training:
        for step in range(8):
            optimizer.zero_grad()
            loss(parallel, torch.randn(4, 64)).backward()
            optimizer.step()
            if step == 3:
                replanner: Any = training._replanner
                links = replanner._links
                links.times = partial(at_100_kilobytes_per_s, links.times, results)
                if plan.survey is not None:
                    plan.survey.wishes.update(objective="fastest", budget=1e9, target=None)  # type: ignore[attr-defined]
                replanner._replan(Drift(links=1e3), [WindowSummary()] * world)
        assert training.plan is not None
        results["notes"] = [training.plan.notes[name] for name in (BETWEEN_NODES, TRANSPORT)]
        results["after"] = dict(training.plan.codecs)
    check_replicas(parallel)
    report = handle.report()
    return results | {
        "weights": weights(model),
        "report": report.codec,
        "inside": report.tally.inside,
        "layout": handle.statement()["node layout"][0],
    }


def harmed(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Corrupt a message from rank 3 to rank 2, which are in one node."""
    model = parallel()
    compress(model, "qsgd8", hierarchical=2)
    optimizer = sgd(model)
    list(train(model, optimizer, range(2)))

    class Harmed(point_to_point.PendingTransfers):
        def expect(self, rank: int, message: torch.Tensor, number: int = 0) -> None:
            super().expect(rank, message, number)
            self.received = {**getattr(self, "received", {}), (rank, number): message}

        def wait_received(self, sender: int, number: int = 0) -> None:
            super().wait_received(sender, number)
            if (rank, sender, number) == (2, 3, 0) and "bucket 1" in self._about:
                self.received[sender, number][8] ^= 5

    point_to_point.PendingTransfers = Harmed
    try:
        list(train(model, optimizer, range(2, 4)))
    except qsync_fx.RankError as error:
        return said(error)
    return {}


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:], meet=lambda name: name != "harmed")
