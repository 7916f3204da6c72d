"""Rank of the tests of guards; tests/distributed runs it as a process."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx import ClusterPlan, Plan
from qsync_fx.distributed import FleetPlan, Replanning, average_by_batch, check_replicas, guard
from tests.support.processes import ranks

PLAN = ClusterPlan(
    {"fast": Plan.uniform("fp32"), "slow": Plan("bf16", [("1", "int8")])}, ranks=["fast", "slow"]
)


def network(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 4))


def compiled(model: nn.Module, plan: Any = PLAN, **options: Any) -> nn.Module:
    fast: nn.Module = torch.compile(
        model, backend="qsync", options={"plan": plan, "inner_backend": "aot_eager", **options}
    )
    return fast


def data(rank: int, samples: int = 4) -> Tensor:
    return torch.randn(samples, 8, generator=torch.Generator().manual_seed(rank))


def train(model: nn.Module, rank: int, steps: int, **how: Any) -> Iterator[int]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(data(rank, **how)).square().mean().backward()
        optimizer.step()
        yield step


def weights(model: nn.Module) -> str:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters()).hex()


def said(error: qsync_fx.RankError) -> dict[str, Any]:
    return {"rank": error.rank, "what": error.what, "where": error.where, "do": error.do}


def agreement(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Introduce one difference after the other between ranks, and finally none."""
    odd = rank == 1
    found = {}

    def tries(name: str, model: nn.Module, replan: Any = None, **how: Any) -> None:
        try:
            with guard(model, replan=replan):
                list(train(model, rank, 1, **how))
        except qsync_fx.RankError as error:
            found[name] = said(error)

    tries("model", network(17 if odd else 16))
    torch.__version__ = torch.__version__ + "x" * odd  # type: ignore[assignment]
    tries("version", network())
    torch.__version__ = str(torch.__version__).removesuffix("x")  # type: ignore[assignment]
    parallel = DistributedDataParallel(network(), gradient_as_bucket_view=odd)
    tries("DDP", compiled(parallel))
    other = ClusterPlan({**PLAN.classes, "slow": Plan.uniform("int8")}, ranks=PLAN.ranks)
    tries("plan", DistributedDataParallel(compiled(network(), other if odd else PLAN)))
    replan = Replanning(FleetPlan(PLAN)) if odd else None
    tries("replanning", DistributedDataParallel(compiled(network())), replan)
    tries("batch", DistributedDataParallel(compiled(network())), samples=2 + rank)
    model = DistributedDataParallel(compiled(network()))
    with guard(model, check_every=1):
        list(train(model, rank, 2))
    found["trained"] = weights(model)
    found["classes"] = sorted(
        {str(ran.precision) for ran in qsync_fx.plan_coverage(model).operators}
    )
    with torch.no_grad():
        if odd:
            model.module.get_parameter("1.bias")[2] = -model.module.get_parameter("1.bias")[2]
    try:
        check_replicas(model)
    except qsync_fx.RankError as error:
        found["replicas"] = said(error)
    try:
        if not odd:
            with guard(model, silence=2):
                pass
        else:
            time.sleep(3)
    except qsync_fx.RankError as error:
        found["absent"] = said(error)
    return found


