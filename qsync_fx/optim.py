"""CPU optimizers with a single pass over memory: drop-in subclasses of torch.optim.

`Adam`, `AdamW` and `SGD` override only `step`: arguments, state_dict and results are torch's.
Parameters, gradients and states that are not dense FP32 CPU memory with the same element order use
torch's own step. The operations are those of torch's single-tensor step, with the fused
multiply-adds of its vector kernels; Adam's square root is correctly rounded, torch's within 1 ulp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from qsync_fx import _C
from qsync_fx.torch_internals import tree_leaves

__all__ = ["SGD", "Adam", "AdamW"]

_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_SGD: Final = "weight_decay momentum lr dampening nesterov maximize foreach fused"
_ADAM: Final = (
    "amsgrad lr weight_decay eps maximize foreach capturable differentiable fused "
    "decoupled_weight_decay"
)
"""Settings of a group that torch's functions take as they are."""
Columns = Sequence[Sequence[Tensor | None]]
"""Parameters, gradients and states; a momentum buffer is None before the first step."""


class SGD(torch.optim.SGD):
    """torch.optim.SGD whose step on FP32 parameters of the CPU is one pass over memory."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step, as torch's does."""
        return _step(self, closure, partial(_sgd, self))


class _AdamStep(torch.optim.Adam):
    """The step that Adam and AdamW share, as in torch."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step, as torch's does."""
        return _step(self, closure, partial(_adam, self))


class Adam(_AdamStep):
    """torch.optim.Adam whose step on FP32 parameters of the CPU is one pass over memory."""


class AdamW(_AdamStep, torch.optim.AdamW):
    """torch.optim.AdamW whose step on FP32 parameters of the CPU is one pass over memory."""


def _step(
    optimizer: Any, closure: Callable[[], Any] | None, step_on: Callable[[dict[str, Any]], None]
) -> Any:
    """Perform a step with `step_on` for each parameter group; return the closure's loss."""
    loss = None
    with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A GradScaler that found non-finite gradients delegates skipping to the step.
        if not getattr(optimizer, "found_inf", None):
            for group in optimizer.param_groups:
                step_on(group)
    return loss


def _kernels_serve(group: dict[str, Any], scalars: Iterable[str]) -> bool:
    """Return whether kernels may step on a group; the settings `scalars` must not be tensors."""
    if torch.compiler.is_compiling() or group.get("differentiable") or group.get("capturable"):
        return False
    leaves = tree_leaves([group[name] for name in scalars])
    return not any(isinstance(value, Tensor) for value in leaves)


def _divided(
    serve: bool, columns: Columns, width: int
) -> tuple[list[Any], list[Tensor], list[Any]]:
    """Return the rows that kernels step on, their gradients in element order, and other rows.

    The first `width` columns of a row have the shape of the parameter.
    """
    rows: list[Any] = list(zip(*columns, strict=True))
    # In the usual case one test of all tensors is much faster than one for each parameter.
    if serve and _all_contiguous(columns[:width]):
        return rows, [row[1] for row in rows], []
    is_ours = [serve and _is_ours(*row[:width]) for row in rows]
    ours = [row for row, mine in zip(rows, is_ours, strict=True) if mine]
    others = [row for row, mine in zip(rows, is_ours, strict=True) if not mine]
    return ours, [_in_order_of(row[0], row[1]) for row in ours], others


def _all_contiguous(columns: Columns) -> bool:
    every = [tensor for column in columns for tensor in column if tensor is not None]
    shapes = [tensor.shape for tensor in columns[0] if tensor is not None]
    return (
        _PLAIN.issuperset(map(type, every))
        and {tensor.dtype for tensor in every} <= {torch.float32}
        and all(tensor.is_cpu for tensor in every)
        and {tensor.layout for tensor in every} <= {torch.strided}
        and all(map(Tensor.is_contiguous, every))
        and not any(map(Tensor.is_neg, every))
        and all(
            tensor.shape == shape
            for column in columns
            for tensor, shape in zip(column, shapes, strict=True)
            if tensor is not None
        )
    )


def _is_ours(parameter: Tensor, gradient: Tensor, *states: Tensor | None) -> bool:
    """Return whether kernels accept a parameter and its state; the gradient may need a copy."""
    return (
        _plain(parameter)
        and type(gradient) in _PLAIN
        and gradient.dtype == torch.float32
        and gradient.layout == torch.strided
        and all(s is None or (_plain(s) and _same_layout(s, parameter)) for s in states)
    )


def _plain(tensor: Tensor) -> bool:
    """Return whether a tensor is FP32 on the CPU and dense in memory."""
    return (
        type(tensor) in _PLAIN
        and tensor.dtype == torch.float32
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and not tensor.is_neg()
        # `empty_like` has the same strides if and only if the tensor is dense in memory.
        and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    )


def _same_layout(item: Tensor, other: Tensor) -> bool:
    """Return whether shapes are equal, and strides in dimensions of more than one value."""
    strides = zip(item.stride(), other.stride(), item.shape, strict=True)
    return item.shape == other.shape and all(a == b for a, b, size in strides if size != 1)


