"""Rank process of the guard tests, started by tests/distributed."""

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


def train(model: nn.Module, rank: int, steps: int, **data_options: Any) -> Iterator[int]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(data(rank, **data_options)).square().mean().backward()
        optimizer.step()
        yield step


def weights(model: nn.Module) -> str:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters()).hex()


def said(error: qsync_fx.RankError) -> dict[str, Any]:
    return {"rank": error.rank, "what": error.what, "where": error.where, "do": error.do}


def agreement(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the errors of successive differences between ranks, and train without a difference."""
    odd = rank == 1
    results = {}

    def tries(name: str, model: nn.Module, replan: Any = None, **data_options: Any) -> None:
        try:
            with guard(model, replan=replan):
                list(train(model, rank, 1, **data_options))
        except qsync_fx.RankError as error:
            results[name] = said(error)

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
    results["trained"] = weights(model)
    results["classes"] = sorted(
        {str(ran.precision) for ran in qsync_fx.plan_coverage(model).operators}
    )
    with torch.no_grad():
        if odd:
            model.module.get_parameter("1.bias")[2] = -model.module.get_parameter("1.bias")[2]
    try:
        check_replicas(model)
    except qsync_fx.RankError as error:
        results["replicas"] = said(error)
    try:
        if not odd:
            with guard(model, silence=2):
                pass
        else:
            time.sleep(3)
    except qsync_fx.RankError as error:
        results["absent"] = said(error)
    return results


def averaging(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare gradients of two ranks with one process of 8 samples; then accumulate two steps."""
    model, alone = network(), network()
    parallel = DistributedDataParallel(compiled(model, Plan.uniform("fp32")))
    average_by_batch(parallel)
    sizes = [[2, 6], [4, 4]]
    errors = []
    with guard(parallel):
        for size in sizes:
            combined = torch.cat(
                [data(index, samples) for index, samples in enumerate(size)]
            ).sign()
            parallel.zero_grad()
            alone.zero_grad()
            parallel(data(rank, size[rank]).sign()).sum(1).mean().backward()
            alone(combined).sum(1).mean().backward()
            errors += [
                float((p.grad - q.grad).abs().max() / q.grad.abs().max())
                for p, q in zip(model.parameters(), alone.parameters(), strict=True)
                if p.grad is not None and q.grad is not None
            ]
    parallel.zero_grad()
    with parallel.no_sync():
        parallel(data(rank, 1 + 2 * rank)).sum().backward()
    parallel(data(rank, 1 + 2 * rank)).sum().backward()
    return {
        "errors": errors,
        "accumulated": [
            p.grad.double().sum().item() for p in model.parameters() if p.grad is not None
        ],
        "compiled": len(qsync_fx.plan_coverage(parallel).operators),
    }


def fails(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Fail on the last rank in a step or in compilation, while others are in a collective."""
    fault, odd = job["how"], rank == world - 1
    plan = Plan("fp32", [("nowhere", "int8")]) if fault == "plan" and odd else Plan.uniform("fp32")
    if fault == "limit" and odd:
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
            if odd and fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if odd and fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if odd and fault == "memory":
                raise torch.OutOfMemoryError("out of memory: tried to allocate 99 GiB")
            list(train(model, rank, 2, samples=5 if fault == "limit" and odd else 4))
    except qsync_fx.RankError as error:
        return said(error)
    return {}


def patience(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compile longer than the group's timeout on rank 1, and stop it for a shorter time."""

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
    """Return the errors of a failing measurement and an infeasible limit, and a feasible plan."""
    results: dict[str, Any] = {}
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name = ["fast", "slow"][rank]

    def step(module: nn.Module, x: Tensor) -> Tensor:
        if results.get("broken") is None and rank == 1:
            raise ValueError("this batch is broken")
        return module(x).square().mean()

    def find(**options: Any) -> ClusterPlan:
        return qsync_fx.distributed.measure_and_plan(
            model,
            step,
            [data(rank, 64)],
            optimizer=optimizer,
            device_class=name,
            progress=False,
            repeats=2,
            max_replans=1,
            **options,
        )

    for case, limits in (("broken", {}), ("memory", {"memory": {"slow": "1 KB"}})):
        try:
            find(precisions=["fp32"], **limits)
        except qsync_fx.QSyncError as error:
            results[case] = [type(error).__name__, str(error)]
        except ValueError as error:
            results[case] = [type(error).__name__, str(error)]
    plan = find(precisions=["fp32"] if rank == 0 else ["fp32", "bf16", "int8"], objective="hybrid")
    plan.save(f"{job['where']}/plan-{rank}.json")
    fast = DistributedDataParallel(compiled(network(), f"{job['where']}/plan-{rank}.json"))
    with guard(fast, check_every=1):
        list(train(fast, rank, 2))
    return {**results, "plan": plan.to_json(), "printed": str(plan), "weights": weights(fast)}


class Branching(nn.Module):
    """Model with a layer that only some inputs use, and one outside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.side, self.beside = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, side: bool) -> Tensor:
        return self.side(self.body(x)) if side else self.body(x)


def branches(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Use a layer on one rank only, or a layer outside of compiled code on both."""
    results: dict[str, Any] = {}
    for name in ("others", "beside"):
        model = Branching()
        parallel = DistributedDataParallel(
            compiled(model, Plan.uniform("bf16")), find_unused_parameters=name == "others"
        )
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        messages = []
        for step in range(4):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.zero_grad()
                out = parallel(data(rank), name == "beside" or rank == 0 or step > 2)
                (out if name == "others" else model.beside(out)).square().mean().backward()
                optimizer.step()
            messages.append(
                [str(w.message) for w in caught if issubclass(w.category, qsync_fx.PlanWarning)]
            )
        results[name] = {
            "told": messages,
            "weights": weights(model),
            "left": [m.path for m in qsync_fx.plan_coverage(parallel).uncovered],
        }
    return results


def capped(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train with a plan whose predicted peak and memory limit are below the real peak."""
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
    """Kill rank 1 during its measurement."""

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
    """Call measure_and_plan with invalid arguments on some ranks or on all."""
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
