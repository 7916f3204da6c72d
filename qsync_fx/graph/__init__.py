"""The precision graph: a typed view over an fx.Graph, and what is known of its nodes.

`meta` is the contract for what passes write into a node, `notes` what they write. `nodes`, `values` and `weights` read what a node says,
`effects` what nodes do beside computing, `copies` copies a graph, and `costs` says what it costs, in terms of `algebra`.

What operators and casts cost: what flows where, what is kept, and the DAG that all of it is given out as.

What nodes do beside computing a value: switch modes (`modes`), write (`writes`), share memory (`memory`), call a graph (`bodies`).

`sharing` follows from it: how far one cast is shared.
"""

from __future__ import annotations

from qsync_fx.graph.graph import Context, Operator, PrecisionGraph

__all__ = ["Context", "Operator", "PrecisionGraph"]
