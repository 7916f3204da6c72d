"""Eligibility of parameters for the optimizer kernels, and helpers that the optimizers share.

Invariant: a kernel gets addresses of dense FP32 CPU memory in which a parameter, its gradient and
its state have the same element order. Other parameters use torch's own step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})


def stepped(
    optimizer: Any, closure: Callable[[], Any] | None, step_on: Callable[[dict[str, Any]], None]
) -> Any:
    """Perform a step with `step_on` for each parameter group; return the closure's loss."""
    with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not _skips(optimizer):
            for group in optimizer.param_groups:
                step_on(group)
    return loss


def kernels_serve(group: dict[str, Any], scalars: Iterable[str]) -> bool:
    """Return whether kernels may step on a group; the settings `scalars` must not be tensors."""
    if torch.compiler.is_compiling() or group.get("differentiable") or group.get("capturable"):
        return False
    return all(not isinstance(value, Tensor) for name in scalars for value in _values(group[name]))


def _values(setting: Any) -> Sequence[Any]:
    return setting if isinstance(setting, tuple | list) else (setting,)


def all_taken(*columns: Sequence[Tensor]) -> bool:
    """Return whether kernels accept all these tensors unchanged, all contiguous.

    Arguments are columns: parameters, gradients, states. This is the usual case, and one test of
    all tensors is much faster than one per parameter.
    """
    every = [tensor for column in columns for tensor in column]
    shapes = [tensor.shape for tensor in columns[0]]
    return (
        _PLAIN.issuperset(map(type, every))
        and {tensor.dtype for tensor in every} <= {torch.float32}
        and all(tensor.is_cpu for tensor in every)
        and {tensor.layout for tensor in every} <= {torch.strided}
        and all(map(Tensor.is_contiguous, every))
        and not any(map(Tensor.is_neg, every))
        and all([tensor.shape for tensor in column] == shapes for column in columns)
    )


def taken(parameter: Tensor, gradient: Tensor, *states: Tensor | None) -> bool:
    """Return whether kernels accept a parameter and its state; the gradient may need a copy."""
    return (
        _plain(parameter)
        and type(gradient) in _PLAIN
        and gradient.dtype == torch.float32
        and gradient.layout == torch.strided
        and all(
            state is None or (_plain(state) and _lie_alike(state, parameter)) for state in states
        )
    )


def _plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.dtype == torch.float32
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and not tensor.is_neg()
        and _dense(tensor)
    )


def _lie_alike(item: Tensor, other: Tensor) -> bool:
    """Return whether shapes are equal, and strides in dimensions of more than one value."""
    return item.shape == other.shape and all(
        a == b
        for a, b, size in zip(item.stride(), other.stride(), item.shape, strict=True)
        if size != 1
    )


def _dense(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def in_order_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient in the element order of the parameter."""
    if _plain(gradient) and _lie_alike(gradient, parameter):
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def grad_scale(optimizer: Optimizer) -> float | None:
    """Return the factor by which the step must unscale gradients of a GradScaler, or None."""
    scale = getattr(optimizer, "grad_scale", None)
    return None if scale is None else float(scale)


def keep_unscaled(gradients: Sequence[Tensor], ordered: Sequence[Tensor]) -> None:
    """Copy the kernel's unscaled gradients `ordered` (see `in_order_of`) back to the gradients."""
    torch.autograd.graph.increment_version(gradients)
    for gradient, other in zip(gradients, ordered, strict=True):
        if other is not gradient:
            gradient.copy_(other)


def _skips(optimizer: Optimizer) -> bool:
    """Return whether a GradScaler found non-finite gradients and delegates skipping to the step."""
    result = getattr(optimizer, "found_inf", None)
    return result is not None and bool(result)


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
