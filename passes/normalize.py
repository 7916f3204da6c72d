"""Normalization to pre-dispatch ATen: one canonical operator per function, above autograd.

Invariant: the graph computes the same loss and gradients bitwise; each value is in `meta["val"]`,
and each operator has its id. Code that cannot be retraced stays as Dynamo wrote it.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from qsync_fx.errors import PassError
from qsync_fx.graph import PrecisionGraph, node_metadata
from qsync_fx.passes.pass_base import Scope
from qsync_fx.passes.tracing.dynamo_frames import SourcePlace, place
from qsync_fx.passes.tracing.graph_cleanup import without_idle_conversions, without_needless_writes
from qsync_fx.passes.tracing.operator_ids import identify, name_inputs, numbering, remember_break
from qsync_fx.passes.tracing.retrace import current, rebuild, restored

_REWRITTEN = ("tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint", "checkpoint")
"""Higher-order operators that only call their body; later passes treat it as inlined."""


@dataclass(frozen=True)
class Normalize:
    name: ClassVar[str] = "normalize"
    scope: ClassVar[Scope] = Scope.MODEL

    def __call__(self, graph: PrecisionGraph) -> None:
        current = place(graph.context.options)
        with restored(), graph.context.fake_mode or nullcontext():  # retracing switches modes
            _normalize(graph, current)
        numbers = graph.numbers = numbering(current)
        identify(graph, numbers, current)
        remember_break(current, numbers)


def _normalize(graph: PrecisionGraph, local: SourcePlace) -> None:
    def keep(node: fx.Node, module: fx.GraphModule) -> dict[str, fx.GraphModule]:
        bodies, replaced = [], dict[str, fx.GraphModule]()
        for used in node.all_input_nodes:
            body = getattr(module, str(used.target), None)
            if used.op != "get_attr" or not isinstance(body, fx.GraphModule):
                continue
            inputs = (p.meta for p in body.graph.nodes if p.op == "placeholder")
            values = [current(meta.get("example_value", meta.get("val"))) for meta in inputs]
            inner = PrecisionGraph(body, values, graph.context, parent=graph)
            if any(value is None for value in values):
                continue
            try:
                with restored():  # a body that fails midway leaves its modes enabled
                    _normalize(inner, local)
            except PassError:
                raise  # the untraceable node comes from a user's pass
            except Exception as error:  # noqa: BLE001 - the body stays as Dynamo wrote it
                kind = type(error).__name__
                node_metadata.OPAQUE[node] = f"its body stays as Dynamo wrote it ({kind})"
                continue
            replaced[str(used.target)] = inner.module
            if str(node.target) in _REWRITTEN:
                node_metadata.CALLER[inner.nodes[-1]] = node
                bodies.append(inner)
        node_metadata.BODIES[node] = tuple(bodies)
        return replaced

    graph.module, failures = rebuild(graph.module, graph.inputs, keep)
    for failure in failures:
        graph.unknown[failure] = graph.unknown.get(failure, 0) + 1
    without_needless_writes(graph)
    without_idle_conversions(graph)
    name_inputs(graph.graph, local)
    graph.module.recompile()
