"""The precision graph: a typed view over an fx.Graph, and what is known of its nodes.

`meta` is the contract for what passes write into a node, `notes` what they write. `nodes`, `values` and `weights` read what a node says,
`effects` what nodes do beside computing, `copies` copies a graph, and `costs` says what it costs, in terms of `algebra`.
"""

from __future__ import annotations

from qsync_fx.graph.graph import Context, PrecisionGraph
from qsync_fx.graph.operator import Operator

__all__ = ["Context", "Operator", "PrecisionGraph"]
