"""One rank of the tests of DUO; run by tests/communication as a process of its own."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ranks
import torch
from compressed_rank import batch, parallel, refusal, said, weights
from torch import Tensor, distributed, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx.communication import reduction
from qsync_fx.communication.duo.rates import Duo, Silence
from qsync_fx.communication.handle import Handle
from qsync_fx.distributed import check_replicas, compress

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
}


class Training:
    """An ordinary loop: a schedule, gradients of two passes, clipping by a hook of the optimizer, a GradScaler."""

    def __init__(self, codec: Any, optimizer: str, clips: bool = False, scales: bool = False, **how: Any) -> None:
        self.model = parallel(**how)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=scales)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.handle: Handle | None = None
        if codec is not None:
            self.handle = compress(
                self.model, codec, optimizer=self.optimizer, scaler=self.scaler if scales else None, check_every=2
            )
        if clips:
            self.optimizer.register_step_pre_hook(self.clip)

    def run(self, steps: range, accumulates: bool = False, infinite: int = -1) -> Training:
        rank, world = distributed.get_rank(), distributed.get_world_size()
        for step in steps:
            self.optimizer.zero_grad(set_to_none=step % 2 == 0)
            if accumulates:
                with self.model.no_sync():
                    self.scaler.scale(self.loss(-batch(rank, step))).backward()
            bad = float("inf") if step == infinite and rank == world - 1 else 1.0
            self.scaler.scale(self.loss(batch(rank, step)) * bad).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()
        return self

    def clip(self, *_: Any) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)

    def loss(self, x: Tensor) -> Tensor:
        found: Tensor = self.model(x).square().mean()
        return found

    def flushed(self) -> list[str]:
        if self.handle is not None:
            self.handle.flush()
        check_replicas(self.model)
        return [weights(self.model), hashed(self.optimizer)]


def hashed(optimizer: torch.optim.Optimizer) -> str:
    """Returns a hash of all tensors of an optimizer's state."""
    state = optimizer.state_dict()["state"]
    tensors = [value for index in sorted(state) for _, value in sorted(state[index].items()) if value is not None]
    return hashlib.sha256(b"".join(torch.as_tensor(t).numpy().tobytes() for t in tensors)).hexdigest()


def identical(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """With FP32 as the fast mean, against DistributedDataParallel alone."""
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "": ({}, {}),
        "accumulating": ({}, {"accumulates": True}),
        "clipping": ({"clips": True}, {}),
        "scaling": ({"scales": True}, {"infinite": 2}),
        "views": ({"gradient_as_bucket_view": True}, {}),
    }
    found = {}
    for optimizer, case in job["cases"]:
        how, loop = cases[case]
        alone = Alone(optimizer, **how).run(range(6), **loop)
        ahead = Training("duo32", optimizer, **how).run(range(6), **loop)
        lr = ahead.optimizer.param_groups[0]["lr"]
        found[f"{optimizer} {case}".strip()] = {
            "alone": alone.flushed(),
            "ahead": ahead.flushed(),
            "scale": [alone.scaler.get_scale(), ahead.scaler.get_scale()],
            "lr": [float(alone.optimizer.param_groups[0]["lr"]), float(lr)],
            "skipped": ahead.handle.report().ahead.skipped,  # type: ignore[union-attr]
        }
    return found


class Alone(Training):
    """Gradients in FP32, summed in the order of ranks: with two of them those of DistributedDataParallel."""

    def __init__(self, optimizer: str, **how: Any) -> None:
        super().__init__(None, optimizer, **how)
        if distributed.get_world_size() > 2:
            self.handle = compress(self.model, "fp32")


