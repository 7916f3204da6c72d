"""The modes that nodes run in: whether gradients are recorded, and what autocast does.

Invariant: a node's modes are what executing the graph's own switches before it leaves behind. The
state of the process is restored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qsync_fx.graph import PrecisionGraph, meta
from qsync_fx.graph.effects.modes import Effect, effect_of

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Modes:
    """
    Attributes:
        grad: whether gradients are recorded.
        autocast: for each kind of device whether autocast is on, and the type that it lowers to.
    """

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def current(cls) -> Modes:
        """Returns the modes of the process."""
        found = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES)
        return cls(torch.is_grad_enabled(), found)

    def apply(self) -> None:
        """Makes these the modes of the process."""
        torch.set_grad_enabled(self.grad)
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore all state that executing a graph's switches may change."""
    before, cache, dtype = Modes.current(), torch.is_autocast_cache_enabled(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        before.apply()
        torch.set_autocast_cache_enabled(cache)
        torch.set_default_dtype(dtype)
        # `torch.use_deterministic_algorithms` would set options of Inductor, too.
        torch._C._set_deterministic_algorithms(deterministic, warn_only=warn_only)


def modes(graph: PrecisionGraph) -> dict[fx.Node, Modes]:
    """Returns the modes that each node of a graph runs in."""
    found: dict[fx.Node, Modes] = {}
    values: dict[fx.Node, Any] = {}
    with restored():
        if graph.parent is not None:
            caller = next(node for node in graph.parent.nodes if graph in meta.bodies(node))
            modes(graph.parent)[caller].apply()
        for node in graph.nodes:
            found[node] = Modes.current()
            if effect_of(node) in (Effect.GRAD, Effect.AUTOCAST):
                args = fx.node.map_arg(node.args, lambda used: values[used])
                values[node] = node.target(*args)  # type: ignore[operator]
    return found
