"""Training in FP16 without loss scaling: said where gradients that are no numbers reach the optimizer.

FP16 is what a plan asks for, and what INT8 and BF16 are carried in on GPUs before Ampere, so a user may not know of it. A GradScaler
keeps such gradients from the optimizer, which is how its absence shows.

Invariant: nothing that is computed changes. Gradients are looked at in steps 1, 2, 4, 8 and so on of an optimizer, since looking waits for
the device; a model is told of once.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from qsync_fx.backend.operators.products import short
from qsync_fx.errors import PlanWarning
from qsync_fx.graph import PrecisionGraph

_watched: Final[weakref.WeakKeyDictionary[nn.Module, str]] = weakref.WeakKeyDictionary()
_steps: Final[weakref.WeakKeyDictionary[Optimizer, int]] = weakref.WeakKeyDictionary()


def watch(graph: PrecisionGraph, model: nn.Module | None) -> None:
    """Has the optimizers of a model watched that trains with operators in a format of little range."""
    if model is None or not graph.context.training or model in _watched:
        return
    found = {
        f"{row} (whose range ends at {row.max:.0f})"
        for operator in graph.operators()
        for row in (operator.note.precision, operator.note.output)
        if row is not None and short(row)
    }
    if found:
        _install()
        _watched[model] = " and ".join(sorted(found))


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before_a_step)


def _before_a_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _watched:
        return
    step = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    # One that is fused with the scaling is called with gradients of any kind, and told apart which to skip.
    if step & (step - 1) or getattr(optimizer, "found_inf", None) is not None:
        return
    own = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    for model, formats in list(_watched.items()):
        gradients = [p.grad for p in model.parameters() if id(p) in own and p.grad is not None]
        if gradients and not _finite(gradients):
            del _watched[model]
            _tell(model, formats, step)


def _finite(gradients: list[torch.Tensor]) -> bool:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        by_device.setdefault(gradient.device, []).append(
            values.detach().abs().amax().float() if values.numel() else values.new_zeros(()).float()
        )
    return all(bool(torch.stack(largest).isfinite().all()) for largest in by_device.values())


def _tell(model: nn.Module, formats: str, step: int) -> None:
    warnings.warn(
        f"gradients of {type(model).__name__} are not finite in step {step} of its optimizer, which takes them into the weights. "
        f"Operators run in {formats} here, and nothing has scaled the loss: train with torch.amp.GradScaler, as under autocast, or plan "
        "fp32 for what overflows (docs/options.md#fp16-and-gradscaler)",
        PlanWarning,
        stacklevel=3,
    )
