"""Adam and AdamW with a single-pass step: each value is read once and written at most once.

Invariant: the operations of torch's single-tensor step, in its order, with fused multiply-adds for
`lerp_` and `addcmul_` as in torch's vector kernels. The square root is correctly rounded; torch's
may be off by one ulp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

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


class _Stepping(torch.optim.Adam):
    """The step that Adam and AdamW share, as in torch."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step, as torch's does."""
        return stepped(self, closure, partial(_step_on, self))


class Adam(_Stepping):
    """torch.optim.Adam whose step on FP32 parameters of the CPU is one pass over memory."""


class AdamW(_Stepping, torch.optim.AdamW):
    """torch.optim.AdamW whose step on FP32 parameters of the CPU is one pass over memory."""


def _step_on(optimizer: Any, group: dict[str, Any]) -> None:
    parameters: list[Tensor] = []
    gradients: list[Tensor] = []
    states: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    steps: list[Tensor] = []
    complex_ones = optimizer._init_group(group, parameters, gradients, *states, steps)
    columns = [parameters, gradients, *(states if group["amsgrad"] else states[:2])]
    serve = kernels_serve(group, ("betas", "eps", "weight_decay")) and all(map(_plain_step, steps))
    if serve and all_taken(*columns):
        _by_kernel(optimizer, group, [*columns, steps], gradients)
        return
    served = [serve and taken(*tensors) for tensors in zip(*columns, strict=True)]
    ours, others = (
        [list(compress(column, selected)) for column in [*columns, steps]]
        for selected in (served, [not serves for serves in served])
    )
    if ours[0]:
        ordered = [
            in_order_of(parameter, gradient)
            for parameter, gradient in zip(ours[0], ours[1], strict=True)
        ]
        _by_kernel(optimizer, group, ours, ordered)
    if others[0]:
        _by_torch(optimizer, group, others, bool(complex_ones))


def _plain_step(step: Tensor) -> bool:
    return type(step) is Tensor and step.is_cpu and step.dtype == torch.float32


def _by_kernel(
    optimizer: torch.optim.Adam,
    group: dict[str, Any],
    columns: list[list[Tensor]],
    ordered: list[Tensor],
) -> None:
    parameters, gradients, first, second, *largest, steps = columns
    if not parameters:
        return
    beta1, beta2 = group["betas"]
    lr, decay, apart = group["lr"], group["weight_decay"], group["decoupled_weight_decay"]
    scale = grad_scale(optimizer)
    numbers = [step.item() + 1 for step in steps]
    # As in torch, where `lr` may be a tensor. Most parameters have equal step counts.
    sizes = {
        number: (float(lr / (1 - beta1**number)), (1 - beta2**number) ** 0.5)
        for number in set(numbers)
    }
    _C.adam(
        addresses(parameters),
        addresses(ordered),
        addresses(first),
        addresses(second),
        addresses(largest[0]) if largest else [],
        addresses(steps),
        [parameter.numel() for parameter in parameters],
        [sizes[number][0] for number in numbers],
        [sizes[number][1] for number in numbers],
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        kept=float(1 - lr * decay) if apart and decay != 0 else None,
        weight_decay=0.0 if apart else decay,
        maximize=group["maximize"],
        grad_scale=scale,
        threads=torch.get_num_threads(),
    )
    torch.autograd.graph.increment_version(
        [tensor for column in (columns[0], *columns[2:]) for tensor in column]
    )
    if scale is not None:
        keep_unscaled(gradients, ordered)


def _by_torch(
    optimizer: torch.optim.Adam,
    group: dict[str, Any],
    columns: list[list[Tensor]],
    complex_ones: bool,
) -> None:
    parameters, gradients, first, second, *largest, steps = columns
    beta1, beta2 = group["betas"]
    adam(
        parameters,
        gradients,
        first,
        second,
        largest[0] if largest else [],
        steps,
        amsgrad=group["amsgrad"],
        has_complex=complex_ones,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        foreach=group["foreach"],
        capturable=group["capturable"],
        differentiable=group["differentiable"],
        fused=group["fused"],
        grad_scale=getattr(optimizer, "grad_scale", None),
        found_inf=getattr(optimizer, "found_inf", None),
        decoupled_weight_decay=group["decoupled_weight_decay"],
    )