def _in_order_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient in the element order of the parameter."""
    if _plain(gradient) and _same_layout(gradient, parameter):
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _grad_scale(optimizer: Optimizer) -> float | None:
    """Return the factor by which the step must unscale gradients of a GradScaler, or None."""
    scale = getattr(optimizer, "grad_scale", None)
    return None if scale is None else float(scale)


def _keep_unscaled(gradients: Sequence[Tensor], ordered: Sequence[Tensor]) -> None:
    """Copy the kernel's unscaled gradients (see `_in_order_of`) back to the gradients."""
    torch.autograd.graph.increment_version(gradients)
    for gradient, other in zip(gradients, ordered, strict=True):
        if other is not gradient:
            gradient.copy_(other)


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _settings(optimizer: Optimizer, group: dict[str, Any], names: str) -> dict[str, Any]:
    """Return the settings of a group and a GradScaler's state, as torch's functions take them."""
    scaling = {name: getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")}
    return {name: group[name] for name in names.split()} | scaling


def _adam(optimizer: Any, group: dict[str, Any]) -> None:
    columns: list[list[Tensor]] = [[] for _ in range(6)]
    has_complex = optimizer._init_group(group, *columns)
    if not group["amsgrad"]:
        del columns[4]
    serve = _kernels_serve(group, ("betas", "eps", "weight_decay")) and all(
        type(step) is Tensor and step.is_cpu and step.dtype == torch.float32 for step in columns[-1]
    )
    ours, ordered, others = _divided(serve, columns, len(columns) - 1)
    if ours:
        _adam_by_kernel(optimizer, group, ours, ordered)
    if others:
        parameters, gradients, first, second, *largest, steps = map(list, zip(*others, strict=True))
        beta1, beta2 = group["betas"]
        adam(
            parameters,
            gradients,
            first,
            second,
            [tensor for column in largest for tensor in column],
            steps,
            has_complex=has_complex,
            beta1=beta1,
            beta2=beta2,
            **_settings(optimizer, group, _ADAM),
        )


def _adam_by_kernel(
    optimizer: Optimizer, group: dict[str, Any], rows: list[Any], ordered: list[Tensor]
) -> None:
    """Step on rows (parameter, gradient, states, step) with the gradients `ordered`."""
    parameters, gradients, first, second, *largest, steps = map(list, zip(*rows, strict=True))
    beta1, beta2 = group["betas"]
    lr, decay, scale = group["lr"], group["weight_decay"], _grad_scale(optimizer)
    factor = None
    if group["decoupled_weight_decay"]:
        if decay != 0:
            factor = float(1 - lr * decay)
        decay = 0.0
    numbers = [step.item() + 1 for step in steps]
    # As in torch, where `lr` may be a tensor. Most parameters have equal step counts.
    sizes = {
        number: (float(lr / (1 - beta1**number)), (1 - beta2**number) ** 0.5)
        for number in set(numbers)
    }
    _C.adam(
        _addresses(parameters),
        _addresses(ordered),
        _addresses(first),
        _addresses(second),
        [address for column in largest for address in _addresses(column)],
        _addresses(steps),
        [parameter.numel() for parameter in parameters],
        [sizes[number][0] for number in numbers],
        [sizes[number][1] for number in numbers],
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        kept=factor,
        weight_decay=decay,
        maximize=group["maximize"],
        grad_scale=scale,
        threads=torch.get_num_threads(),
    )
    written = [parameters, first, second, *largest, steps]
    torch.autograd.graph.increment_version([tensor for column in written for tensor in column])
    if scale is not None:
        _keep_unscaled(gradients, ordered)


def _sgd(optimizer: Any, group: dict[str, Any]) -> None:
    columns: list[list[Any]] = [[], [], []]
    has_sparse = optimizer._init_group(group, *columns)
    if group["momentum"] == 0:
        columns[2] = [None] * len(columns[0])
    serve = _kernels_serve(group, ("weight_decay", "momentum", "dampening"))
    ours, ordered, others = _divided(serve, columns, 3)
    for rows in (ours, others):
        if not rows:
            continue
        parameters, gradients, buffers = map(list, zip(*rows, strict=True))
        if rows is ours:
            buffers = _sgd_by_kernel(optimizer, group, parameters, gradients, buffers, ordered)
        else:
            settings = _settings(optimizer, group, _SGD)
            sgd(parameters, gradients, buffers, has_sparse_grad=has_sparse, **settings)
        if group["momentum"] != 0:
            for parameter, buffer in zip(parameters, buffers, strict=True):
                optimizer.state[parameter]["momentum_buffer"] = buffer


def _sgd_by_kernel(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameters: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor | None],
    ordered: list[Tensor],
) -> list[Tensor]:
    """Step with the gradients `ordered`, and return the momentum buffers."""
    scale, momenta = _grad_scale(optimizer), list[Tensor]()
    if group["momentum"] != 0:
        pairs = zip(parameters, buffers, strict=True)
        momenta = [torch.empty_like(p) if buffer is None else buffer for p, buffer in pairs]
    _C.sgd(
        _addresses(parameters),
        _addresses(ordered),
        _addresses(momenta),
        [buffer is None for buffer in buffers],
        [parameter.numel() for parameter in parameters],
        lr=float(group["lr"]),
        momentum=group["momentum"],
        dampening=group["dampening"],
        weight_decay=group["weight_decay"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        grad_scale=scale,
        threads=torch.get_num_threads(),
    )
    torch.autograd.graph.increment_version(parameters + momenta)
    if scale is not None:
        _keep_unscaled(gradients, ordered)
    return momenta