def algorithm(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Each step against DUO's algorithm as the paper has it, written with copies of whole models and optimizers."""
    found = {}
    for way, optimizer in job["cases"]:
        duo = Duo(Silence(), ahead=False) if way == "stays" else way
        ours = Training(duo, optimizer)
        exact = Alone(optimizer)
        known = copy.deepcopy(list(exact.model.parameters()))
        stepper = OPTIMIZERS[optimizer](known)
        before: tuple[list[Tensor | None], float] | None = None
        equal = []
        for step in range(5):
            rate = ours.optimizer.param_groups[0]["lr"]
            ours.optimizer.zero_grad()
            ours.loss(batch(rank, step)).backward()
            fast = gradients(ours.model.parameters())
            with torch.no_grad():
                for p, q in zip(exact.model.parameters(), ours.model.parameters(), strict=True):
                    p.copy_(q)
            exact.optimizer.zero_grad()
            exact.loss(batch(rank, step)).backward()
            ours.optimizer.step()
            ours.schedule.step()
            if before is not None:
                steps(stepper, known, *before)
            ahead, looks = copy.deepcopy((known, stepper))
            if way != "stays":
                steps(looks, ahead, fast, rate)
            equal.append(same(ahead, ours.model.parameters()))
            before = gradients(exact.model.parameters()), rate
        assert before is not None
        steps(stepper, known, *before)
        state = ours.flushed()[1]
        found[f"{way} {optimizer}"] = {
            "ahead": equal,
            "flushed": same(known, ours.model.parameters()),
            "state": state == hashed(stepper),
        }
    return found


def gradients(parameters: Any) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in parameters]


def steps(optimizer: torch.optim.Optimizer, parameters: Any, values: list[Tensor | None], rate: float) -> None:
    for p, value in zip(parameters, values, strict=True):
        p.grad = value
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()


def same(ones: Any, others: Any) -> bool:
    return all(torch.equal(p, q) for p, q in zip(ones, others, strict=True))


