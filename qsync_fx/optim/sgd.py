"""SGD with a single-pass step: each value is read once and written at most once.

Invariant: the operations of torch's single-tensor step, in its order, with fused multiply-adds as
in torch's vector kernels: for every added product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from qsync_fx import _C
from qsync_fx.optim.eligibility import (
    addresses,
    all_taken,
    grad_scale,
    in_order_of,
    keep_unscaled,
    kernels_serve,
    stepped,
    taken,
)

Row = tuple[Tensor, Tensor, Tensor | None]
"""Parameter, gradient and momentum buffer; the buffer is None before the first step."""


class SGD(torch.optim.SGD):
    """torch.optim.SGD whose step on FP32 parameters of the CPU is one pass over memory."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step, as torch's does."""
        return stepped(self, closure, self._step_on)

    def _step_on(self, group: dict[str, Any]) -> None:
        parameters: list[Tensor] = []
        gradients: list[Tensor] = []
        buffers: list[Tensor | None] = []
        of_torch: Any = self
        sparse = of_torch._init_group(group, parameters, gradients, buffers)
        saved: list[Tensor | None] = buffers if group["momentum"] != 0 else [None] * len(parameters)
        rows = list(zip(parameters, gradients, saved, strict=True))
        if not kernels_serve(group, ("weight_decay", "momentum", "dampening")):
            self._by_torch(group, rows, bool(sparse))
            return
        begun = [(parameter, buffer) for parameter, _, buffer in rows if buffer is not None]
        if all_taken(parameters, gradients) and all_taken(
            *([pair[index] for pair in begun] for index in (0, 1))
        ):
            self._by_kernel(group, rows, gradients)
            return
        ours = [row for row in rows if taken(*row)]
        self._by_kernel(group, ours, [in_order_of(row[0], row[1]) for row in ours])
        self._by_torch(group, [row for row in rows if not taken(*row)], bool(sparse))

    def _by_kernel(self, group: dict[str, Any], rows: list[Row], ordered: list[Tensor]) -> None:
        if not rows:
            return
        scale, momentum = grad_scale(self), group["momentum"]
        parameters, gradients = [row[0] for row in rows], [row[1] for row in rows]
        buffers = (
            [torch.empty_like(p) if buffer is None else buffer for p, _, buffer in rows]
            if momentum != 0
            else []
        )
        _C.sgd(
            addresses(parameters),
            addresses(ordered),
            addresses(buffers),
            [row[2] is None for row in rows],
            [parameter.numel() for parameter in parameters],
            lr=float(group["lr"]),
            momentum=momentum,
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            grad_scale=scale,
            threads=torch.get_num_threads(),
        )
        torch.autograd.graph.increment_version(parameters + buffers)
        if scale is not None:
            keep_unscaled(gradients, ordered)
        for parameter, buffer in zip(parameters, buffers, strict=False):
            self.state[parameter]["momentum_buffer"] = buffer

    def _by_torch(self, group: dict[str, Any], rows: list[Row], sparse: bool) -> None:
        if not rows:
            return
        buffers = [row[2] for row in rows]
        sgd(
            [row[0] for row in rows],
            [row[1] for row in rows],
            buffers,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            has_sparse_grad=sparse,
            foreach=group["foreach"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
        )
        if group["momentum"] != 0:
            for (parameter, _, _), buffer in zip(rows, buffers, strict=True):
                self.state[parameter]["momentum_buffer"] = buffer
