"""Whether a module that is in no graph has run on this rank, as far as its gradients tell.

Where one process trains alone, a gradient says so. Where several ranks do, it may be the mean of what others had: with
find_unused_parameters, DistributedDataParallel gives one to parameters that this rank's pass did not reach. Autograd calls a hook where it
adds a gradient up; where one is put there, nothing does.

Invariant: with several ranks, a module of which nothing but a gradient tells that it ran has run where a backward pass of this rank's was
seen to reach it, in the step after the first one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from qsync_fx.coverage.log import Log
from qsync_fx.module_tree import own_parameters
from qsync_fx.this_process import this_process


def has_gradients(module: nn.Module) -> bool:
    """Whether a parameter of its own has a gradient."""
    return any(p.grad is not None for p in own_parameters(module))


def has_run(module: nn.Module, log: Log) -> bool:
    """Whether it is known of a module that it has run on this rank."""
    return has_gradients(module) and (module in log.reached or not _several_ranks())


def watch(modules: Iterable[nn.Module], log: Log) -> None:
    """Notes which modules the next backward pass reaches, once each."""
    for module in modules:
        for parameter in own_parameters(module):
            if parameter.requires_grad:
                _watch(module, parameter, log)


def _watch(module: nn.Module, parameter: nn.Parameter, log: Log) -> None:
    def reached(_: Any) -> None:
        handle.remove()
        log.reached.add(module)

    hooks: Any = parameter
    handle = hooks.register_post_accumulate_grad_hook(reached)


def _several_ranks() -> bool:
    return (this_process().world or 1) > 1
