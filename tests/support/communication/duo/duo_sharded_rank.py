"""Rank of the tests of DUO with a sharded optimizer; tests/communication runs it as a process."""

from __future__ import annotations

import copy
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qsync_fx
from qsync_fx.distributed import check_replicas, compress
from tests.support.communication.compressed_training import (
    batch,
    distance,
    parallel,
    refusal,
    said,
    weights,
)
from tests.support.communication.duo.duo_steps import both, same, steps
from tests.support.communication.duo.duo_training import (
    OPTIMIZERS,
    TRAININGS,
    Alone,
    Training,
    end_of_least_squares,
    hashed_state,
)
from tests.support.processes import ranks


def identical(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare FP32 in both directions with the unsharded optimizer and its state."""
    found = {}
    for optimizer, case in job["cases"]:
        how, loop = TRAININGS[case]
        alone = Alone(optimizer, **how).run(range(6), **loop)
        ours = Training("duo32", optimizer, sharded=True, **how).run(range(6), **loop)
        assert ours.handle is not None
        before = weights(ours.model)
        state = ours.handle.whole_optimizer_state()  # type: ignore[attr-defined]
        check_replicas(ours.model)
        report: Any = ours.handle.report()
        found[f"{optimizer} {case}".strip()] = {
            "alone": [weights(alone.model), hashed_state(alone.optimizer.state_dict())],
            "ours": [weights(ours.model), hashed_state(state)],
            "unflushed": before,
            "scale": [alone.scaler.get_scale(), ours.scaler.get_scale()],
            "skipped": report.ahead.skipped,
        }
    return found


def drift(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Run the setting of `duo_rank.drift` with sharded optimizers."""
    exact = end_of_least_squares("fp32", job["steps"])
    return {
        f"{name} {sharded}": float(
            (end_of_least_squares(name, job["steps"], sharded) - exact).norm()
        )
        for name, sharded in job["ways"]
    }


def algorithm(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare each step with the paper's algorithm on this rank's parts of full copies."""
    found = {}
    for way, optimizer in job["cases"]:
        ours: Any = Training(way, optimizer, sharded=True)
        held = ours.handle._optimized
        exact = Alone(optimizer)
        known = copy.deepcopy(list(exact.model.parameters()))
        stepper = OPTIMIZERS[optimizer](known)
        before: tuple[list[Tensor | None], float] | None = None
        ahead_equal, near = [], []
        for step in range(5):
            fast, slow, rate = both(ours, exact, batch(rank, step))
            check_replicas(ours.model)
            if before is not None:
                steps(stepper, known, *before)
            ahead, looks = copy.deepcopy((known, stepper))
            steps(looks, ahead, fast, rate)
            own = [held.own(place, p.detach()) for place, p in enumerate(ahead)]
            ahead_equal.append(same(own, held.stepped))
            for place, (p, old) in enumerate(
                zip(ours.model.parameters(), exact.model.parameters(), strict=True)
            ):
                given, was, part = (
                    held.own(place, p.detach()),
                    held.own(place, old.detach()),
                    held.stepped[place].detach(),
                )
                widest = float((part - was).abs().max()) if part.numel() else 0.0
                near.append(bool(((given - part).abs() <= widest / 7 * (1 + 1e-5) + 1e-9).all()))
            before = slow, rate
        assert before is not None
        steps(stepper, known, *before)
        lossy = not same(
            [held.own(at, p.detach()) for at, p in enumerate(ours.model.parameters())], held.stepped
        )
        state = ours.handle.whole_optimizer_state()
        found[f"{way} {optimizer}"] = {
            "ahead": ahead_equal,
            "near": all(near),
            "lossy": lossy,
            "flushed": same(known, ours.model.parameters()),
            "state": hashed_state(state) == hashed_state(stepper.state_dict()),
        }
    return found


def held(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the memory of a rank's optimizer, and the bytes sent."""
    whole = Training("duo4", "adamw").run(range(2))
    ours = Training("duo4", "adamw", sharded=True).run(range(3))
    assert ours.handle is not None
    ours.handle.wait()
    report: Any = ours.handle.report()
    sent = report.parameters
    return {
        "whole": state_bytes(whole.optimizer),
        "ours": state_bytes(ours.optimizer),
        "held": report.held,
        "raw": [report.tally.raw, report.slow.raw, sent.raw],
        "wire": [report.tally.wire, report.slow.wire, sent.wire],
        "theory": [report.tally.theory, report.slow.theory, sent.theory],
        "checks": sent.checks,
        "printed": str(report),
    }


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.nbytes
        for values in optimizer.state.values()
        for name, value in values.items()
        if name != "step"
    )


def clipped(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare the gradient norm over all ranks with torch's norm of full gradients."""
    alone, ours = (
        Alone("adamw", clips=True).run(range(6)),
        Training("duo32", "adamw", clips=True, sharded=True),
    )
    unclipped = Alone("adamw").run(range(6))
    ours.run(range(6)).flushed()
    return {
        "apart": distance(ours.model, alone.model),
        "unclipped": distance(unclipped.model, alone.model),
    }


def evaluated(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Flush during training: the result equals a training that is flushed and loaded there."""
    training = Training("duo2", "adamw", sharded=True).run(range(3))
    assert training.handle is not None
    ahead = weights(training.model)
    state = training.handle.whole_optimizer_state()  # type: ignore[attr-defined]
    flushed = weights(training.model)
    training.handle.flush()
    again = weights(training.model)
    torch.save([training.model.state_dict(), state], Path(job["where"]) / "whole.pt")
    training.run(range(3, 5))
    return {"moved": flushed != ahead, "again": again == flushed, "end": training.flushed()[0]}


def loaded(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Resume on other ranks from the full state, with a sharded and an unsharded optimizer."""
    model, state = torch.load(Path(job["where"]) / "whole.pt", weights_only=True)
    alone = Alone("adamw")
    ours = Training(None, "adamw")
    for training in (alone, ours):
        training.model.load_state_dict(model)
        training.optimizer.load_state_dict(state)
    ours.sharded = True
    ours.handle = compress(ours.model, "duo32", optimizer=ours.optimizer, sharded=True)
    ends = [weights(training.run(range(3, 6)).model) for training in (ours, alone)]
    found: dict[str, Any] = {"ends": ends}
    mine = ours.handle.state_dict()
    refusal(
        found,
        "other rank",
        lambda: ours.handle.load_state_dict({**mine, "rank": (rank + 1) % world}),
    )  # type: ignore[union-attr]
    return found


def refused(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the errors of optimizers that cannot be sharded, before any message is sent."""
    found: dict[str, Any] = {}
    model = parallel()
    inner = list(model.parameters())
    sgd = torch.optim.SGD(inner, lr=0.1)

    def says(
        name: str, codec: str, sharded: bool | str, optimizer: torch.optim.Optimizer | None = sgd
    ) -> None:
        refusal(found, name, lambda: compress(model, codec, optimizer=optimizer, sharded=sharded))

    says("no duo", "qsgd8", True, None)
    says("rows", "duo4", True, torch.optim.Adafactor(inner))
    says("residual", "duo4", "1bit*")
    says("adaptive", "duo4", "aqgb")
    says("name", "duo4", "qsgd5")
    says("differ", "duo4", rank == 0)
    assert sgd.param_groups[0]["params"] == inner
    training = Training("duo4", "sgd", sharded=True)
    training.loss(batch(rank, 0)).backward()
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
    refusal(found, "clips", training.optimizer.step)
    return found


def killed(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Kill rank 1 before it sends its parameters."""
    training: Any = Training("duo4", "sgd", sharded=True).run(range(2))
    give = training.handle._optimized._reducer.give

    def dies(*given: Any, **settings: Any) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        give(*given, **settings)

    training.handle._optimized._reducer.give = dies
    try:
        training.run(range(2, 6))
    except qsync_fx.RankError as error:
        return said(error)
    return {}


def apart(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Change parameters on a rank: all ranks raise an error at the next comparison."""
    training = Training("duo4", "sgd", sharded=True).run(range(1))
    if rank == 1:
        with torch.no_grad():
            training.model.module.second.weight.view(-1)[0] += 1e-3  # type: ignore[union-attr, operator]
    try:
        training.run(range(1, 4))
    except qsync_fx.RankError as error:
        return said(error)
    return {}


def resumed(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare six steps with three and three steps that are separated by a checkpoint, without a
    flush.
    """
    found = {}
    for codec, optimizer in (("duo2", "sgd"), ("duo4", "adamw"), ("duo0", "tensor lr")):
        whole = Training(codec, optimizer, sharded=True).run(range(6))
        first = Training(codec, optimizer, sharded=True).run(range(3))
        path = Path(job["where"]) / f"{codec}-{rank}.pt"
        torch.save([part.state_dict() for part in parts(first)], path)
        first.run(range(3, 5))
        again = Training(codec, optimizer, sharded=True)
        for part, state in zip(parts(again), torch.load(path, weights_only=True), strict=True):
            part.load_state_dict(state)
        again.run(range(3, 6))
        ahead = [weights(whole.model), weights(again.model)]
        found[codec] = [*ahead, whole.flushed(), again.flushed()]
    return found


def parts(training: Training) -> tuple[Any, ...]:
    return training.model, training.optimizer, training.schedule, training.handle


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:], meet=lambda name: True)
