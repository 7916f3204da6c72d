"""Rank process of the tests of codecs from a plan, started by tests/communication."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx import ClusterPlan, Plan
from qsync_fx.communication.ddp_hook import by_plan
from qsync_fx.distributed import check_replicas, compress
from tests.support.communication.compressed_training import refusal
from tests.support.communication.scaled_rank import Linear, given
from tests.support.processes import ranks

CLASSES = {"cpu": Plan.uniform("fp32")}
WIDE = {"0.weight": "qsgd8", "2.weight": "qsgd4", "4.weight": "fp32"}


def parallel() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 50), nn.ReLU(), nn.Linear(50, 4)]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01)


def trained(codec_or_plan: Any, **compress_options: Any) -> dict[str, Any]:
    model = parallel()
    handle = (
        compress(model, codec_or_plan, check_every=1, **compress_options)
        if codec_or_plan is not None
        else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + distributed.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
    check_replicas(model)
    values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    result: dict[str, Any] = {"weights": hashlib.sha256(values).hexdigest()}
    if handle is not None:
        report = handle.report()
        result |= {
            "wire": report.tally.wire,
            "buckets": report.tally.buckets,
            "coded": report.coded,
            "told": str(report),
        }
        handle.load_state_dict(handle.state_dict())
    return result


def plans(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train with plans with and without codecs, from objects and files, and with one codec."""
    path = Path(job["where"]) / f"plan-{rank}.json"
    ClusterPlan(CLASSES, codecs=WIDE).save(path)
    all_alike = dict.fromkeys(
        ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"), "qsgd8"
    )
    return {
        "none": trained(None),
        "mixed": trained(ClusterPlan(CLASSES, codecs=WIDE)),
        "file": trained(path),
        "text": trained(str(path)),
        "without codecs": trained(ClusterPlan(CLASSES)),
        "of a device": trained(Plan.uniform("fp32")),
        "all alike": trained(ClusterPlan(CLASSES, codecs=all_alike)),
        "by name": trained("qsgd8", least=0),
    }


def differing(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the errors of plans that differ between ranks or are invalid on all ranks."""
    errors = {}
    for name, codecs in (
        ("tensor", WIDE if rank != 1 else {**WIDE, "0.bias": "qsgd8"}),
        ("codec", WIDE if rank != 1 else dict.fromkeys(WIDE, "1bit*")),
        ("none", WIDE if rank != 1 else {}),
        ("strange", {"0.wieght": "qsgd8"}),
    ):
        try:
            compress(parallel(), ClusterPlan(CLASSES, codecs=codecs))
        except (qsync_fx.RankError, qsync_fx.PlanError) as error:
            errors[name] = {"text": str(error), "rank": getattr(error, "rank", None)}
    try:
        compress(parallel(), ClusterPlan(CLASSES, codecs=WIDE), least=5)
    except qsync_fx.OptionError as error:
        errors["least"] = {"text": str(error), "rank": None}
    return errors


def unread(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the error of all ranks for arguments that only rank 1 rejects, and its duration."""
    path = Path(job["where"]) / f"here-{rank}.json"
    ClusterPlan(CLASSES, codecs=WIDE).save(path)
    odd = rank == 1
    errors: dict[str, Any] = {}
    for name, codec, args in (
        ("missing", str(path.with_name("nowhere.json")) if odd else str(path), {}),
        (
            "of another model",
            ClusterPlan(CLASSES, codecs={"0.wieght": "qsgd8"} if odd else WIDE),
            {},
        ),
        ("argument", "qsgd8", {"check_every": -1 if odd else 1}),
        ("optimizer", "duo4", {} if odd else {"optimizer": True}),
    ):
        model = parallel()
        if "optimizer" in args:
            args = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        begun = time.monotonic()
        refusal(
            errors, name, lambda model=model, codec=codec, args=args: compress(model, codec, **args)
        )  # type: ignore[misc]
        errors[name]["seconds"] = time.monotonic() - begun
    errors["after"] = trained("qsgd8")["weights"]
    return errors


def changed(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Change codecs during training, and compare parameters with exact sums of mean gradients."""
    model = DistributedDataParallel(Linear(), bucket_cap_mb=0.004)
    handle = compress(model, ClusterPlan(CLASSES), check_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    exact = [torch.zeros(p.shape) for p in model.parameters()]
    apart, left, buckets = [], [], []
    both = ("first", "second")
    stages: tuple[dict[str, str], ...] = (
        {},
        dict.fromkeys(both, "1bit*"),
        dict.fromkeys(both, "1bit"),
        {},
    )
    for stage, codecs in enumerate((*stages, {"first": "1bit*"}, {"second": "1bit*"}, {})):
        if stage:
            handle.change(by_plan(codecs, handle.names))
        for step in range(3 * stage, 3 * stage + 3):
            optimizer.zero_grad()
            model(given(rank, step)).backward()
            optimizer.step()
            means = [
                torch.stack(values).mean(0)
                for values in zip(*(given(r, step) for r in range(world)), strict=True)
            ]
            exact = [total - mean for total, mean in zip(exact, means, strict=True)]
        check_replicas(model)
        apart.append(
            max(
                float((p.detach() - e).abs().max())
                for p, e in zip(model.parameters(), exact, strict=True)
            )
        )
        left.append(sorted({**handle.state_dict()["sent"], **handle.state_dict()["owned"]}))
        buckets.append(handle.report().tally.buckets)
    again = compress(
        DistributedDataParallel(Linear()), ClusterPlan(CLASSES, codecs={"first": "1bit*"})
    )
    again.change(by_plan({}, again.names))
    again.load_state_dict(handle.state_dict())
    return {"apart": apart, "left": left, "buckets": buckets, "told": str(handle.report())}


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:])
