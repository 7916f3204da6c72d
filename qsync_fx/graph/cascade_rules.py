"""Cascade rules: the format of a node as a function of its inputs' formats.

Invariant: a rule depends only on the graph as the model wrote it and is valid for every plan, so
the pass `cascade` and the predictor apply the same rules (QSync, section IV-B). Promotion follows
torch: zero-dimensional tensors do not widen.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from qsync_fx.formats import FP32, Precision, precision_of, promoted
from qsync_fx.graph import node_metadata
from qsync_fx.graph.alias_analysis import in_place, readers, result_of, writes
from qsync_fx.graph.fx_utils import format_of, function_name, is_float
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.ops import Kind
from qsync_fx.torch_internals import tree_leaves


@dataclass(frozen=True)
class Rule:
    """Rule of an operator whose precision no plan decides.

    Attributes:
        inputs: the nodes whose formats decide; empty if the precision is always `default`.
        default: the precision if no input has a format: the model's.
        promotes: whether all inputs are promoted, instead of the first input's format.
        scalars: the finite scalar arguments; a scalar beyond the range of the promoted format makes
            the precision `default`.
        named: the result format that the arguments name: `softmax(x, dtype=torch.float32)`.
        in_place: whether the operator writes to its first input, whose format the result has.
    """

    inputs: tuple[fx.Node, ...]
    default: Precision | None
    promotes: bool = False
    scalars: tuple[float, ...] = ()
    named: Precision | None = None
    in_place: bool = False

    def promotion(self, formats: Sequence[Precision | None]) -> Precision | None:
        """Return the widest of the formats of `inputs`, or the first unless `promotes`."""
        available = [item for item in formats if item is not None]
        if not available:
            return None
        return functools.reduce(promoted, available) if self.promotes else available[0]

    def precision(
        self, formats: Sequence[Precision | None]
    ) -> tuple[Precision | None, float | None]:
        """Return the precision for the formats of `inputs`, and a scalar that does not fit it."""
        widest = self.promotion(formats)
        if widest is None:
            return self.default, None
        # Models write `masked_fill(mask, torch.finfo(torch.float32).min)`.
        for scalar in self.scalars:
            if abs(scalar) > widest.max:
                return self.default, scalar
        return widest, None

    def output(self, result: Precision | None) -> Precision | None:
        """Return the format of the result for the precision `result`."""
        return self.named or result


def rule_of(graph: PrecisionGraph, node: fx.Node, automatic: bool) -> Rule:
    """Return the rule of an operator that is not adjustable.

    With `automatic`, the model's autocast regions decide, because there is no plan.
    """
    note, owned = node_metadata.NOTE[node], format_of(graph.value(node))
    row, arguments = note.row, tree_leaves((node.args, node.kwargs))
    named = next((precision_of(a) for a in arguments if isinstance(a, torch.dtype)), None)
    if row is not None and row.converts:
        like = [used for used in node.all_input_nodes if is_float(graph.value(used))]
        if named is not None or owned is None or not like:
            return Rule((), named or owned)
        return Rule((like[-1],), owned)
    if note.kind is Kind.FIXED and not in_place(node):
        # If only an autocast region narrows the operator and a plan replaces the region, it runs in
        # FP32 or wider.
        narrowed = row is not None and isinstance(note.autocast, Precision) and not automatic
        if owned is not None and narrowed:
            owned = promoted(owned, FP32)
        return Rule((), owned)
    if in_place(node):
        return Rule((writes(node)[0],), owned, named=named, in_place=True)
    inputs = [used for used in node.all_input_nodes if is_float(graph.value(used))]
    ranked = tuple(used for used in inputs if graph.value(used).dim() > 0) or tuple(inputs)
    if owned is None:
        ranked = ()
    scalars = tuple(a for a in arguments if isinstance(a, float) and math.isfinite(a))
    return Rule(ranked, owned, promotes=True, scalars=scalars, named=named)


def handed_on(graph: PrecisionGraph, node: fx.Node, automatic: bool) -> fx.Node | None:
    """Return the node whose format a node without a note passes on; None if the model decides."""
    owned = format_of(graph.value(node))
    source = next(iter(node.args), None)
    if owned is None or not isinstance(source, fx.Node):
        return None
    cast = node_metadata.CAST.get(node)
    if cast is not None and cast.policy == "lower" and not automatic:
        return source  # the plan, not the region, decides where to use fewer bits
    if (result := result_of(node)) is not None:
        return result
    unpacks = function_name(node) == "getitem" and owned == format_of(graph.value(source))
    return source if unpacks else None


def wide_readers(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """Return the operators that must compute in FP32 for a scaled operator to output FP32.

    The result is None if some reader never accepts a wide input (QSync, footnote 3).
    """
    result: list[fx.Node] = []
    for user in readers(node):
        note = node_metadata.NOTE.get(user)
        if note is None and user.op != "output":
            return None
        if note is not None and note.kind is not Kind.FIXED:
            result.append(user)
    return tuple(result)


def wants_wide(kind: Kind, result: Precision | None) -> bool:
    """Return whether a reader from `wide_readers` with precision `result` reads FP32.

    A dependent reader does if another input has widened it, independently of the scaled operator.
    """
    return result is not None and result.bits >= 32 and (kind is Kind.DEPENDENT or result.plain)
