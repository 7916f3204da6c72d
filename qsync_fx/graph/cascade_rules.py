"""How the format of a node follows from those of what it reads, as data: the rules by which precisions cascade (paper, section IV-B).

Invariant: a rule is read from a graph as the model wrote it and holds for every plan, so the pass that decides and the predictor that
foresees it apply the same one. Promotion is torch's own: tensors without dimensions do not widen.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qsync_fx.formats import FP32, Precision, precision_of, promoted
from qsync_fx.graph import node_metadata
from qsync_fx.graph.alias_analysis import in_place, readers, result_of, writes
from qsync_fx.graph.fx_utils import format_of, is_float
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.ops import Kind


@dataclass(frozen=True)
class Rule:
    """The rule of an operator whose precision no plan decides.

    Attributes:
        inputs: the nodes whose formats decide; none where the precision is `own` whatever the plan.
        own: the precision where no input has a format: the one that the model was written in.
        promotes: whether it is the promotion of all inputs, and not the format of the first.
        scalars: its finite scalar arguments; one beyond a promoted format's range keeps it in `own`.
        named: the format of the result, where the arguments name one: `softmax(x, dtype=torch.float32)`.
        in_place: whether it writes to its first input, whose format it takes.
    """

    inputs: tuple[fx.Node, ...]
    own: Precision | None
    promotes: bool = False
    scalars: tuple[float, ...] = ()
    named: Precision | None = None
    in_place: bool = False

    def promotion(self, formats: Sequence[Precision | None]) -> Precision | None:
        """Returns the widest of the formats of `inputs`; of the first, where it is that alone which decides."""
        available = [item for item in formats if item is not None]
        return (
            functools.reduce(promoted, available if self.promotes else available[:1])
            if available
            else None
        )

    def precision(
        self, formats: Sequence[Precision | None]
    ) -> tuple[Precision | None, float | None]:
        """Returns the precision, given the formats of `inputs`, and the scalar that does not fit their promotion."""
        widest = self.promotion(formats)
        if widest is None:
            return self.own, None
        # Models write `masked_fill(mask, torch.finfo(torch.float32).min)`.
        large = next((scalar for scalar in self.scalars if abs(scalar) > widest.max), None)
        return (widest, None) if large is None else (self.own, large)

    def output(self, result: Precision | None) -> Precision | None:
        """Returns the format of the result where the precision is `found`."""
        return self.named or result


def rule_of(graph: PrecisionGraph, node: fx.Node, automatic: bool) -> Rule:
    """Returns the rule of an operator that is not adjustable.

    Args:
        automatic: whether the model's own autocast regions decide, and no plan in their place.
    """
    note, owned = node_metadata.NOTE[node], format_of(graph.value(node))
    row = note.row
    if row is not None and row.converts:
        named = _named_format(node)
        like = [used for used in node.all_input_nodes if is_float(graph.value(used))]
        return (
            Rule((), named or owned)
            if named is not None or owned is None or not like
            else Rule((like[-1],), owned)
        )
    if note.kind is Kind.FIXED and not in_place(node):
        # Where only its autocast region has it narrow and a plan decides in the region's place, it is FP32 at least.
        narrowed = row is not None and isinstance(note.autocast, Precision) and not automatic
        return Rule((), promoted(owned, FP32) if owned is not None and narrowed else owned)
    named = _named_format(node)
    if in_place(node):
        return Rule((writes(node)[0],), owned, named=named, in_place=True)
    inputs = [used for used in node.all_input_nodes if is_float(graph.value(used))]
    ranked = [used for used in inputs if graph.value(used).dim() > 0] or inputs
    return Rule(
        tuple(ranked) if owned is not None else (),
        owned,
        promotes=True,
        scalars=_scalars(node),
        named=named,
    )


def handed_on(graph: PrecisionGraph, node: fx.Node, automatic: bool) -> fx.Node | None:
    """Returns the node whose format one has that is no operator: what it unpacks; None where it is what the model says."""
    owned = format_of(graph.value(node))
    source = node.args[0] if node.args else None
    if owned is None or not isinstance(source, fx.Node):
        return None
    cast = node_metadata.CAST.get(node)
    if cast is not None and cast.policy == "lower" and not automatic:
        return source  # where to compute in fewer bits is the plan's choice, against the region's
    if (result := result_of(node)) is not None:
        return result
    unpacks = getattr(node.target, "__name__", "") == "getitem"
    return source if unpacks and owned == format_of(graph.value(source)) else None


def wide_readers(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """Returns the operators that have to compute in FP32 at least for a scaled operator to give that out (paper, footnote 3).

    None: some reader takes nothing wide, whatever the plan.
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
    """Whether a reader of `wide_readers` that computes in a format wants FP32.

    Of a dependent one that is known once another of its inputs has made it wide, whatever a scaled operator gives.
    """
    return result is not None and result.bits >= 32 and (kind is Kind.DEPENDENT or result.plain)


def _named_format(node: fx.Node) -> Precision | None:
    named = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.dtype)]
    return precision_of(named[0]) if named else None


def _scalars(node: fx.Node) -> tuple[float, ...]:
    result: list[float] = []

    def look(value: Any) -> Any:
        if isinstance(value, float) and math.isfinite(value):
            result.append(value)
        return value

    fx.node.map_aggregate((node.args, node.kwargs), look)
    return tuple(result)
