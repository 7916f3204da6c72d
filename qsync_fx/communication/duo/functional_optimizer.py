"""An optimizer as a function of parameters, state, gradients and settings.

Its step can be repeated under recorded settings (the values of its parameter groups, such as
learning rate and weight decay) or rolled back. Invariant: a restored state has the same tensors.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qsync_fx.errors import OptionError

Settings = list[dict[str, Any]]
_PARAMETERS: Final = "params"
_SCALING: Final = ("grad_scale", "found_inf")
"""Attributes that a GradScaler sets on an optimizer that unscales gradients itself."""


def checked(optimizer: object, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return the optimizer, if its step is a function of these parameters, state and gradients."""
    description, subject = None, type(optimizer).__name__
    step = getattr(type(optimizer), "step", None)
    closure = step and inspect.signature(step).parameters.get("closure")
    requires_closure = closure and closure.default is inspect.Parameter.empty
    if not isinstance(optimizer, Optimizer) or "_optimizer_step_pre_hooks" not in vars(optimizer):
        description = f"DUO requires a torch.optim.Optimizer for its two steps, not {subject}"
        do = "pass the torch.optim.Optimizer itself, without a wrapper, as optimizer=..."
    elif type(optimizer).__module__.startswith("torch.distributed"):
        description = f"{subject} communicates with other ranks in its step, which DUO runs twice"
        do = "pass the inner optimizer of all parameters"
    elif requires_closure:
        description = f"a step of {subject} requires a closure, which DUO cannot repeat"
        do = "use SGD, Adam, AdamW or another optimizer without a closure, or a codec without DUO"
    if description is not None:
        raise OptionError(description, where="compress(..., optimizer=...)", do=do)
    assert isinstance(optimizer, Optimizer)
    owned = {
        id(p): f"parameter {index} of group {position}"
        for position, group in enumerate(optimizer.param_groups)
        for index, p in enumerate(group[_PARAMETERS])
    }
    theirs = {id(p): name for name, p in named}
    for current, existing, whose in (
        (owned, theirs, "the optimizer has parameters that the model does not train"),
        (theirs, owned, "the model trains parameters that the optimizer does not have"),
    ):
        if missing := [name for key, name in current.items() if key not in existing]:
            text = f"{whose}: they would get no gradients, or none in full precision"
            where = f"{', '.join(missing[:3])} ({len(missing)} in total)"
            do = "create the optimizer with exactly the trained parameters of the model"
            raise OptionError(text, where=where, do=do)
    return optimizer


def described(optimizer: Optimizer) -> list[str]:
    """Return class and settings as text, equal on ranks whose optimizers are equal."""
    lines = [type(optimizer).__name__]
    for index, group in enumerate(optimizer.param_groups):
        names = [name for name in group if name not in (_PARAMETERS, "param_names")]
        values = ", ".join(f"{name}={group[name]!r}" for name in names)
        lines.append(f"group {index} of {len(group[_PARAMETERS])}: {values}")
    return lines


def settings(optimizer: Optimizer) -> Settings:
    """Return a copy of the parameter groups without parameters."""
    return [
        {name: copied(value) for name, value in group.items() if name != _PARAMETERS}
        for group in optimizer.param_groups
    ]


@contextlib.contextmanager
def under(optimizer: Optimizer, recorded: Settings) -> Iterator[None]:
    """Activate recorded settings; settings that the block changes stay changed."""
    present = settings(optimizer)
    _put(optimizer, recorded)
    try:
        yield
    finally:
        for now, before, after in zip(present, recorded, settings(optimizer), strict=False):
            now |= {
                name: value
                for name, value in after.items()
                if name in before and not torch.as_tensor(value == before[name]).all()
            }
        _put(optimizer, present)


@contextlib.contextmanager
def scaled_by(optimizer: Optimizer, scale: Tensor | None) -> Iterator[None]:
    """Let an optimizer that unscales gradients itself use this scale; None for unscaled."""
    present = {name: getattr(optimizer, name) for name in _SCALING if hasattr(optimizer, name)}
    scaling = {}
    if scale is not None:
        scaling = dict(zip(_SCALING, (scale, torch.zeros_like(scale)), strict=True))
    _set(optimizer, scaling)
    try:
        yield
    finally:
        _set(optimizer, present)


