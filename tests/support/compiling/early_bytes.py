"""Inductor pass that runs ours and records the graphs."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from qsync_fx.backend.inductor import recompute_policy


class Graphs(CustomGraphPass):
    """Runs our pass and records its graphs."""

    def __init__(self) -> None:
        self.seen: list[fx.Graph] = []

    def __call__(self, graph: fx.Graph) -> None:
        recompute_policy.EarlyBytes()(graph)
        self.seen.append(graph)

    def uuid(self) -> Any:
        return None  # disables Inductor's caches
