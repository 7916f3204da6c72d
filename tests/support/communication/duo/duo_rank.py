"""Rank process of the DUO tests, started by tests/communication."""

from __future__ import annotations

import copy
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.communication.duo.sign_codecs import DUOS, Duo, ZeroBit
from tests.support.communication.compressed_training import batch, weights
from tests.support.communication.duo.duo_steps import both, same, steps
from tests.support.communication.duo.duo_training import (
    OPTIMIZERS,
    TRAININGS,
    Alone,
    Training,
    end_of_least_squares,
    hashed,
)
from tests.support.processes import ranks


def identical(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare DUO with FP32 as the fast codec with DistributedDataParallel."""
    results = {}
    torch.backends.cudnn.deterministic = True
    for optimizer, case in job["cases"]:
        settings, loop = TRAININGS[case]
        settings = {**settings, "device": job.get("device", "cpu")}
        alone = Alone(optimizer, **settings).run(range(6), **loop)
        duo = replace(DUOS["duo32"], offload=job.get("offload"))
        ahead = Training(duo, optimizer, **settings).run(range(6), **loop)
        lr = ahead.optimizer.param_groups[0]["lr"]
        results[f"{optimizer} {case}".strip()] = {
            "alone": alone.flushed(),
            "ahead": ahead.flushed(),
            "scale": [alone.scaler.get_scale(), ahead.scaler.get_scale()],
            "lr": [float(alone.optimizer.param_groups[0]["lr"]), float(lr)],
            "skipped": ahead.handle.report().ahead.skipped,  # type: ignore[union-attr]
        }
    return results


def transitions(rank: int, world: int, job: dict[str, Any]) -> list[str]:
    """Return the states of DUO's state machine after backward passes, steps, skips and a flush."""
    training = Training("duo4", "sgd")
    handle: Any = training.handle
    states: list[str] = []

    def record() -> None:
        states.append(handle._steps.state.name)

    def backward(step: int) -> None:
        training.optimizer.zero_grad()
        training.loss(batch(rank, step)).backward()
        handle.wait()
        record()

    record()
    backward(0)
    training.optimizer.step()
    record()
    backward(1)
    training.optimizer.step()
    record()
    backward(2)
    handle.skip()
    record()
    handle.flush()
    record()
    backward(3)
    handle.skip()
    record()
    return states


def algorithm(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare each step with the paper's algorithm on copies of the model and the optimizer."""
    results = {}
    for method, optimizer in job["cases"]:
        duo = Duo(ZeroBit(), ahead=False) if method == "stays" else method
        ours = Training(duo, optimizer)
        exact = Alone(optimizer)
        parameters = copy.deepcopy(list(exact.model.parameters()))
        stepper = OPTIMIZERS[optimizer](parameters)
        before: tuple[list[Tensor | None], float] | None = None
        equal = []
        for step in range(5):
            fast, slow, rate = both(ours, exact, batch(rank, step))
            if before is not None:
                steps(stepper, parameters, *before)
            ahead, looks = copy.deepcopy((parameters, stepper))
            if method != "stays":
                steps(looks, ahead, fast, rate)
            equal.append(same(ahead, ours.model.parameters()))
            before = slow, rate
        assert before is not None
        steps(stepper, parameters, *before)
        state = ours.flushed()[1]
        results[f"{method} {optimizer}"] = {
            "ahead": equal,
            "flushed": same(parameters, ours.model.parameters()),
            "state": state == hashed(stepper),
        }
    return results


def drift(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the distance of each method's final parameters from FP32 training."""
    exact = end_of_least_squares("fp32", job["steps"])
    codecs = {"stays": Duo(ZeroBit(), ahead=False)}
    names = ("qsgd2", "duo2", "duo4", "stays", "duo0")
    return {
        name: float((end_of_least_squares(codecs.get(name, name), job["steps"]) - exact).norm())
        for name in names
    }


def scaled(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Set an infinite gradient on one rank in step 3; all ranks skip only this step."""
    results = {}
    for codec in ("duo0", "duo1", "duo4", "duo32"):
        for optimizer in ("adamw", "adamw fused"):
            training = Training(codec, optimizer, scales=True).run(range(5), infinite=3)
            report = training.handle.report()  # type: ignore[union-attr]
            results[f"{codec} {optimizer}"] = {
                "weights": training.flushed(),
                "finite": all(bool(p.isfinite().all()) for p in training.model.parameters()),
                "scale": training.scaler.get_scale(),
                "left out": report.ahead.skipped,  # type: ignore[attr-defined]
                "committed": report.ahead.committed,  # type: ignore[attr-defined]
            }
    return results


def resumed(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare six steps with three steps, a checkpoint without a flush and three more steps."""
    results = {}
    for codec in ("duo2", "duo0"):
        for optimizer in ("sgd", "adamw", "tensor lr"):
            uninterrupted = Training(codec, optimizer).run(range(6))
            first = Training(codec, optimizer).run(range(3))
            path = Path(job["where"]) / f"{codec}-{optimizer}-{rank}.pt".replace(" ", "-")
            assert first.handle is not None and uninterrupted.handle is not None
            parts = (first.model, first.optimizer, first.schedule, first.handle)
            torch.save([part.state_dict() for part in parts], path)
            first.run(range(3, 5))
            again = Training(codec, optimizer)
            assert again.handle is not None
            for part, state in zip(
                (again.model, again.optimizer, again.schedule, again.handle),
                torch.load(path, weights_only=True),
                strict=True,
            ):
                part.load_state_dict(state)
            again.run(range(3, 6))
            ahead = [weights(uninterrupted.model), weights(again.model)]
            results[f"{codec} {optimizer}"] = [*ahead, uninterrupted.flushed(), again.flushed()]
    return results


def offloaded(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the final states with copies on device and host, without and with a resume."""
    results: dict[str, Any] = {}
    for sharded in (False, True):
        for name, optimizer in (("duo4", "adamw"), ("duo0", "sgd")):
            ends = results[f"{name} {sharded}"] = []
            for offload in (False, True):
                duo = replace(DUOS[name], offload=offload)
                other = replace(DUOS[name], offload=not offload)
                training = Training(duo, optimizer, sharded=sharded).run(range(3))
                again = Training(other, optimizer, sharded=sharded)
                for part in ("model", "optimizer", "schedule", "handle"):
                    state = copy.deepcopy(getattr(training, part).state_dict())
                    getattr(again, part).load_state_dict(state)
                ends += [made.run(range(3, 6)).flushed() for made in (training, again)]
    return results


def loaded(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Load the state of fewer ranks, with the outstanding gradients of all of them."""
    training = Training("duo2", "adamw")
    assert training.handle is not None
    path = Path(job["where"]) / f"duo2-adamw-{rank % 2}.pt"
    model, optimizer, schedule, handle = torch.load(path, weights_only=True)
    training.model.load_state_dict(model)
    training.optimizer.load_state_dict(optimizer)
    training.schedule.load_state_dict(schedule)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.handle.load_state_dict(handle)
    outstanding = training.handle.report().outstanding  # type: ignore[attr-defined]
    refused = ""
    try:
        Training("duo4", "adamw").handle.load_state_dict(handle)  # type: ignore[union-attr]
    except qsync_fx.OptionError as error:
        refused = str(error)
    training.run(range(3, 6))
    return {
        "outstanding": outstanding,
        "warned": len(caught),
        "refused": refused,
        "end": training.flushed(),
    }


def evaluated(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Flush during training, also on one rank only, and return a report."""
    results: dict[str, Any] = {}
    training, plain = (
        Training("duo32", "adamw").run(range(3)),
        Training(None, "adamw").run(range(3)),
    )
    results["flushed"] = [training.flushed(), plain.flushed()]
    results["after"] = [training.run(range(3, 5)).flushed(), plain.run(range(3, 5)).flushed()]

    training = Training("duo2", "sgd").run(range(3))
    assert training.handle is not None
    ahead = weights(training.model)
    training.handle.wait()
    report = training.handle.report()
    if rank == 0:
        training.handle.flush()
        results["moved"] = weights(training.model) != ahead
        training.handle.flush()
    training.run(range(3, 5))
    results["one rank"] = training.flushed()
    results["printed"] = str(report)
    results["reports"] = {
        "fast": [report.tally.wire, report.tally.raw, report.tally.theory],
        "slow": [report.slow.wire, report.slow.raw],  # type: ignore[attr-defined]
        "waited": report.ahead.waited >= 0,  # type: ignore[attr-defined]
        "committed": report.ahead.committed,  # type: ignore[attr-defined]
        "outstanding": report.outstanding,  # type: ignore[attr-defined]
        "buckets": [report.tally.buckets, report.slow.buckets],  # type: ignore[attr-defined]
    }
    return results


def alone(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    training = Training("duo0", "adamw", clips=True).run(range(4))
    nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    assert training.handle is not None
    state = training.handle.state_dict()
    training.handle.load_state_dict(state)
    plain = Training(None, "adamw", clips=True).run(range(4))
    return {"ends": [training.flushed(), plain.flushed()], "printed": str(training.handle.report())}


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:], meet=lambda name: True)
