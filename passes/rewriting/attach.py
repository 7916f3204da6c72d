"""Tensors that a replacement refers to become part of the graph.

Invariant: a tensor is in the graph once. One that Dynamo has handed in already keeps its input; any other is a parameter or buffer of
the graph's module, from where AOTAutograd makes it an input: each step sees its value, its gradient goes to the tensor itself, and
what is written to it stays written. A body gets it as one more operand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource

from qsync_fx.graph import PrecisionGraph, meta
from qsync_fx.graph.effects.bodies import handed_in, operands


def attached(graph: PrecisionGraph, tensor: Tensor) -> fx.Node:
    """Returns the node that holds a tensor of the user's."""
    if graph.parent is not None:
        caller = next(node for node in graph.parent.nodes if graph in meta.bodies(node))
        outer = attached(graph.parent, tensor)
        known = next((inner for inner, given in operands(caller, graph) if given is outer), None)
        return handed_in(graph, caller, outer, "attached") if known is None else known
    mode, module = graph.context.fake_mode, graph.module
    fake: Any = tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") and node.meta.get("val") is fake:
            return node
    name = _free_name(module)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(name, tensor)
    else:
        module.register_buffer(name, tensor)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.graph.inserting_before(first):
        found = graph.graph.get_attr(name)
    return _held(graph, found, fake)


def adopted(graph: PrecisionGraph, node: fx.Node, tensor: Tensor) -> fx.Node:
    """Returns the node that holds a tensor which a pass has put into the graph's module, and reads by `node`."""
    if graph.parent is not None:
        found = attached(graph, tensor)
        name, module = str(node.target), graph.module
        node.replace_all_uses_with(found)
        graph.graph.erase_node(node)
        if not any(other.op == "get_attr" and other.target == name for other in graph.nodes):
            path, _, last = name.rpartition(".")
            delattr(module.get_submodule(path), last)  # AOTAutograd would take it for a parameter of the whole graph's
        return found
    mode: Any = graph.context.fake_mode
    return _held(graph, node, tensor if mode is None else mode.from_tensor(tensor, static_shapes=True))


def _held(graph: PrecisionGraph, node: fx.Node, fake: Any) -> fx.Node:
    if hasattr(graph.module, "_param_name_to_source"):
        # AOTAutograd wants to know where Dynamo has a parameter from. Dynamo knows none of this one, and guards nothing about it.
        name, sources = str(node.target), graph.module._param_name_to_source
        graph.module._param_name_to_source = {name: ConstantSource(name), **sources}  # type: ignore[dict-item, assignment]
    node.meta["val"] = fake
    return node


def _free_name(module: torch.nn.Module) -> str:
    return next(name for at in range(2**16) if not hasattr(module, name := f"attached_{at}"))
