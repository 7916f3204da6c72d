"""Rank of the tests of compressed gradients with FSDP2, run by tests/communication."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import qsync_fx
from qsync_fx.communication import point_to_point
from qsync_fx.communication.duo.sign_codecs import SignBit
from qsync_fx.distributed import compress
from qsync_fx.plan import ClusterPlan, Plan
from tests.support.communication.compressed_training import refusal, said
from tests.support.communication.sharded_training import (
    Network,
    adam,
    apart,
    batch,
    gradients,
    model,
    shards,
    train,
    weights,
    whole,
)
from tests.support.processes import ranks


def codecs(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare gradients of one step, and a training, with no codec."""
    alone = model()
    plain = gradients(alone, rank)
    exact = whole(rank, world, alone)
    found: dict[str, Any] = {
        "plain": apart(plain, exact),
        "debug": distributed.get_debug_level().name,
    }
    for name in job["codecs"]:
        one = model()
        handle = compress(one, name, check_every=2)
        given = gradients(one, rank)
        trained = model()
        handle = compress(trained, name, check_every=2)
        train(trained, adam(trained), range(4))
        report = handle.report()
        found[name] = {
            "equal": all(torch.equal(g, e) for g, e in zip(given, exact, strict=True)),
            "apart": apart(given, exact),
            "steps": report.tally.steps,
            "buckets": report.tally.buckets,
            "wire": [report.tally.wire, report.tally.raw, report.tally.theory],
            "variance": report.variance,
            "sizes": [report.coded, report.plain],
            "printed": str(report),
            "finite": all(bool(p.isfinite().all()) for p in shards(trained)),
        }
    return found


