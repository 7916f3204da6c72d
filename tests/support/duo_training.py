"""What ranks train in the tests of DUO."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from compressed_training import batch, parallel, weights
from torch import Tensor, distributed, nn

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


class Alone(Training):
    """Gradients in FP32, summed in the order of ranks: with two of them those of DistributedDataParallel."""

    def __init__(self, optimizer: str, **how: Any) -> None:
        super().__init__(None, optimizer, **how)
        if distributed.get_world_size() > 2:
            self.handle = compress(self.model, "fp32")


def hashed(optimizer: torch.optim.Optimizer) -> str:
    """Returns a hash of all tensors of an optimizer's state."""
    state = optimizer.state_dict()["state"]
    tensors = [value for index in sorted(state) for _, value in sorted(state[index].items()) if value is not None]
    return hashlib.sha256(b"".join(torch.as_tensor(t).numpy().tobytes() for t in tensors)).hexdigest()
