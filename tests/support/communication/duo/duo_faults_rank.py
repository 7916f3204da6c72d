"""Rank process of the tests of unsupported uses of DUO, started by tests/communication."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import qsync_fx
from qsync_fx.communication import point_to_point
from qsync_fx.distributed import compress
from tests.support.communication.compressed_training import batch, parallel, refusal, said
from tests.support.communication.duo.duo_training import Training
from tests.support.processes import ranks


def refused(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the errors of unsupported uses of DUO."""
    errors: dict[str, Any] = {}
    says = partial(refusal, errors)

    def training() -> tuple[Any, Any]:
        model = parallel()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, sgd = training()
    inner = list(model.parameters())
    says("none", lambda: compress(model, "duo4"))
    says("codec", lambda: compress(model, "qsgd8", optimizer=sgd))
    says("name", lambda: compress(model, "duo3", optimizer=sgd))
    says("closure", lambda: compress(model, "duo4", optimizer=torch.optim.LBFGS(inner)))
    says(
        "foreign",
        lambda: compress(
            model, "duo4", optimizer=torch.optim.SGD([*inner, nn.Parameter(torch.ones(3))])
        ),
    )
    says("missing", lambda: compress(model, "duo4", optimizer=torch.optim.SGD(inner[:-1])))
    zero: Any = ZeroRedundancyOptimizer
    says("zero", lambda: compress(model, "duo4", optimizer=zero(inner, torch.optim.SGD, lr=0.1)))

    def backward(model: Any, step: int = 0) -> None:
        model(batch(rank, step)).square().mean().backward()

    for name in ("clips", "clips without effect"):
        model, sgd = training()
        compress(model, "duo4", optimizer=sgd)
        backward(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1 if name == "clips" else 1e9)
        says(name, sgd.step)
    model, sgd = training()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    compress(model, "duo4", optimizer=sgd)
    scaler.scale(model(batch(rank, 0)).square().mean()).backward()
    says("scaler", lambda: scaler.step(sgd))
    model, sgd = training()
    handle: Any = compress(model, "duo4", optimizer=sgd)
    backward(model)
    says("twice", lambda: backward(model))
    model, sgd = training()
    handle = compress(model, "duo4", optimizer=sgd)
    backward(model)
    handle.skip()
    backward(model)
    sgd.step()
    errors["skipped"] = handle.report().ahead.skipped
    says("again", sgd.step)
    says("with a closure", lambda: sgd.step(lambda: torch.zeros(())))
    model, sgd = training()
    compress(model, "duo4", optimizer=sgd)

    def joins() -> None:
        with model.join():
            backward(model)

    says("join", joins)
    return errors


def disagreement(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    errors = {}
    for name, codec, rate in (
        ("codec", "duo4" if rank else "duo2", 0.1),
        ("way", "duo4" if rank else "qsgd4", 0.1),
        ("optimizer", "duo4", 0.1 + rank),
    ):
        model = parallel()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        try:
            compress(model, codec, optimizer=optimizer if codec.startswith("duo") else None)
        except qsync_fx.RankError as error:
            errors[name] = said(error)
    return errors


def killed(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Kill rank 1 during a slow reduction."""
    training = Training("duo4", "sgd").run(range(2))
    slow: Any = training.handle._slow.state.codec  # type: ignore[union-attr]
    assert slow.startswith("in full")

    class Dies(point_to_point.PendingTransfers):
        def send(self, to: int, message: torch.Tensor, number: int = 0) -> None:
            if rank == 1 and "bucket 1 of step 2" in self._about and message.numel() > job["full"]:
                os.kill(os.getpid(), signal.SIGKILL)
            super().send(to, message, number)

    point_to_point.PendingTransfers = Dies  # type: ignore[misc]
    try:
        training.run(range(2, 6))
    except qsync_fx.RankError as error:
        with contextlib.suppress(qsync_fx.RankError):
            assert training.handle is not None
            training.handle.flush()
        return said(error)
    return {}


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:], meet=lambda name: name == "disagreement")
