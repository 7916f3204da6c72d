"""Rank process of the tests of compressed gradients, started by tests/communication."""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx.communication import point_to_point
from qsync_fx.communication.codecs import buffers
from qsync_fx.distributed import check_replicas, compress
from tests.support.communication.compressed_training import (
    Network,
    batch,
    distance,
    parallel,
    said,
    sgd,
    train,
    trained,
    weights,
)
from tests.support.processes import ranks


def codecs(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare each codec with uncompressed training and with torch's communication hooks."""
    plain, _ = trained()
    results: dict[str, Any] = {"plain": weights(plain)}
    for name in job["codecs"]:
        model, handle = trained(name)
        assert handle is not None
        report = handle.report()
        results[name] = {
            "weights": weights(model),
            "distance": distance(model, plain),
            "wire": report.tally.wire,
            "theory": report.tally.theory,
            "raw": report.tally.raw,
            "buckets": report.tally.buckets,
            "steps": report.tally.steps,
            "checks": report.tally.checks,
            "variance": report.variance,
            "printed": str(report),
        }
    for name, hook in (
        ("fp16", default_hooks.fp16_compress_hook),
        ("bf16", default_hooks.bf16_compress_hook),
    ):
        if name in job["codecs"]:
            # DistributedDataParallel limits torch's BF16 hook to CUDA by its name, but gloo also
            # sums BF16.
            theirs, _ = trained(hook=lambda state, bucket, hook=hook: hook(state, bucket))
            ours, _ = trained(name)
            results[name]["from torch's"] = distance(ours, theirs)
    return results


def elsewhere(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare each codec's C++ kernels with its torch operators, which other devices use."""
    native, results = buffers.native, {}
    for name in job["codecs"]:
        made, reports = [], []
        for is_native in (native, lambda values: False):
            buffers.native = is_native
            model = parallel(buckets=job["buckets"])
            optimizer = sgd(model)
            handle = compress(
                model, name, optimizer=optimizer if name.startswith("duo") else None, check_every=2
            )
            list(train(model, optimizer, range(5)))
            handle.flush()
            check_replicas(model)
            saved = handle.state_dict()
            made.append([weights(model), {part: sorted(saved[part]) for part in ("sent", "owned")}])
            reports.append(handle.report().tally)
        results[name] = {
            "kernels": made[0],
            "operators": made[1],
            "wire": [tally.wire for tally in reports],
        }
    buffers.native = native
    return results


def placed(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return hashes of mean gradients and error feedback for values equal on all devices."""
    device, results = job["devices"][rank], {}
    for name in job["codecs"]:
        torch.manual_seed(0)
        values = nn.ParameterList(
            torch.randn(shape, device="cpu") for shape in ((40, 300), (1031,), (7, 5, 3, 3), (129,))
        )
        model = DistributedDataParallel(Squares(values).to(device), bucket_cap_mb=0.02)
        handle = compress(model, name, least=0, check_every=1)
        made = []
        for step in range(4):
            model.zero_grad()
            model(torch.tensor(1.0 + rank + step, device=device)).backward()
            made += [
                p.grad.cpu().numpy().tobytes() for p in model.parameters() if p.grad is not None
            ]
        left = handle.state_dict()["sent"]
        made += [left[part].numpy().tobytes() for part in sorted(left)]
        report = handle.report()
        results[name] = [hashlib.sha256(item).hexdigest() for item in made] + [
            report.tally.checks,
            report.tally.wire,
        ]
        if rank == 0:
            print(report, flush=True)
    return results


def trains(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train on a device with each codec, and compare with uncompressed training."""
    results = {}
    plain = parallel(device=job["device"])
    list(train(plain, sgd(plain), range(6)))
    for name in job["codecs"]:
        model = parallel(device=job["device"])
        optimizer = sgd(model)
        handle = compress(
            model, name, optimizer=optimizer if name.startswith("duo") else None, check_every=2
        )
        list(train(model, optimizer, range(6)))
        handle.flush()
        check_replicas(model)
        results[name] = {
            "weights": weights(model),
            "distance": distance(model, plain),
            "printed": str(handle.report()),
        }
    return results


def buckets(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Vary DDP's buckets and the chunk size of a bucket; neither changes the result."""
    results = {}
    for codec in ("qsgd4", "1bit*", "1bit"):
        for name, options in (
            ("many", {}),
            ("one", {"buckets": 25}),
            ("views", {"gradient_as_bucket_view": True}),
            ("static", {"static_graph": True}),
        ):
            results[f"{codec}, {name}"] = weights(trained(codec, **options)[0])
        chunk_values, point_to_point.VALUES = point_to_point.VALUES, 100
        results[f"{codec}, in stretches"] = weights(trained(codec, buckets=25)[0])
        point_to_point.VALUES = chunk_values
    return results


def resumed(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare six steps with three steps, a checkpoint and three more steps."""
    results = {}
    for codec in ("qsgd8", "1bit*", "1bit"):
        uninterrupted, _ = trained(codec)
        model = parallel()
        handle, optimizer = compress(model, codec), sgd(model)
        list(train(model, optimizer, range(3)))
        path = Path(job["where"]) / f"{codec.replace('*', 's')}-{rank}.pt"
        torch.save([model.state_dict(), optimizer.state_dict(), handle.state_dict()], path)
        list(train(model, optimizer, range(3, 5)))

        again = parallel()
        handle, optimizer = compress(again, codec, seed=99), sgd(again)
        saved = torch.load(path, weights_only=True)
        again.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        handle.load_state_dict(saved[2])
        list(train(again, optimizer, range(3, 6)))
        other = parallel()
        other.load_state_dict(saved[0])
        optimizer = sgd(other)
        optimizer.load_state_dict(saved[1])
        compress(other, codec)
        list(train(other, optimizer, range(3, 6)))
        results[codec] = [weights(uninterrupted), weights(again), weights(other)]
    return results


def loaded(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Load the state of fewer ranks, and the state of another codec."""
    model = parallel()
    handle = compress(model, "1bit*")
    saved = torch.load(Path(job["where"]) / f"1bits-{rank % 2}.pt", weights_only=True)[2]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle.load_state_dict(saved)
    list(train(model, sgd(model), range(3)))
    check_replicas(model)
    result: dict[str, Any] = {"warned": [str(warning.message) for warning in caught]}
    try:
        compress(parallel(), "qsgd8").load_state_dict(saved)
    except qsync_fx.OptionError as error:
        result["refused"] = said(error)
    return result


def disagreement(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    errors = {}
    for name, options in (
        ("codec", {"codec": "qsgd8" if rank != 1 else "qsgd4"}),
        ("seed", {"codec": "qsgd8", "seed": rank}),
        ("least", {"codec": "qsgd8", "least": 60 + 10 * rank}),
    ):
        try:
            compress(parallel(), **options)
        except qsync_fx.RankError as error:
            errors[name] = said(error)
    model = parallel()
    compress(model, "qsgd8")
    list(train(model, sgd(model), range(2)))
    try:
        compress(model, "qsgd8")
    except qsync_fx.OptionError as error:
        errors["twice"] = said(error)
    check_replicas(model)
    return errors


def cases(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train with other features of DDP, and check that replicas stay equal."""
    results: dict[str, Any] = {}

    def tries(
        name: str,
        step: Callable[[nn.Module, Any, int], None],
        codec: str = "1bit*",
        **model_options: Any,
    ) -> nn.Module:
        model = parallel(**model_options)
        compress(model, codec, check_every=1)
        optimizer = sgd(model)
        for step_index in range(4):
            optimizer.zero_grad()
            step(model, optimizer, step_index)
        check_replicas(model)
        results[name] = all(bool(p.isfinite().all()) for p in model.parameters())
        return model

    def accumulates(model: Any, optimizer: Any, step_index: int) -> None:
        with model.no_sync():
            model(batch(rank, step_index)).square().mean().backward()
        model(-batch(rank, step_index)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    def branches(model: Any, optimizer: Any, step_index: int) -> None:
        model(
            batch(rank, step_index), aside=rank == 0 and step_index % 2 == 0
        ).square().mean().backward()
        optimizer.step()

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def scales(model: Any, optimizer: Any, step_index: int) -> None:
        loss = model(batch(rank, step_index)).square().mean()
        bad = float("inf") if rank == world - 1 and step_index == 1 else 1.0
        scaler.scale(loss * bad).backward()
        scaler.step(optimizer)
        scaler.update()

    tries("no_sync and clipping", accumulates)
    tries("branches", branches)
    for codec in ("1bit*", "1bit", "qsgd8", "fp16"):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        tries(f"GradScaler {codec}", scales, codec)
        results[f"scale {codec}"] = scaler.get_scale()
    tries(
        "static graph",
        lambda m, o, step_index: (m(batch(rank, step_index)).mean().backward(), o.step())[1],
        static_graph=True,
    )

    model = parallel()
    compress(model, "qsgd4")
    optimizer = sgd(model)
    with model.join():
        list(train(model, optimizer, range(2 + rank)))
    results["join"] = weights(model)

    torch.manual_seed(0)
    model = DistributedDataParallel(Network().to(torch.bfloat16), find_unused_parameters=True)
    compress(model, "qsgd8")
    model(batch(rank, 0).bfloat16()).square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    results["bf16"] = hashlib.sha256(
        b"".join(g.float().numpy().tobytes() for g in gradients)
    ).hexdigest()
    return results


def sizes(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train tensors of 0, 1 and odd numbers of values, then set a NaN on the last rank."""
    results: dict[str, Any] = {}
    for codec in job["codecs"]:
        torch.manual_seed(0)
        parameters = nn.ParameterList(
            torch.randn(shape) for shape in ((0,), (), (1,), (0, 3), (7, 5), (129,), (1031,))
        )
        model = DistributedDataParallel(Squares(parameters), bucket_cap_mb=0.001)
        handle, optimizer = compress(model, codec, least=0, check_every=1), sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.tensor(1.0 + rank + step)).backward()
            optimizer.step()
        check_replicas(model)
        finite, report = weights(model), handle.report()
        parameters[-1].register_hook(
            lambda g: g.index_fill(0, torch.tensor(700), torch.nan if rank == world - 1 else 0.0)
        )
        optimizer.zero_grad()
        model(torch.tensor(1.0)).backward()
        *others, last = [p.grad for p in parameters]
        results[codec] = {
            "weights": finite,
            "coded": [report.coded, report.plain],
            "nan": [index.item() for index in last.isnan().nonzero()],
            "others": all(bool(g.isfinite().all()) for g in others),
        }
    return results


class Squares(nn.Module):
    """Model whose gradients, 0.2 * p * x, differ between values and, by `x`, between ranks."""

    def __init__(self, parameters: nn.ParameterList) -> None:
        super().__init__()
        self.parameters_of_all_sizes = parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(p * p * x).sum() for p in self.parameters_of_all_sizes]).sum() * 0.1


def detail(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train with torch's debug level DETAIL.

    The level is set after the default group exists: in torch 2.13 the constructor of
    DistributedDataParallel crashes with a wrapped group, also without qsync_fx.
    """
    distributed.set_debug_level(distributed.DebugLevel.DETAIL)
    model = parallel()
    optimizer = sgd(model)
    duo = job["codec"].startswith("duo")
    handle = compress(model, job["codec"], optimizer=optimizer if duo else None, check_every=1)
    list(train(model, optimizer, range(4)))
    handle.flush()
    check_replicas(model)
    looked = type(handle._reducer.group._get_backend(torch.device("cpu"))).__name__
    return {"looked at": looked, "weights": weights(model), "steps": handle.report().tally.steps}


def many(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train many steps with many buckets in flight."""
    torch.manual_seed(0)
    layers = [nn.Linear(40, 40) for _ in range(20)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.005)
    handle = compress(model, job["codec"], check_every=10)
    optimizer = sgd(model)
    for step in range(job["steps"]):
        optimizer.zero_grad()
        model(
            torch.randn(4, 40, generator=torch.Generator().manual_seed(rank + step))
        ).square().mean().backward()
        optimizer.step()
    check_replicas(model)
    tally = handle.report().tally
    return {
        "steps": tally.steps,
        "buckets": tally.buckets,
        "checks": tally.checks,
        "weights": weights(model),
    }


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:], meet=lambda name: True)
