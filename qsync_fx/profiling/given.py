"""What is given to be measured, checked before anything runs.

Invariant: an optimizer that comes out of here updates the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qsync_fx.errors import OptionError, ProfileError
from qsync_fx.module_tree import unwrapped
from qsync_fx.options import Options

GivenOptimizer = Optimizer | Callable[[list[Tensor]], Optimizer]
"""One of the model's parameters, or what makes one of them."""

_ONE: Final = "optimizer=torch.optim.SGD(model.parameters(), lr=0.1)"


def checked(model: nn.Module, rounds: int, options: Mapping[str, object]) -> nn.Module:
    """Returns the module that is to be measured, without what wraps it.

    Raises:
        OptionError: it is no module, or not to be measured so often, or under these options.
        ProfileError: it does not lie on one device that is at hand.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"measure takes a module, not {type(model).__name__}", do="give the model that is trained")
    if rounds < 1:
        raise OptionError(f"a plan cannot be measured {rounds} times", where="rounds", do="give 1 or more")
    given = Options.parse(options)
    if given.where_faster:
        raise OptionError(
            "operators are measured in every format, which is how it is found where which one is faster",
            where='option "where_faster"',
            do="leave the option out; a plan that is found from the profile keeps what is as fast in a wider format",
        )
    if (inner := given.inner) != "inductor":
        raise OptionError(
            f"operators are timed in the code that Inductor writes, and {inner!r} writes none",
            where='option "inner"',
            do="leave the option out",
        )
    module = unwrapped(model)
    devices = sorted({str(p.device) for p in module.parameters()})
    if len(devices) != 1 or torch.device(devices[0]).type not in ("cpu", "cuda"):
        raise ProfileError(
            "a model is measured on the CPU, or on one GPU",
            where=f"parameters on {', '.join(devices) or 'no device'}",
            do='move the model there, or take a device of the catalog: qsync_fx.devices.get("t4")',
        )
    return module


def optimizer_of(model: nn.Module, given: GivenOptimizer | None) -> Optimizer | None:
    """Returns the optimizer that was given, or that what was given makes of the model's parameters; None for none.

    Warns of parameters in it that are not the model's: no graph tells of their memory.

    Raises:
        OptionError: it is no optimizer, or updates no parameter of the model.
    """
    if given is None:
        return None
    found: Any = given
    if callable(given) and not isinstance(given, Optimizer | nn.Module):
        found = given([parameter for parameter in model.parameters() if parameter.requires_grad])
    if not isinstance(found, Optimizer):
        what = f"what updates the model is a torch.optim.Optimizer, and not of type {type(found).__name__}"
        raise OptionError(what, where="optimizer", do=f"write {_ONE}, or give what makes one of a list of parameters")
    name, own = type(found).__name__, {id(parameter) for parameter in model.parameters()}
    updated = [parameter for group in found.param_groups for parameter in group["params"]]
    strange = [parameter for parameter in updated if id(parameter) not in own]
    if len(strange) == len(updated):
        what = f"the optimizer, {name}, updates no parameter of the model, a {type(model).__name__}"
        raise OptionError(what, where="optimizer", do=f"make it of this model's parameters: {_ONE}")
    if strange:
        count = sum(parameter.numel() for parameter in strange)
        what = f"{len(strange)} of {len(updated)} parameters that {name} updates, {count} numbers, are not the model's"
        warnings.warn(f"{what}: what is foreseen of memory is without them", stacklevel=3)
    return found
