"""Rank process of the tests of unequal batches, started by tests/distributed."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import qsync_fx
from qsync_fx import ClusterPlan, OptionError, Plan, PlanError, RankError
from qsync_fx.distributed import DistributedBatchSampler, average_by_batch, compress, guard
from qsync_fx.distributed.fleet_plan import FleetPlan
from qsync_fx.predictor.replayer.cluster import Exchange
from qsync_fx.profiler.links import link_measurement
from qsync_fx.profiler.profile import Collective
from tests.support.processes import ranks

BATCHES = {"fast": 5, "slow": 2}
PLAN = ClusterPlan(
    {name: Plan.uniform("fp32") for name in BATCHES}, ranks=["fast", "slow"], batches=BATCHES
)
SAMPLES = 17  # two steps of 7 samples and one of 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 8, generator=draw), torch.arange(SAMPLES))


def loss_of(model: nn.Module, x: Tensor) -> Any:
    """Return the mean squared norm of the outputs, a nonlinear loss."""
    return model(x).square().sum(1).mean()


def values(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def sampled(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train two epochs with a plan's local batches; return sample indices and parameters."""
    model = DistributedDataParallel(network())
    average_by_batch(model)
    sampler = DistributedBatchSampler(range(SAMPLES), PLAN)
    loader = DataLoader(dataset(), batch_sampler=sampler, num_workers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, indices in loader:
            steps.append(indices.tolist())
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
    return {"steps": steps, "weights": values(model), "batches": sampler.batches}


def watched(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train under a guard with batches of rank 1 that differ from the plan; return the error."""
    sizes = [[5, 5, 3], [3, 3, 1]][rank]
    raised = None
    for strict in (False, True):
        options: Any = {"plan": PLAN, "inner_backend": "aot_eager", "strict": strict}
        model = DistributedDataParallel(torch.compile(network(), backend="qsync", options=options))
        average_by_batch(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            with guard(model):
                for size in sizes:
                    optimizer.zero_grad()
                    loss_of(model, dataset()[:size][0]).backward()
                    optimizer.step()
        except (PlanError, RankError) as error:
            raised = [type(error).__name__, error.what]
    return {"raised": raised}


def unplanned(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the error for a plan without a local batch for rank 1."""
    plan = ClusterPlan(PLAN.classes, ranks=PLAN.ranks, batches={"fast": 5})
    try:
        DistributedBatchSampler(range(SAMPLES), plan)
    except (OptionError, RankError) as error:
        return {"type": type(error).__name__, "what": error.what}
    return {}


def measured_plan(model: nn.Module, rank: int, **request: Any) -> FleetPlan:
    """Measure two batch sizes, and plan formats and batches of a fast and a slow rank."""
    return qsync_fx.distributed.measure_and_plan(
        model,
        loss_of,
        [dataset()[: (8, 4)[rank]][0]],
        device_class=["fast", "slow"][rank],
        precisions=[["fp32"], ["fp32", "bf16"]][rank],
        batch=(16, 16),
        min_batch=2,
        batch_sizes=[4, 8],
        repeats=2,
        max_replans=1,
        progress=False,
        **request,
    )


def planned(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train an epoch with measured and planned batches and formats."""
    model: Any = network()
    plan = measured_plan(model, rank)
    options: Any = {"plan": plan, "inner_backend": "aot_eager"}
    model = DistributedDataParallel(torch.compile(model, backend="qsync", options=options))
    average_by_batch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = []
    for batch, indices in DataLoader(
        dataset(), batch_sampler=DistributedBatchSampler(range(SAMPLES), plan)
    ):
        samples.append(indices.tolist())
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    result = {"batches": dict(plan.batches), "samples": samples, "weights": values(model)}
    if plan.answer is not None and plan.survey is not None:
        result["trials"] = [len(trials) for trials in plan.answer.trials]
        sizes = {name: profile.batch_size for name, profile in plan.survey.profiles.items()}
        result["profiles"], result["again"] = sizes, dict(plan.survey.answer().batches)
        result["answer"] = dict(plan.answer.batches)
    return result


def coded_plan(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Plan batches, formats and codecs on slow links, and train an epoch with them.

    Return the relative error of each mean gradient, for the plan and for its codecs with fixed
    unequal batches.
    """
    table = [(16, 1e-3), (2**10, 0.5)]
    slow_links = {
        "collectives": [Collective("gloo", 2, table)],
        "exchanges": [Exchange("point_to_point", "all", 2, [*table])],
    }
    with contextlib.ExitStack() as patches:
        for name, value in slow_links.items():
            patches.enter_context(mock.patch.object(link_measurement, name, return_value=value))
        plan = measured_plan(network(), rank, codecs=("qsgd8",), objective="fastest", budget=1e9)
    unequal = ClusterPlan(plan.classes, ranks=plan.ranks, codecs=plan.codecs, batches=BATCHES)
    result: dict[str, Any] = {"batches": dict(plan.batches), "codecs": dict(plan.codecs)}
    result["note"] = plan.notes.get("codecs")
    for name, active in (("planned", plan), ("unequal", unequal)):
        options: Any = {"plan": active, "inner_backend": "aot_eager"}
        model = DistributedDataParallel(torch.compile(network(), backend="qsync", options=options))
        average_by_batch(model)
        handle = compress(model, active, check_every=1)
        result[name] = followed(model, DistributedBatchSampler(range(SAMPLES), active))
        result[name] |= {"weights": values(model), "checks": handle.report().tally.checks}
    return result


def followed(model: nn.Module, sampler: DistributedBatchSampler) -> dict[str, Any]:
    """Train an epoch; return relative errors of its gradients and of the mean over ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    everyones = [
        DistributedBatchSampler(range(SAMPLES), sampler.batches, rank=rank) for rank in range(2)
    ]
    result: dict[str, list[float]] = {"errors": [], "of ranks": []}
    data = dataset()[:][0]
    for indices, *parts in zip(sampler, *everyones, strict=True):
        local = network()
        for copied, p in zip(local.parameters(), model.parameters(), strict=True):
            copied.data.copy_(p.data)
        means = []
        for part in (*parts, [*itertools.chain(*parts)]):
            local.zero_grad()
            loss_of(local, data[part]).backward()
            means.append(torch.tensor(gradients(local)))
        *of_ranks, exact = means
        optimizer.zero_grad()
        loss_of(model, data[indices]).backward()
        for name, mean in (
            ("errors", torch.tensor(gradients(model))),
            ("of ranks", torch.stack(of_ranks).mean(0)),
        ):
            result[name].append(float((mean - exact).norm() / exact.norm()))
        optimizer.step()
    return result


SIZES = ((2, 6), (5, 1))  # samples of each pass by rank


def passes(rank: int) -> list[Tensor]:
    """Return the inputs of a rank's passes; all ranks together use the first 14 samples."""
    first = sum(sum(sizes) for sizes in SIZES[:rank])
    return list(dataset()[first : first + sum(SIZES[rank])][0].split(SIZES[rank]))


class Outputs(nn.Module):
    """Model that returns a dictionary of logits, their loss and the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> dict[str, Any]:
        logits = self.inner(x)
        return {"logits": logits, "loss": [logits.square().sum(1).mean()], "samples": len(x)}


def ddp(rank: int, **settings: Any) -> DistributedDataParallel:
    return DistributedDataParallel(network(), **settings)


def accumulated(model: Any, rank: int, loss: Any = loss_of) -> None:
    """Accumulate the gradients of two passes of different sizes, and reduce them once."""
    first, last = passes(rank)
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        (loss(model, first) / 2).backward()
        model.set_requires_gradient_sync(True)
    else:
        with model.no_sync():
            (loss(model, first) / 2).backward()
    (loss(model, last) / 2).backward()


def gradients(model: nn.Module) -> list[float]:
    parts = [p.grad for p in model.parameters() if p.grad is not None]
    full = [part.full_tensor() if isinstance(part, DTensor) else part for part in parts]
    return torch.cat([part.flatten() for part in full]).tolist()


def plain(rank: int) -> nn.Module:
    average_by_batch(model := ddp(rank, gradient_as_bucket_view=True, bucket_cap_mb=1e-4))
    for _ in range(2):  # the second step begins with new counts
        model.zero_grad()
        accumulated(model, rank)
    return model


def once(rank: int) -> nn.Module:
    average_by_batch(model := ddp(rank))
    loss_of(model, torch.cat(passes(rank))).backward()
    return model


def dictionaries(rank: int) -> nn.Module:
    average_by_batch(model := DistributedDataParallel(Outputs()))
    accumulated(model, rank, lambda called, x: called(x)["loss"][0])
    return model


def compiled(rank: int) -> nn.Module:
    average_by_batch(model := ddp(rank))
    options: Any = {"precision": "fp32", "inner_backend": "aot_eager"}
    called: Any = torch.compile(model, backend="qsync", options=options)
    first, last = passes(rank)
    with model.no_sync():
        (loss_of(called, first) / 2).backward()
    (loss_of(called, last) / 2).backward()
    return model


def hooked(rank: int) -> nn.Module:
    average_by_batch(model := ddp(rank), default_hooks.fp16_compress_hook, model.process_group)
    accumulated(model, rank)
    return model


def coded(rank: int, weighted_first: bool = False) -> nn.Module:
    model = ddp(rank)
    if weighted_first:
        average_by_batch(model)
    compress(model, "qsgd8", least=0)
    if not weighted_first:
        average_by_batch(model)
    accumulated(model, rank)
    return model


def duo(rank: int) -> nn.Module:
    """Train a step with DUO, and store the change of the parameters as their gradients."""
    model = ddp(rank)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = compress(model, "duo1", optimizer=optimizer)
    average_by_batch(model)
    accumulated(model, rank)
    optimizer.step()
    handle.flush()
    for p, start in zip(model.parameters(), before, strict=True):
        p.grad = start - p.detach()
    return model


def sharded(rank: int, codec: str | None = None) -> nn.Module:
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    if codec is not None:
        compress(model, codec, least=0)
    average_by_batch(model)
    accumulated(model, rank)
    return model


WAYS: dict[str, Callable[[int], nn.Module]] = {
    "plain": plain,
    "once": once,
    "dictionaries": dictionaries,
    "compiled": compiled,
    "hook": hooked,
    "codec": coded,
    "codec of a weighted model": lambda rank: coded(rank, weighted_first=True),
    "duo": duo,
    "fsdp": sharded,
    "fsdp with a codec": lambda rank: sharded(rank, "qsgd8"),
}


def weighted(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the gradients by averaging method."""
    return {name: gradients(WAYS[name](rank)) for name in job["ways"]}


def refused(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the errors of uses in which gradients would be weighted wrongly."""
    messages: dict[str, Any] = {}
    model = ddp(rank)
    model.register_comm_hook(model.process_group, default_hooks.allreduce_hook)
    evaluated, weighted_model = ddp(rank).eval(), ddp(rank)
    average_by_batch(evaluated)
    average_by_batch(weighted_model)
    plain_data = passes(rank)[0]

    def units() -> None:
        (layer,) = outer = nn.Sequential(nn.Linear(8, 8))
        fully_shard(layer, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s")))
        average_by_batch(outer)

    def other_outputs() -> None:
        module = DistributedDataParallel(Opaque())
        average_by_batch(module)
        accumulated(module, rank, lambda called, x: called(x).value.square().mean())

    attempts: dict[str, Callable[[], Any]] = {
        "second hook": lambda: average_by_batch(model),
        "twice": lambda: average_by_batch(weighted_model),
        "evaluation": lambda: evaluated(plain_data).sum().backward(),
        "no samples": lambda: weighted_model(input=torch.tensor(1.0)),
        "several meshes": units,
        "outputs": other_outputs,
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except OptionError as error:
            messages[name] = error.what
    return messages


class Opaque(nn.Module):
    """Model whose output is no pytree, so that torch does not find its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(value=self.inner(x))


if __name__ == "__main__":
    # After "watched", rank 0 is blocked in a collective until rank 1 exits.
    ranks.play(globals(), sys.argv[1:], lambda name: name != "watched")
