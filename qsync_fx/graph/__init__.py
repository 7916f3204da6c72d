"""The precision graph: a typed view over an fx.Graph, and analyses of it.

`graph` has `PrecisionGraph`, its `Operator` handles and the `Context` of a compilation; start
there. `node_metadata` defines the facts that passes record on nodes. `operand_formats`,
`cascade_rules` and `alias_analysis` have the rules for formats, cascades and cast sharing.
`saved_tensors`, `operator_costs` and `cost_dag` compute costs, in terms of `cost_algebra`;
`fx_utils` has helpers for nodes.
"""

from __future__ import annotations

from qsync_fx.graph.graph import Context, Operator, PrecisionGraph

__all__ = ["Context", "Operator", "PrecisionGraph"]