def drift(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """The setting of COMM.md: least squares in 40 dimensions, 16 samples a rank and step, AdamW, 300 steps."""
    torch.manual_seed(0)
    inputs, target = torch.randn(200, 40), torch.randn(40)
    outputs = inputs @ target + 0.3 * torch.randn(200)

    def end(codec: Any) -> Tensor:
        layer = nn.Linear(40, 1, bias=False)
        nn.init.zeros_(layer.weight)
        model = DistributedDataParallel(layer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01)
        duo = not isinstance(codec, str) or codec.startswith("duo")
        handle = compress(model, codec, optimizer=optimizer if duo else None, least=0)
        for step in range(1, job["steps"] + 1):
            chosen = torch.randint(0, 200, (16,), generator=torch.Generator().manual_seed(step * 7 + rank))
            optimizer.zero_grad()
            error = model(inputs[chosen]).squeeze(1) - outputs[chosen]
            (error.square().mean() / 2).backward()
            optimizer.step()
        handle.flush()
        check_replicas(model)
        return layer.weight.detach().clone()

    exact = end("fp32")
    ways = {"stays": Duo(Silence(), ahead=False)}
    names = ("qsgd2", "duo2", "duo4", "stays", "duo0")
    return {name: float((end(ways.get(name, name)) - exact).norm()) for name in names}


def scaled(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """An infinity on one rank: the step is left out on all, and it alone, whatever is sent at once."""
    found = {}
    for codec in ("duo0", "duo1", "duo4", "duo32"):
        for optimizer in ("adamw", "adamw fused"):
            training = Training(codec, optimizer, scales=True).run(range(5), infinite=3)
            report = training.handle.report()  # type: ignore[union-attr]
            found[f"{codec} {optimizer}"] = {
                "weights": training.flushed(),
                "finite": all(bool(p.isfinite().all()) for p in training.model.parameters()),
                "scale": training.scaler.get_scale(),
                "left out": report.ahead.skipped,  # type: ignore[attr-defined]
                "committed": report.ahead.committed,  # type: ignore[attr-defined]
            }
    return found


def resumed(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Six steps at once, and three and three with everything saved in between, and nothing flushed."""
    found = {}
    for codec in ("duo2", "duo0"):
        for optimizer in ("sgd", "adamw", "tensor lr"):
            whole = Training(codec, optimizer).run(range(6))
            first = Training(codec, optimizer).run(range(3))
            path = Path(job["where"]) / f"{codec}-{optimizer}-{rank}.pt".replace(" ", "-")
            assert first.handle is not None and whole.handle is not None
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
            ahead = [weights(whole.model), weights(again.model)]
            found[f"{codec} {optimizer}"] = [*ahead, whole.flushed(), again.flushed()]
    return found


def loaded(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Goes on among more ranks than saved: what was outstanding is that of all ranks."""
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
    return {"outstanding": outstanding, "warned": len(caught), "refused": refused, "end": training.flushed()}


def evaluated(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Flushes in the middle, on one rank alone, too; a report."""
    found: dict[str, Any] = {}
    training, plain = Training("duo32", "adamw").run(range(3)), Training(None, "adamw").run(range(3))
    found["flushed"] = [training.flushed(), plain.flushed()]
    found["after"] = [training.run(range(3, 5)).flushed(), plain.run(range(3, 5)).flushed()]

    training = Training("duo2", "sgd").run(range(3))
    assert training.handle is not None
    ahead = weights(training.model)
    training.handle.wait()
    report = training.handle.report()
    if rank == 0:
        training.handle.flush()
        found["moved"] = weights(training.model) != ahead
        training.handle.flush()
    training.run(range(3, 5))
    found["one rank"] = training.flushed()
    found["printed"] = str(report)
    found["reports"] = {
        "fast": [report.tally.wire, report.tally.raw, report.tally.theory],
        "slow": [report.slow.wire, report.slow.raw],  # type: ignore[attr-defined]
        "waited": report.ahead.waited >= 0,  # type: ignore[attr-defined]
        "committed": report.ahead.committed,  # type: ignore[attr-defined]
        "outstanding": report.outstanding,  # type: ignore[attr-defined]
        "buckets": [report.tally.buckets, report.slow.buckets],  # type: ignore[attr-defined]
    }
    return found


def refused(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """What DUO cannot do is an error that says so."""
    found: dict[str, Any] = {}
    says = partial(refusal, found)

    def training(**how: Any) -> tuple[Any, Any]:
        model = parallel()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, sgd = training()
    inner = list(model.parameters())
    says("none", lambda: compress(model, "duo4"))
    says("codec", lambda: compress(model, "qsgd8", optimizer=sgd))
    says("name", lambda: compress(model, "duo3", optimizer=sgd))
    says("closure", lambda: compress(model, "duo4", optimizer=torch.optim.LBFGS(inner)))
    says("foreign", lambda: compress(model, "duo4", optimizer=torch.optim.SGD([*inner, nn.Parameter(torch.ones(3))])))
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
    found["skipped"] = handle.report().ahead.skipped
    says("again", sgd.step)
    says("with a closure", lambda: sgd.step(lambda: torch.zeros(())))
    model, sgd = training()
    compress(model, "duo4", optimizer=sgd)

    def joins() -> None:
        with model.join():
            backward(model)

    says("join", joins)
    return found


def disagreement(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    found = {}
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
            found[name] = said(error)
    return found


def alone(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    training = Training("duo0", "adamw", clips=True).run(range(4))
    nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    assert training.handle is not None
    state = training.handle.state_dict()
    training.handle.load_state_dict(state)
    plain = Training(None, "adamw", clips=True).run(range(4))
    return {"ends": [training.flushed(), plain.flushed()], "printed": str(training.handle.report())}


def killed(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 is killed in the middle of a slow reduction."""
    training = Training("duo4", "sgd").run(range(2))
    sound = reduction.exchange
    slow: Any = training.handle._slow.state.codec  # type: ignore[union-attr]
    assert slow.startswith("in full")

    def dies(group: Any, outgoing: Any, incoming: Any, about: str) -> None:
        if rank == 1 and "bucket 1 of step 2" in about and outgoing[0].numel() > job["full"]:
            os.kill(os.getpid(), signal.SIGKILL)
        sound(group, outgoing, incoming, about)

    reduction.exchange = dies
    try:
        training.run(range(2, 6))
    except qsync_fx.RankError as error:
        with contextlib.suppress(qsync_fx.RankError):
            assert training.handle is not None
            training.handle.flush()
        return said(error)
    return {}


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:], meet=lambda name: name not in ("killed", "refused"))
