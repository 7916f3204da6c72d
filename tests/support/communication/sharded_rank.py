"""Rank process of the tests of compression with FSDP2, started by tests/communication."""

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
    """Compare the gradients of each codec with exact means, and train with it."""
    alone = model()
    plain = gradients(alone, rank)
    exact = whole(rank, world, alone)
    results: dict[str, Any] = {
        "plain": apart(plain, exact),
        "debug": distributed.get_debug_level().name,
    }
    for name in job["codecs"]:
        compressed = model()
        handle = compress(compressed, name, check_every=2)
        actual = gradients(compressed, rank)
        trained = model()
        handle = compress(trained, name, check_every=2)
        train(trained, adam(trained), range(4))
        report = handle.report()
        results[name] = {
            "equal": all(torch.equal(g, e) for g, e in zip(actual, exact, strict=True)),
            "apart": apart(actual, exact),
            "steps": report.tally.steps,
            "buckets": report.tally.buckets,
            "wire": [report.tally.wire, report.tally.raw, report.tally.theory],
            "variance": report.variance,
            "sizes": [report.coded, report.plain],
            "printed": str(report),
            "finite": all(bool(p.isfinite().all()) for p in shards(trained)),
        }
    return results


def unbiased(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the errors of repeated quantized gradients and of their mean."""
    compressed = model()
    compress(compressed, "qsgd4", least=0)
    exact = whole(rank, world, compressed)
    draws = [gradients(compressed, rank) for _ in range(job["draws"])]
    mean = [torch.stack(draw).mean(0) for draw in zip(*draws, strict=True)]
    return {
        "one": max(apart(draw, exact) for draw in draws),
        "mean": apart(mean, exact),
        "differ": not all(torch.equal(a, b) for a, b in zip(draws[0], draws[1], strict=True)),
    }


def resumed(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare six steps with three steps, a checkpoint and three more steps."""
    results = {}
    for codec in ("qsgd8", "1bit*"):
        trained = model()
        compress(trained, codec)
        train(trained, adam(trained), range(6))
        first = model()
        handle, optimizer = compress(first, codec), adam(first)
        train(first, optimizer, range(3))
        # Resume with and without the state of the handle.
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
        results[codec] = [weights(trained), *ends]
    return results


def loaded(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Load the state of fewer ranks, and return the warnings."""
    resumed = model()
    handle = compress(resumed, "1bit*")
    saved = torch.load(Path(job["where"]) / f"1bits-{rank % 2}.pt", weights_only=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle.load_state_dict(saved)
    train(resumed, adam(resumed), range(2))
    return {"warned": [str(warning.message) for warning in caught]}


def cases(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train with other features of FSDP2."""
    results: dict[str, Any] = {}
    net = model()
    compress(net, "fp32")
    for step in range(2):
        net.set_requires_gradient_sync(step == 1)
        net(batch(rank, 0)).square().mean().backward()
    twice = [p.grad.to_local() for p in net.parameters() if p.grad is not None]
    exact = whole(rank, world, net)
    results["accumulates"] = apart(twice, [2 * g for g in exact])

    net = model()
    compress(net, "qsgd8")
    train(net, adam(net), range(4), aside=lambda step: step % 2 == 0)
    results["unused"] = all(bool(p.isfinite().all()) for p in shards(net))
    net = model()
    compress(net, "1bit*")
    try:
        train(net, adam(net), range(4), aside=lambda step: step % 2 == 0)
    except qsync_fx.QSyncError as error:
        results["unused with a residual"] = said(error)

    net = model(
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    )
    compress(net, "qsgd8")
    train(net, adam(net), range(2))
    results["bf16"] = all(bool(p.isfinite().all()) for p in shards(net))

    net = model()
    compress(net, "qsgd8")
    (net(batch(rank, 0)).square().mean() * (float("inf") if rank == world - 1 else 1)).backward()
    bad = torch.tensor(
        float(
            any(
                not bool(p.grad.to_local().isfinite().all())
                for p in net.parameters()
                if p.grad is not None
            )
        )
    )
    results["infinity"] = float(bad)

    net = torch.compile(model(), backend="aot_eager")
    compress(net, "qsgd8")
    train(net, adam(net), range(2))
    results["compiled"] = all(bool(p.isfinite().all()) for p in shards(net))
    return results


def refused(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    errors: dict[str, Any] = {}
    says = partial(refusal, errors)

    net = model()
    says("columns", lambda: compress(net, "1bit"))
    says("duo", lambda: compress(net, "duo4", optimizer=adam(net)))
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
    compress(net, "qsgd8")
    says("twice", lambda: compress(net, "qsgd8"))
    net = model()
    net.set_force_sum_reduction_for_comms(False)
    net.set_gradient_divide_factor(7.0)
    compress(net, "qsgd8")
    says("factor", lambda: gradients(net, rank))
    errors["of one rank"] = {}
    alone = partial(refusal, errors["of one rank"])
    odd, path = rank == 1, Path(job["where"]) / f"here-{rank}.json"
    ClusterPlan({"all": Plan.uniform("fp32")}, codecs={"last.weight": "qsgd8"}).save(path)
    alone("plan", lambda: compress(model(), str(path) if odd else "qsgd8"))
    alone("missing", lambda: compress(model(), "nowhere.json" if odd else "qsgd8"))
    alone("columns", lambda: compress(model(), "1bit" if odd else "1bit*"))
    net = model()  # all ranks create its mesh together
    alone("part", lambda: compress(part if odd else net, "qsgd8"))
    return errors


def faults(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Corrupt a message to rank 0, or kill a rank."""
    net = model()
    compress(net, "qsgd8")
    optimizer, fault = adam(net), job["how"]
    train(net, optimizer, range(2))

    class Harmed(point_to_point.PendingTransfers):
        def expect(self, sender: int, message: torch.Tensor, number: int = 0) -> None:
            if fault == "kill" and rank == 1 and "blocks.1" in self._about:
                os.kill(os.getpid(), signal.SIGKILL)
            super().expect(sender, message, number)
            self.received = {**getattr(self, "received", {}), sender: message}

        def wait_received(self, sender: int, number: int = 0) -> None:
            super().wait_received(sender, number)
            if fault == "harm" and (rank, sender) == (0, 1) and "blocks.1" in self._about:
                self.received[sender][16] ^= 5

    point_to_point.PendingTransfers = Harmed  # type: ignore[misc]
    try:
        train(net, optimizer, range(2, 4))
    except qsync_fx.RankError as error:
        return said(error)
    return {}


def alone(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    compressed, plain = model(), model()
    handle = compress(compressed, "qsgd4")
    train(compressed, adam(compressed), range(3))
    train(plain, adam(plain), range(3))
    with contextlib.suppress(AttributeError):
        handle.flush()
    return {"equal": weights(compressed) == weights(plain), "printed": str(handle.report())}


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:], meet=lambda name: name not in ("faults", "refused"))