def scaling(optimizer: Optimizer) -> tuple[Tensor | None, bool]:
    """Return the scale for the optimizer to remove, and whether a GradScaler found an infinity."""
    scale, infinite = (getattr(optimizer, name, None) for name in _SCALING)
    if scale is not None:
        scale = torch.as_tensor(scale).clone()
    return scale, infinite is not None and bool(infinite)


def copied(value: Any) -> Any:
    """Return a copy that shares no tensor with `value`."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: copied(item) for name, item in value.items()}
    return copy.deepcopy(value)


def _put(optimizer: Optimizer, groups: Settings) -> None:
    for group, values in zip(optimizer.param_groups, groups, strict=False):
        for name, value in values.items():
            group[name] = restored(group.get(name), value)


def _set(optimizer: Optimizer, attributes: Mapping[str, Tensor]) -> None:
    for name in _SCALING:
        if name in attributes:
            setattr(optimizer, name, attributes[name])
        elif name in vars(optimizer):
            delattr(optimizer, name)


def restored(
    now: Any,
    before: Any,
    new: Callable[[Any], Any] = lambda value: value,
    non_blocking: bool = False,
) -> Any:
    """Return `before`, written into the tensors and dictionaries of `now` if they match.

    `new` returns the replacement of each tensor or other value that is not written.
    """
    if isinstance(now, Tensor) and isinstance(before, Tensor):
        if (now.shape, now.dtype) == (before.shape, before.dtype):
            with torch.no_grad():
                return now.copy_(before, non_blocking=non_blocking)
    elif isinstance(before, Mapping):
        result = now if isinstance(now, dict) else {}
        for name in [name for name in result if name not in before]:
            del result[name]
        for name, value in before.items():
            result[name] = restored(result.get(name), value, new, non_blocking)
        return result
    return new(before)


ALIGNED: Final = 64
"""Alignment of shards in values: vectors of torch's kernels end there, with and without shards."""
_SHAPE: Final = (6, 40)
_STEPS: Final = 3


def check(optimizer: Optimizer) -> None:
    """Raise `OptionError` if a step on shards differs from the shards of a full step.

    Optimizers that use rows, norms or shapes do not pass: Adafactor, Muon, LAMB.
    """
    generator = torch.Generator().manual_seed(0)
    for index, group in enumerate(settings(optimizer)):
        weights = torch.randn(_SHAPE, generator=generator)
        gradients = [torch.randn(_SHAPE, generator=generator) for _ in range(_STEPS)]
        shards = [torch.split(gradient.flatten(), ALIGNED) for gradient in gradients]
        try:
            (full,) = _stepped(optimizer, group, [weights], [[gradient] for gradient in gradients])
            parts = _stepped(optimizer, group, torch.split(weights.flatten(), ALIGNED), shards)
            is_elementwise, cause = torch.equal(full.flatten(), torch.cat(parts)), None
        except Exception as error:  # noqa: BLE001  an optimizer of the user may raise anything
            is_elementwise, cause = False, error
        if not is_elementwise:
            name, why = type(optimizer).__name__, "is not the shard of a full step"
            if cause is not None:
                why = f"fails ({cause!r})"
            text = f"{name} cannot be sharded over ranks: its step on a shard {why}"
            do = "remove sharded=..., or use an elementwise optimizer such as SGD or AdamW"
            raise OptionError(text, where=f"group {index} of the optimizer", do=do) from cause


def _stepped(
    like: Optimizer,
    group: dict[str, Any],
    weights: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """Return the weights after steps of an optimizer with the class and settings of `like`."""
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = object.__new__(type(like))
    vars(optimizer).update(vars(like))
    vars(optimizer).update(
        state=defaultdict(dict),
        param_groups=[{**copied(group), "params": parameters}],
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    for step in gradients:
        for p, gradient in zip(parameters, step, strict=True):
            p.grad = gradient.clone()
        type(optimizer).step(optimizer)
    return [p.detach() for p in parameters]
