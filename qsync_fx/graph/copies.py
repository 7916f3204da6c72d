"""A copy of a precision graph, which stays as it is when the passes go on.

Invariant: the copy shares no node and no body with the original. Notes are frozen, so both hold the same ones; tensors that it
refers to are shared.
"""

from __future__ import annotations

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from qsync_fx.graph import meta
from qsync_fx.graph.graph import PrecisionGraph


def copied(graph: PrecisionGraph, parent: PrecisionGraph | None = None) -> PrecisionGraph:
    """Returns a copy of the graph and of the bodies of its higher-order operators; `parent` is the copy that it is a body in."""
    nodes: dict[fx.Node, fx.Node] = {}
    new = fx.Graph()
    found = new.graph_copy(graph.graph, nodes, return_output_node=True)
    if isinstance(found, tuple):
        result, output = found
        new.output(result).meta = dict(output.meta)
    # Lazily: the code of a copy is written when somebody runs it.
    copy = PrecisionGraph(_LazyGraphModule(graph.module, new), list(graph.inputs), graph.context, parent)
    copy.module.meta.update(graph.module.meta)
    copy.numbers = graph.numbers.copy()
    copy.unknown, copy.rewritten, copy.outputs = dict(graph.unknown), dict(graph.rewritten), list(graph.outputs)
    for old, node in nodes.items():
        before: tuple[PrecisionGraph, ...] = meta.bodies(old)
        bodies = tuple(copied(body, copy) for body in before)
        if bodies:
            meta.BODIES[node] = bodies
        for body in bodies:
            meta.CALLER[body.nodes[-1]] = node
        places = {id(body.module): inner.module for body, inner in zip(before, bodies, strict=True)}
        for used in node.all_input_nodes:
            held = getattr(graph.module, str(used.target), None) if used.op == "get_attr" else None
            if id(held) in places:
                setattr(copy.module, str(used.target), places[id(held)])
    return copy


_ATTRIBUTES = (
    "compile_subgraph_reason",
    "_param_name_to_source",
    "_backend_id",
    "torchdynamo_force_dynamic",
)
"""Dynamo's attributes of a graph module that Inductor and AOTAutograd read."""


def adopt_attributes(new: fx.GraphModule, old: fx.GraphModule) -> None:
    """Give a module the metadata and the attributes that Dynamo has written to another one."""
    new.meta.update(old.meta)
    for name in _ATTRIBUTES:
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))


def copied_module(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a module of Dynamo's, which shares its tensors and its bodies' graphs."""
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        copy = nodes[node] = graph.node_copy(node, nodes.__getitem__)
        if hasattr(node, "_dynamo_source"):
            copy._dynamo_source = node._dynamo_source
    new = fx.GraphModule(module, graph)
    adopt_attributes(new, module)
    return new
