"""Gives every operator its identity.

Invariant: an `OpId` depends on the model's source alone. Module paths come from `nn_module_stack`, which names the user's modules
whatever Dynamo, DDP's graph splits or a rank call their nodes; occurrences are counted on through all graphs of one compilation, so
that an operator has one id whether DDP splits the graph or not.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext

from qsync_fx.graph import Note, PrecisionGraph, is_float, tensors
from qsync_fx.opid import OpId
from qsync_fx.ops import Kind, row_for

_SUBSCRIPT = re.compile(r"\[['\"]?([^\]'\"]*)['\"]?\]")
_WRAPPERS = {"_parameters", "_buffers", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@dataclass
class Numbering:
    """How many operators of each name each module has shown so far, and which module came last."""

    seen: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    last: str = ""

    def number(self, module: str, operator: str) -> OpId:
        after = "" if module else self.last
        if module:
            self.last = module
        key = (module, operator, after)
        self.seen[key] += 1
        return OpId(module, operator, self.seen[key] - 1, after)


_numberings: weakref.WeakKeyDictionary[TracingContext, Numbering] = weakref.WeakKeyDictionary()


def numbering() -> Numbering:
    """Returns the numbering of the compilation under way: DDP's buckets are compiled one by one, in one tracing context."""
    context = TracingContext.try_get()
    return Numbering() if context is None else _numberings.setdefault(context, Numbering())


def identify(graph: PrecisionGraph, numbers: Numbering) -> None:
    """Writes a note with an id to every node that computes floating-point values or is an operator."""
    for node in graph.nodes:
        for body in node.meta.get("qsync_bodies", ()):
            identify(body, numbers)
        if node.op != "call_function" and node.op != "call_method":
            continue
        if (
            not any(is_float(t) for t in tensors(graph.value(node)))
            or getattr(node.target, "__name__", "") == "getitem"
        ):
            continue
        row = row_for(node.target)
        node.meta["qsync"] = Note(
            id=numbers.number(module_path(node), row.name if row else _operator_name(node)),
            kind=row.kind if row else Kind.FIXED,
            reason="",
            row=row,
        )
        node.meta["custom"] = {**node.meta.get("custom", {}), "qsync": str(node.meta["qsync"].id)}


def module_path(node: fx.Node) -> str:
    """Returns the path of the innermost module that a node belongs to, as state_dict spells it; "" outside any."""
    stack: dict[str, tuple[str, Any]] | None = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return clean_path(path)


def clean_path(path: str) -> str:
    """Turns Dynamo's spelling of a module, `L['self']._modules['fc'][0]`, into state_dict's, `fc.0`."""
    if path.startswith(("L[", "G[")):
        path = path.partition("]")[2]
    path = _SUBSCRIPT.sub(r".\1", path)
    parts = [part for part in path.split(".") if part and part not in ("_modules", *_WRAPPERS)]
    return ".".join(parts)


def name_inputs(graph: fx.Graph) -> None:
    """Names inputs as the model does: `layer1_conv_weight` rather than `l_self_modules_layer1_modules_conv_parameters_weight_`."""
    for node in graph.nodes:
        source = getattr(node, "_dynamo_source", None)
        if node.op != "placeholder" or source is None:
            continue
        text = source.name() if callable(source.name) else source.name
        name = re.sub(r"\W+", "_", clean_path(text) or text.partition("[")[2]).strip("_")
        if name and not name[0].isdigit():
            node._rename(name)


def _operator_name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.partition("::")[2]
    return re.sub(r"\W", "_", getattr(node.target, "__name__", str(node.target)))