def averaging(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare batches of 2 and 6 samples with one process and 8, also under no_sync."""
    model, alone = network(), network()
    parallel = DistributedDataParallel(compiled(model, Plan.uniform("fp32")))
    average_by_batch(parallel)
    sizes = [[2, 6], [4, 4]]
    with guard(parallel):
        for size in sizes:
            whole = torch.cat([data(at, samples) for at, samples in enumerate(size)]).sign()
            parallel.zero_grad()
            alone.zero_grad()
            parallel(data(rank, size[rank]).sign()).sum(1).mean().backward()
            alone(whole).sum(1).mean().backward()
            gradients = [
                float((p.grad - q.grad).abs().max() / q.grad.abs().max())
                for p, q in zip(model.parameters(), alone.parameters(), strict=True)
                if p.grad is not None and q.grad is not None
            ]
    parallel.zero_grad()
    alone.zero_grad()
    with parallel.no_sync():
        parallel(data(rank, 1 + 2 * rank)).sum().backward()
    parallel(data(rank, 1 + 2 * rank)).sum().backward()
    return {
        "errors": gradients,
        "weights": weights(model),
        "compiled": len(qsync_fx.plan_coverage(parallel).operators),
    }


def fails(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Fail on one rank in a step or during compilation, while others are in a collective."""
    how, odd = job["how"], rank == world - 1
    plan = Plan("fp32", [("nowhere", "int8")]) if how == "plan" and odd else Plan.uniform("fp32")
    if how == "limit" and odd:
        torch._dynamo.config.recompile_limit = 1
        torch._dynamo.config.automatic_dynamic_shapes = False
    model = DistributedDataParallel(compiled(network(), plan))
    try:
        with guard(model, same_batch=False):
            for step in train(model, rank, 2):
                if step == 0:
                    pass
            digest = hashlib.sha256(weights(model).encode()).hexdigest()
            print(
                f"trained {digest} by {len(qsync_fx.plan_coverage(model).operators)} operators",
                flush=True,
            )
            if odd and how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if odd and how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if odd and how == "memory":
                raise torch.OutOfMemoryError("out of memory: tried to allocate 99 GiB")
            list(train(model, rank, 2, samples=5 if how == "limit" and odd else 4))
    except qsync_fx.RankError as error:
        return said(error)
    return {}


def patience(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Run a pass that exceeds the group's timeout, and stop a rank for less than it."""

    @qsync_fx.graph_pass(after="lower")
    def slow(graph: qsync_fx.PrecisionGraph) -> None:
        time.sleep(job["slow"] if rank == 1 else 0)

    plan = ClusterPlan(PLAN.classes, ranks=["fast", *["slow"] * (world - 1)])
    model = DistributedDataParallel(compiled(network(), plan, passes=[slow]))
    with guard(model, check_every=2):
        for step in train(model, rank, 4):
            if step == 1 and rank == 1:
                with subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"]):
                    os.kill(os.getpid(), signal.SIGSTOP)
    return {"weights": weights(model), "compiled": len(qsync_fx.plan_coverage(model).operators)}


def finding(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Run with a rank that cannot be measured, an infeasible limit, and a feasible plan."""
    found: dict[str, Any] = {}
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name = ["fast", "slow"][rank]

    def step(module: nn.Module, x: Tensor) -> Tensor:
        if found.get("broken") is None and rank == 1:
            raise ValueError("this batch is broken")
        return module(x).square().mean()

    def find(**how: Any) -> ClusterPlan:
        return qsync_fx.distributed.measure_and_plan(
            model,
            step,
            [data(rank, 64)],
            optimizer=optimizer,
            device_class=name,
            progress=False,
            repeats=2,
            max_replans=1,
            **how,
        )

    for case, how in (("broken", {}), ("memory", {"memory": {"slow": "1 KB"}})):
        try:
            find(precisions=["fp32"], **how)
        except qsync_fx.QSyncError as error:
            found[case] = [type(error).__name__, str(error)]
        except ValueError as error:
            found[case] = [type(error).__name__, str(error)]
    plan = find(precisions=["fp32"] if rank == 0 else ["fp32", "bf16", "int8"], objective="hybrid")
    plan.save(f"{job['where']}/plan-{rank}.json")
    fast = DistributedDataParallel(compiled(network(), f"{job['where']}/plan-{rank}.json"))
    with guard(fast, check_every=1):
        list(train(fast, rank, 2))
    return {**found, "plan": plan.to_json(), "printed": str(plan), "weights": weights(fast)}


class Branching(nn.Module):
    """Model with a layer that only some inputs use, and one that the user calls separately."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.side, self.beside = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, side: bool) -> Tensor:
        return self.side(self.body(x)) if side else self.body(x)


def branches(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Use a layer on one rank only, and another on both ranks outside of compiled code."""
    found: dict[str, Any] = {}
    for name in ("others", "beside"):
        model = Branching()
        parallel = DistributedDataParallel(
            compiled(model, Plan.uniform("bf16")), find_unused_parameters=name == "others"
        )
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        told = []
        for step in range(4):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.zero_grad()
                out = parallel(data(rank), name == "beside" or rank == 0 or step > 2)
                (out if name == "others" else model.beside(out)).square().mean().backward()
                optimizer.step()
            told.append(
                [str(w.message) for w in caught if issubclass(w.category, qsync_fx.PlanWarning)]
            )
        found[name] = {
            "told": told,
            "weights": weights(model),
            "left": [m.path for m in qsync_fx.plan_coverage(parallel).uncovered],
        }
    return found


def capped(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Run a class with a plan for less memory than a step needs."""
    plan = ClusterPlan(
        {
            "fast": Plan.uniform("fp32"),
            "slow": Plan("bf16", notes={"memory": "1000", "peak": "900"}),
        },
        ranks=["fast", "slow"],
    )
    model = DistributedDataParallel(compiled(network(), plan))
    with guard(model, check_every=1):
        list(train(model, rank, 8))
    return {"weights": weights(model)}


def killed(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Kill a rank while it measures itself."""

    def step(module: nn.Module, x: Tensor) -> Tensor:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return module(x).square().mean()

    try:
        qsync_fx.distributed.measure_and_plan(
            network(), step, [data(rank, 64)], device_class=str(rank), progress=False
        )
    except qsync_fx.RankError as error:
        return said(error)
    return {}


def refused(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Call find_plan with invalid arguments on one rank or on all."""
    steps: list[int] = []

    def step(module: nn.Module, x: Tensor) -> Tensor:
        steps.append(1)
        return module(x).square().mean()

    arguments = job["arguments"] if rank in job["ranks"] else {}
    try:
        qsync_fx.distributed.measure_and_plan(
            network(), step, [data(rank, 64)], progress=False, **arguments
        )
    except qsync_fx.QSyncError as error:
        return {"error": type(error).__name__, "what": error.what, "steps": len(steps)}
    return {}


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:])
