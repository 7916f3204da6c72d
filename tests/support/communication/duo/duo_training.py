"""Training loops for the DUO tests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from qsync_fx.communication.compressor_state import CompressorHandle
from qsync_fx.distributed import check_replicas, compress
from tests.support.communication.compressed_training import batch, parallel, weights

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

TRAININGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "": ({}, {}),
    "accumulating": ({}, {"accumulates": True}),
    "clipping": ({"clips": True}, {}),
    "scaling": ({"scales": True}, {"infinite": 2}),
    "views": ({"gradient_as_bucket_view": True}, {}),
}
"""Options of a training by case: arguments of the constructor and of `run`."""


class Training:
    """Training loop with a learning rate schedule, accumulation, clipping and a GradScaler."""

    def __init__(
        self,
        codec: Any,
        optimizer: str,
        clips: bool = False,
        scales: bool = False,
        sharded: bool | str = False,
        device: str = "cpu",
        **model_options: Any,
    ) -> None:
        self.model = parallel(device=device, **model_options)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scaler = torch.amp.GradScaler(
            device, init_scale=8.0, growth_interval=2, enabled=scales
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1 / (1 + step)
        )
        self.handle: CompressorHandle | None = None
        self.sharded = sharded
        if codec is not None:
            self.handle = compress(
                self.model,
                codec,
                optimizer=self.optimizer,
                scaler=self.scaler if scales else None,
                sharded=sharded,
                check_every=2,
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
        if self.sharded:
            assert self.handle is not None
            self.handle.clip_grad_norm_(0.3)  # type: ignore[attr-defined]
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)

    def loss(self, x: Tensor) -> Tensor:
        device = next(self.model.parameters()).device
        result: Tensor = self.model(x.to(device)).square().mean()
        return result

    def flushed(self) -> list[str]:
        if self.handle is not None:
            self.handle.flush()
        check_replicas(self.model)
        return [weights(self.model), hashed(self.optimizer)]


class Alone(Training):
    """Training with an FP32 sum in rank order, which is DistributedDataParallel for two ranks."""

    def __init__(self, optimizer: str, **training_options: Any) -> None:
        super().__init__(None, optimizer, **training_options)
        if distributed.get_world_size() > 2:
            self.handle = compress(self.model, "fp32")


def hashed(optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of all tensors in the state of an optimizer."""
    return hashed_state(optimizer.state_dict())


def hashed_state(saved: Mapping[str, Any]) -> str:
    """Return a hash of all tensors in the state dict of an optimizer."""
    state = saved["state"]
    tensors = [
        value
        for index in sorted(state)
        for _, value in sorted(state[index].items())
        if value is not None
    ]
    return hashlib.sha256(
        b"".join(torch.as_tensor(t).cpu().numpy().tobytes() for t in tensors)
    ).hexdigest()


def end_of_least_squares(codec: Any, steps: int, sharded: bool | str = False) -> Tensor:
    """Return the final parameters, [40], of least squares with AdamW and 16 samples per rank."""
    torch.manual_seed(0)
    inputs, target = torch.randn(200, 40), torch.randn(40)
    outputs = inputs @ target + 0.3 * torch.randn(200)
    layer = nn.Linear(40, 1, bias=False)
    nn.init.zeros_(layer.weight)
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01)
    duo = not isinstance(codec, str) or codec.startswith("duo")
    handle = compress(model, codec, optimizer=optimizer if duo else None, least=0, sharded=sharded)
    for step in range(1, steps + 1):
        seed = step * 7 + distributed.get_rank()
        chosen = torch.randint(0, 200, (16,), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        error = model(inputs[chosen]).squeeze(1) - outputs[chosen]
        (error.square().mean() / 2).backward()
        optimizer.step()
    handle.flush()
    check_replicas(model)
    return layer.weight.detach().clone()
