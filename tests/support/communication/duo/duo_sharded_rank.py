"""Rank process of the tests of DUO with a sharded optimizer, started by tests/communication."""

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
    """Compare sharded DUO, with FP32 gradients and parameters, with the unsharded optimizer."""
    results = {}
    for optimizer, case in job["cases"]:
        settings, loop = TRAININGS[case]
        alone = Alone(optimizer, **settings).run(range(6), **loop)
        ours = Training("duo32", optimizer, sharded=True, **settings).run(range(6), **loop)
        assert ours.handle is not None
        before = weights(ours.model)
        state = ours.handle.whole_optimizer_state()  # type: ignore[attr-defined]
        check_replicas(ours.model)
        report: Any = ours.handle.report()
        results[f"{optimizer} {case}".strip()] = {
            "alone": [weights(alone.model), hashed_state(alone.optimizer.state_dict())],
            "ours": [weights(ours.model), hashed_state(state)],
            "unflushed": before,
            "scale": [alone.scaler.get_scale(), ours.scaler.get_scale()],
            "skipped": report.ahead.skipped,
        }
    return results


def drift(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the distances of `duo_rank.drift` with sharded optimizers."""
    exact = end_of_least_squares("fp32", job["steps"])
    return {
        f"{name} {sharded}": float(
            (end_of_least_squares(name, job["steps"], sharded) - exact).norm()
        )
        for name, sharded in job["ways"]
    }


def algorithm(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare each step with this rank's shard of the paper's algorithm on full copies."""
    results = {}
    for codec, optimizer in job["cases"]:
        ours: Any = Training(codec, optimizer, sharded=True)
        sharded = ours.handle._optimized
        exact = Alone(optimizer)
        parameters = copy.deepcopy(list(exact.model.parameters()))
        stepper = OPTIMIZERS[optimizer](parameters)
        before: tuple[list[Tensor | None], float] | None = None
        ahead_equal, near = [], []
        for step in range(5):
            fast, slow, rate = both(ours, exact, batch(rank, step))
            check_replicas(ours.model)
            if before is not None:
                steps(stepper, parameters, *before)
            ahead, looks = copy.deepcopy((parameters, stepper))
            steps(looks, ahead, fast, rate)
            local = [sharded.local_part(index, p.detach()) for index, p in enumerate(ahead)]
            ahead_equal.append(same(local, sharded.stepped))
            for index, (p, old) in enumerate(
                zip(ours.model.parameters(), exact.model.parameters(), strict=True)
            ):
                gathered, previous, part = (
                    sharded.local_part(index, p.detach()),
                    sharded.local_part(index, old.detach()),
                    sharded.stepped[index].detach(),
                )
                widest = float((part - previous).abs().max()) if part.numel() else 0.0
                near.append(bool(((gathered - part).abs() <= widest / 7 * (1 + 1e-5) + 1e-9).all()))
            before = slow, rate
        assert before is not None
        steps(stepper, parameters, *before)
        lossy = not same(
            [
                sharded.local_part(position, p.detach())
                for position, p in enumerate(ours.model.parameters())
            ],
            sharded.stepped,
        )
        state = ours.handle.whole_optimizer_state()
        results[f"{codec} {optimizer}"] = {
            "ahead": ahead_equal,
            "near": all(near),
            "lossy": lossy,
            "flushed": same(parameters, ours.model.parameters()),
            "state": hashed_state(state) == hashed_state(stepper.state_dict()),
        }
    return results


def held(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of optimizer state with and without sharding, and the bytes sent."""
    full = Training("duo4", "adamw").run(range(2))
    ours = Training("duo4", "adamw", sharded=True).run(range(3))
    assert ours.handle is not None
    ours.handle.wait()
    report: Any = ours.handle.report()
    sent = report.parameters
    return {
        "whole": state_bytes(full.optimizer),
        "ours": state_bytes(ours.optimizer),
        "held": report.state_bytes,
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
    """Compare clipping by the norm over all shards with torch's clipping of full gradients."""
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
    """Flush during training, and save the full state at this step for `loaded`."""
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
    """Load the full state of other ranks with a sharded and an unsharded optimizer."""
    model, state = torch.load(Path(job["where"]) / "whole.pt", weights_only=True)
    alone = Alone("adamw")
    ours = Training(None, "adamw")
    for training in (alone, ours):
        training.model.load_state_dict(model)
        training.optimizer.load_state_dict(state)
    ours.sharded = True
    ours.handle = compress(ours.model, "duo32", optimizer=ours.optimizer, sharded=True)
    ends = [weights(training.run(range(3, 6)).model) for training in (ours, alone)]
    results: dict[str, Any] = {"ends": ends}
    mine = ours.handle.state_dict()
    refusal(
        results,
        "other rank",
        lambda: ours.handle.load_state_dict({**mine, "rank": (rank + 1) % world}),
    )  # type: ignore[union-attr]
    return results


def refused(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the errors of optimizers that cannot be sharded, before any message is sent."""
    errors: dict[str, Any] = {}
    model = parallel()
    inner = list(model.parameters())
    sgd = torch.optim.SGD(inner, lr=0.1)

    def says(
        name: str, codec: str, sharded: bool | str, optimizer: torch.optim.Optimizer | None = sgd
    ) -> None:
        refusal(errors, name, lambda: compress(model, codec, optimizer=optimizer, sharded=sharded))

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
    refusal(errors, "clips", training.optimizer.step)
    return errors


def killed(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Kill rank 1 before it sends its parameters."""
    training: Any = Training("duo4", "sgd", sharded=True).run(range(2))
    give = training.handle._optimized._reducer.give

    def dies(*arguments: Any, **settings: Any) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        give(*arguments, **settings)

    training.handle._optimized._reducer.give = dies
    try:
        training.run(range(2, 6))
    except qsync_fx.RankError as error:
        return said(error)
    return {}


def apart(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Change a parameter on rank 1; all ranks raise an error at the next replica check."""
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
    """Compare six steps with three steps, a checkpoint without a flush and three more steps."""
    results = {}
    for codec, optimizer in (("duo2", "sgd"), ("duo4", "adamw"), ("duo0", "tensor lr")):
        uninterrupted = Training(codec, optimizer, sharded=True).run(range(6))
        first = Training(codec, optimizer, sharded=True).run(range(3))
        path = Path(job["where"]) / f"{codec}-{rank}.pt"
        torch.save([part.state_dict() for part in parts(first)], path)
        first.run(range(3, 5))
        again = Training(codec, optimizer, sharded=True)
        for part, state in zip(parts(again), torch.load(path, weights_only=True), strict=True):
            part.load_state_dict(state)
        again.run(range(3, 6))
        ahead = [weights(uninterrupted.model), weights(again.model)]
        results[codec] = [*ahead, uninterrupted.flushed(), again.flushed()]
    return results


def parts(training: Training) -> tuple[Any, ...]:
    return training.model, training.optimizer, training.schedule, training.handle


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:], meet=lambda name: True)