def unbiased(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Average many steps with equal gradients: the mean is closer to them than any single step."""
    one = model()
    compress(one, "qsgd4", least=0)
    exact = whole(rank, world, one)
    draws = [gradients(one, rank) for _ in range(job["draws"])]
    mean = [torch.stack(found).mean(0) for found in zip(*draws, strict=True)]
    return {
        "one": max(apart(found, exact) for found in draws),
        "mean": apart(mean, exact),
        "differ": not all(torch.equal(a, b) for a, b in zip(draws[0], draws[1], strict=True)),
    }


def resumed(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare six steps with three and three steps that are separated by a checkpoint."""
    found = {}
    for codec in ("qsgd8", "1bit*"):
        trained = model()
        compress(trained, codec)
        train(trained, adam(trained), range(6))
        first = model()
        handle, optimizer = compress(first, codec), adam(first)
        train(first, optimizer, range(3))
        # Three steps from equal weights and optimizer state, with and without the state of the
        # handle.
        saved = [[p.clone() for p in shards(first)], optimizer.state_dict(), handle.state_dict()]
        path = Path(job["where"]) / f"{codec.replace('*', 's')}-{rank}.pt"
        torch.save(saved[2], path)
        ends = []
        for state in (torch.load(path, weights_only=True), None):
            again = model()
            handle, optimizer = (
                compress(again, codec, seed=99 if state is not None else 0),
                adam(again),
            )
            with torch.no_grad():
                for p, value in zip(shards(again), saved[0], strict=True):
                    p.copy_(value)
            optimizer.load_state_dict(saved[1])
            if state is not None:
                handle.load_state_dict(state)
            train(again, optimizer, range(3, 6))
            ends.append(weights(again))
        found[codec] = [weights(trained), *ends]
    return found


def loaded(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Resume on more ranks than saved."""
    one = model()
    handle = compress(one, "1bit*")
    saved = torch.load(Path(job["where"]) / f"1bits-{rank % 2}.pt", weights_only=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle.load_state_dict(saved)
    train(one, adam(one), range(2))
    return {"warned": [str(warning.message) for warning in caught]}


def cases(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Use other features of FSDP2."""
    found: dict[str, Any] = {}
    one = model()
    compress(one, "fp32")
    for step in range(2):
        one.set_requires_gradient_sync(step == 1)
        one(batch(rank, 0)).square().mean().backward()
    twice = [p.grad.to_local() for p in one.parameters() if p.grad is not None]
    exact = whole(rank, world, one)
    found["accumulates"] = apart(twice, [2 * g for g in exact])

    one = model()
    compress(one, "qsgd8")
    train(one, adam(one), range(4), aside=lambda step: step % 2 == 0)
    found["unused"] = all(bool(p.isfinite().all()) for p in shards(one))
    one = model()
    compress(one, "1bit*")
    try:
        train(one, adam(one), range(4), aside=lambda step: step % 2 == 0)
    except qsync_fx.QSyncError as error:
        found["unused with a residual"] = said(error)

    one = model(
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    )
    compress(one, "qsgd8")
    train(one, adam(one), range(2))
    found["bf16"] = all(bool(p.isfinite().all()) for p in shards(one))

    one = model()
    compress(one, "qsgd8")
    (one(batch(rank, 0)).square().mean() * (float("inf") if rank == world - 1 else 1)).backward()
    bad = torch.tensor(
        float(
            any(
                not bool(p.grad.to_local().isfinite().all())
                for p in one.parameters()
                if p.grad is not None
            )
        )
    )
    found["infinity"] = float(bad)

    one = torch.compile(model(), backend="aot_eager")
    compress(one, "qsgd8")
    train(one, adam(one), range(2))
    found["compiled"] = all(bool(p.isfinite().all()) for p in shards(one))
    return found


def refused(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    says = partial(refusal, found)

    one = model()
    says("columns", lambda: compress(one, "1bit"))
    says("duo", lambda: compress(one, "duo4", optimizer=adam(one)))
    says("differ", lambda: compress(model(), "qsgd8" if rank else "qsgd4"))
    says("differ in code", lambda: compress(model(), SignBit(64 * (1 + rank))))
    part = Network()
    fully_shard(part.blocks[0], mesh=init_device_mesh("cpu", (world,)))
    says("part", lambda: compress(part, "qsgd8"))
    if world % 2 == 0:
        torch.manual_seed(0)
        hybrid = Network()
        fully_shard(
            hybrid,
            mesh=init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard")),
        )
        says("hybrid", lambda: compress(hybrid, "qsgd8"))
    compress(one, "qsgd8")
    says("twice", lambda: compress(one, "qsgd8"))
    one = model()
    one.set_force_sum_reduction_for_comms(False)
    one.set_gradient_divide_factor(7.0)
    compress(one, "qsgd8")
    says("factor", lambda: gradients(one, rank))
    found["of one rank"] = {}
    alone = partial(refusal, found["of one rank"])
    odd, path = rank == 1, Path(job["where"]) / f"here-{rank}.json"
    ClusterPlan({"all": Plan.uniform("fp32")}, codecs={"last.weight": "qsgd8"}).save(path)
    alone("plan", lambda: compress(model(), str(path) if odd else "qsgd8"))
    alone("missing", lambda: compress(model(), "nowhere.json" if odd else "qsgd8"))
    alone("columns", lambda: compress(model(), "1bit" if odd else "1bit*"))
    one = model()  # all ranks create its mesh together
    alone("part", lambda: compress(part if odd else one, "qsgd8"))
    return found


def faults(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Corrupt a message to rank 0, or kill a rank."""
    one = model()
    compress(one, "qsgd8")
    optimizer, how = adam(one), job["how"]
    train(one, optimizer, range(2))

    class Harmed(point_to_point.PendingTransfers):
        def expect(self, sender: int, message: torch.Tensor, number: int = 0) -> None:
            if how == "kill" and rank == 1 and "blocks.1" in self._about:
                os.kill(os.getpid(), signal.SIGKILL)
            super().expect(sender, message, number)
            self.received = {**getattr(self, "received", {}), sender: message}

        def wait_received(self, sender: int, number: int = 0) -> None:
            super().wait_received(sender, number)
            if how == "harm" and (rank, sender) == (0, 1) and "blocks.1" in self._about:
                self.received[sender][16] ^= 5

    point_to_point.PendingTransfers = Harmed  # type: ignore[misc]
    try:
        train(one, optimizer, range(2, 4))
    except qsync_fx.RankError as error:
        return said(error)
    return {}


def alone(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    one, other = model(), model()
    handle = compress(one, "qsgd4")
    train(one, adam(one), range(3))
    train(other, adam(other), range(3))
    with contextlib.suppress(AttributeError):
        handle.flush()
    return {"equal": weights(one) == weights(other), "printed": str(handle.report())}


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:], meet=lambda name: name not in ("faults", "refused"))
