"""Model, training loop and error records for the tests of compressed gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx.communication.ddp_hook import DdpCompressor
from qsync_fx.distributed import check_replicas, compress


class Network(nn.Module):
    """Model with a convolution, odd sizes, tensors too small to encode and an optional layer."""

    def __init__(self, width: int = 67) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 5, 3)
        self.first, self.second = nn.Linear(5 * 6 * 6, width), nn.Linear(width, width)
        self.aside, self.last = nn.Linear(width, width), nn.Linear(width, 3)
        self.unused = nn.Parameter(torch.randn(50))

    def forward(self, x: Tensor, aside: bool = True) -> Tensor:
        x = torch.relu(self.first(self.convolution(x).flatten(1)))
        x = self.second(x) + (self.aside(x) if aside else 0)
        return self.last(torch.tanh(x))


def parallel(
    buckets: float = 0.02, device: str = "cpu", **ddp_options: Any
) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(
        Network().to(device), bucket_cap_mb=buckets, find_unused_parameters=True, **ddp_options
    )


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(model: nn.Module, optimizer: Any, steps: range, scale: float = 1.0) -> Iterator[int]:
    for step in steps:
        optimizer.zero_grad()
        inputs = batch(distributed.get_rank(), step).to(next(model.parameters()).device)
        (model(inputs).square().mean() * scale).backward()
        optimizer.step()
        yield step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def weights(model: nn.Module) -> str:
    return hashlib.sha256(
        b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    ).hexdigest()


def said(error: BaseException) -> dict[str, Any]:
    return {"kind": type(error).__name__, "text": str(error), "rank": getattr(error, "rank", None)}


def refusal(errors: dict[str, Any], name: str, does: Callable[[], object]) -> None:
    """Store the error of a call, if it raises one, in `errors[name]`."""
    try:
        does()
    except qsync_fx.QSyncError as error:
        errors[name] = said(error)


def trained(
    codec: Any = None, hook: Any = None, steps: int = 6, **model_options: Any
) -> tuple[nn.Module, DdpCompressor | None]:
    model = parallel(**model_options)
    handle = compress(model, codec, check_every=2) if codec is not None else None
    if hook is not None:
        model.register_comm_hook(None, hook)
    list(train(model, sgd(model), range(steps)))
    check_replicas(model)
    return model, handle


def distance(model: nn.Module, other: nn.Module) -> float:
    distances = [
        (p - q).norm() / q.norm()
        for p, q in zip(model.parameters(), other.parameters(), strict=True)
    ]
    return float(torch.stack(distances).max())
