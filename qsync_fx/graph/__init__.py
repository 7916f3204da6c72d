"""The precision graph: a typed view over an fx.Graph, and analyses of it.

`graph.PrecisionGraph` and its `Operator` handles are the start. `node_metadata` has the facts that
passes record on nodes; `operand_formats`, `cascade_rules` and `alias_analysis` the rules for
formats, cascades and shared casts; `saved_tensors` and `operator_costs` the costs.
"""

from __future__ import annotations

from qsync_fx.graph.graph import Context, Operator, PrecisionGraph

__all__ = ["Context", "Operator", "PrecisionGraph"]
