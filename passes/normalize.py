"""Normalization to pre-dispatch ATen: one canonical operator per function, above autograd.

Invariant: loss and gradients equal those of Dynamo's graph bitwise. Afterwards each value is in
`meta["val"]`, each operator has its id, and higher-order operators remain, with normalized bodies.
Code that cannot be retraced stays as Dynamo wrote it and does not fail the compilation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

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
        with restored():  # retracing executes the switches of modes
            if graph.context.fake_mode is None:
                _normalize(graph, current)
            else:
                with graph.context.fake_mode:
                    _normalize(graph, current)
        numbers = graph.numbers = numbering(current)
        identify(graph, numbers, current)
        remember_break(current, numbers)


def _normalize(graph: PrecisionGraph, local: SourcePlace) -> None:
    def keep(node: fx.Node, module: fx.GraphModule) -> None:
        bodies, replaced = [], {}
        for used in node.all_input_nodes:
            body = _attribute(module, used)
            if not isinstance(body, fx.GraphModule):
                continue
            noted = [
                p.meta.get("example_value", p.meta.get("val"))
                for p in body.graph.nodes
                if p.op == "placeholder"
            ]
            values = [current(value) for value in noted]
            inner = PrecisionGraph(body, values, graph.context, parent=graph)
            if any(value is None for value in values):
                continue
            try:
                with restored():  # a body that fails midway leaves its modes enabled
                    _normalize(inner, local)
            except PassError:
                raise  # the untraceable node comes from a user's pass
            except Exception as error:  # noqa: BLE001 - the body stays as Dynamo wrote it
                node_metadata.OPAQUE[node] = (
                    f"its body stays as Dynamo wrote it ({type(error).__name__})"
                )
                continue
            replaced[used] = inner.module
            if str(node.target) in _REWRITTEN:
                node_metadata.CALLER[inner.nodes[-1]] = node
                bodies.append(inner)
        node_metadata.BODIES[node] = tuple(bodies)
        node_metadata.REPLACED[node] = replaced

    graph.module, failures = rebuild(graph.module, graph.inputs, keep)
    for failure in failures:
        graph.unknown[failure] = graph.unknown.get(failure, 0) + 1
    without_needless_writes(graph)
    without_idle_conversions(graph)
    name_inputs(graph.graph, local)
    graph.module.recompile()


def _attribute(module: fx.GraphModule, node: fx.Node) -> Any:
    return getattr(module, str(node.target), None) if node.op == "get_attr" else None
