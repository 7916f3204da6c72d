"""A pass of Inductor's that runs ours and remembers the graphs."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from qsync_fx.backend.inductor import recompute_policy


class Graphs(CustomGraphPass):
    """Our pass, and a record of what the graphs are when it is done."""

    def __init__(self) -> None:
        self.seen: list[fx.Graph] = []

    def __call__(self, graph: fx.Graph) -> None:
        recompute_policy.EarlyBytes()(graph)
        self.seen.append(graph)

    def uuid(self) -> Any:
        return None  # nothing compiled before is taken from a cache
