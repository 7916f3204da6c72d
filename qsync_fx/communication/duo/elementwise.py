"""Whether an optimizer's step of a part of a parameter is that part of its step of the whole: what sharding it takes.

So it is with SGD, Adam, AdamW and most others, and not where a step looks at rows, norms or shapes (Adafactor, Muon, LAMB). It is tried,
with a few steps of random values on an optimizer of the same class and settings.

Invariant: nothing of the optimizer that is asked about changes.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qsync_fx.communication.duo import pure
from qsync_fx.errors import OptionError

ALIGNED: Final = 64
"""Values between which parts are cut: vectors of torch's kernels end there, so that what is behind the last whole one is so in both."""
_SHAPE: Final = (6, 40)
_STEPS: Final = 3


def check(optimizer: Optimizer) -> None:
    """Raises `OptionError` where parts of parameters cannot be stepped alone."""
    generator = torch.Generator().manual_seed(0)
    for at, group in enumerate(pure.settings(optimizer)):
        weights = torch.randn(_SHAPE, generator=generator)
        gradients = [torch.randn(_SHAPE, generator=generator) for _ in range(_STEPS)]
        cuts = range(0, weights.numel(), ALIGNED)
        try:
            (whole,) = _stepped(optimizer, group, [weights], [[gradient] for gradient in gradients])
            parts = _stepped(
                optimizer,
                group,
                [weights.flatten()[cut : cut + ALIGNED] for cut in cuts],
                [[gradient.flatten()[cut : cut + ALIGNED] for cut in cuts] for gradient in gradients],
            )
        except Exception as error:
            raise _no(optimizer, at, f"it takes no step of a part ({type(error).__name__}: {error})") from error
        if not torch.equal(whole.flatten(), torch.cat(parts)):
            raise _no(optimizer, at, "its step of a part of a parameter is not that part of its step of the whole")


def _no(optimizer: Optimizer, group: int, why: str) -> OptionError:
    return OptionError(
        f"{type(optimizer).__name__} cannot be sharded over ranks: {why}",
        where=f"group {group} of the optimizer",
        do="leave out sharded, or train with SGD, Adam, AdamW or another optimizer that steps each value for itself",
    )


def _stepped(
    like: Optimizer, group: dict[str, Any], weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Returns what becomes of weights under an optimizer of the same class and settings."""
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = object.__new__(type(like))
    vars(optimizer).update(vars(like))
    vars(optimizer).update(
        state=defaultdict(dict),
        param_groups=[{**pure.copied(group), "params": parameters}],
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    for step in gradients:
        for p, gradient in zip(parameters, step, strict=True):
            p.grad = gradient.clone()
        type(optimizer).step(optimizer)
    return [p.detach() for p in parameters]
