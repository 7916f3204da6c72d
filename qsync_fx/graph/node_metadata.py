"""Node metadata: the keys of `node.meta` through which passes communicate.

Invariant: only this module names the keys. Each key has the writers and readers that its docstring
lists; its value is frozen, or a graph that later passes rewrite. A pass that learns more about an
operator replaces its `OperatorInfo` (`Operator.update`). The source of a cast is not stored,
because the graph shows it (`cast_source`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar, cast

import torch
from torch import fx

from qsync_fx.autocast_policy import Policy
from qsync_fx.formats import Precision
from qsync_fx.graph.cost_algebra import Cost
from qsync_fx.ops.spec import Kind, OperatorRow
from qsync_fx.plan.operator_id import OpId


@dataclass(frozen=True)
class OperatorInfo:
    """Facts and decisions about one operator.

    Attributes:
        id: identity, stable across graph splits, ranks and machines.
        kind: who decides the precision.
        row: row of the operator table; None for an unknown operator.
        reason: why the operator runs in `precision`, in words for users.
        planned: the precision that the plan requests; None without a plan for it.
        instead: why `precision` differs from `planned`; "" if they are equal.
        precision: the compute format; None until assigned.
        output: the format of its output; None until decided, and for outputs that are not
            floating-point tensors.
        autocast: the format in the model's autocast region, "off" if the region disables autocast,
            None outside of regions.
        pinned: set by `Operator.assign`: later passes do not override the precision.
        cost: set by annotate_cost.
        stream: random stream of its gradients' roundings; None without qsync roundings.
        computed: implementation of a lowered operator's products; None for other operators, and on
            devices without qsync kernels.
        by: the pass that inserted the operator; "" for the model's operators.
        how: "inserted", or "rewritten" if it replaces a match of a pattern.
    """

    id: OpId
    kind: Kind
    reason: str
    row: OperatorRow | None = None
    planned: Precision | None = None
    instead: str = ""
    precision: Precision | None = None
    output: Precision | None = None
    autocast: Precision | Literal["off"] | None = None
    pinned: bool = False
    cost: Cost | None = None
    stream: int | None = None
    computed: object | None = None
    by: str = ""
    how: str = "inserted"


@dataclass(frozen=True)
class Rewritten:
    """Result of a rewrite.

    Attributes:
        count: number of rewritten sites.
        left: sites that match the pattern and remain unchanged, with the reasons.
    """

    count: int = 0
    left: tuple[str, ...] = ()

    def __add__(self, other: Rewritten) -> Rewritten:
        return Rewritten(self.count + other.count, self.left + other.left)


T = TypeVar("T")


class Part(Enum):
    """Function of an inserted node: the parts of a cast, copies, and the seed."""

    CONVERT = "convert"
    ROUND = "round"
    QUANTIZE = "quantize"
    VALUES = "values"
    SCALE = "scale"
    DEQUANTIZE = "dequantize"
    COPY = "copy"
    SEED = "seed"


class Purpose(Enum):
    """Reason for a cast."""

    OPERAND = "operand"
    RESULT = "result"
    AUTOCAST = "autocast"


@dataclass(frozen=True)
class CastInfo:
    """Cast: a node that changes the format of a value.

    Attributes:
        part: function of the node.
        owner: the first operator whose operand or result it converts; None for graph outputs and
            for nodes without an operator.
        format: target format; None if the node converts no value.
        stream: random stream of its roundings; None if it does not round randomly.
        purpose: an operand of its owner, its result, or the model's autocast region.
        policy: the rule of autocast; None for other purposes.
    """

    part: Part
    owner: OpId | None
    format: Precision | None = None
    stream: int | None = None
    purpose: Purpose = Purpose.OPERAND
    policy: Policy | None = None


class CostAttribution(NamedTuple):
    """The operator that the time of a node's kernels is charged to.

    Attributes:
        owner: the id of an operator of the model, as text, which profiles store.
        part: part of a cast for that operator; None if the node is not a cast.
    """

    owner: str
    part: Part | None = None


class Key(Generic[T]):
    """Typed accessor of one metadata key."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __contains__(self, node: object) -> bool:
        return isinstance(node, fx.Node) and self.name in node.meta

    def __getitem__(self, node: fx.Node) -> T:
        return cast(T, node.meta[self.name])

    def __setitem__(self, node: fx.Node, value: T) -> None:
        node.meta[self.name] = value

    def __delitem__(self, node: fx.Node) -> None:
        node.meta.pop(self.name, None)

    def get(self, node: object) -> T | None:
        return node.meta.get(self.name) if isinstance(node, fx.Node) else None


NOTE: Final = Key[OperatorInfo]("qsync")
"""Facts of an operator; other nodes have none.

Written by `identify`, `identify_new` and `Operator.update`, read by every pass and report.
"""

CAST: Final = Key[CastInfo]("qsync_cast")
"""Marks a cast.

Written by `Casts` and the passes that insert casts or the seed; read by `lower`, the verifier and
costs.
"""

BODIES: Final = Key[tuple[Any, ...]]("qsync_bodies")
"""Graphs of a higher-order operator that the passes rewrite.

Written by normalize, read by every walk into bodies.
"""

CALLER: Final = Key[fx.Node]("qsync_called_by")
"""The higher-order operator, on the output node of its body.

Written by normalize, read by `alias_analysis.readers`.
"""

OPAQUE: Final = Key[str]("qsync_opaque")
"""Reason why a node stays as Dynamo wrote it.

Written by normalize and retrace, read by classify.
"""

REGION: Final = Key[tuple[bool, torch.dtype | None]]("qsync_region")
"""Autocast region around an opaque node: (enabled, dtype).

Written by autocast, read by `PrecisionGraph.computed`.
"""

KEPT: Final = Key[bool]("qsync_keep")
"""Marks an autocast switch that stays in the graph.

Written and read by autocast.
"""

UNLISTED: Final = Key[bool]("qsync_unlisted")
"""Marks a call with an effect that the table in `fx_utils` does not list.

Written by `mark_unlisted`.
"""

PATH: Final = Key[str]("qsync_input")
"""Path in the model of a parameter or buffer that is a graph input.

Written by normalize, read by the DAG.
"""

OURS: Final = (NOTE, CAST, BODIES, CALLER, OPAQUE, REGION, KEPT, UNLISTED, PATH)


def bodies(node: fx.Node) -> tuple[Any, ...]:
    """Return the bodies of a higher-order operator, each a `PrecisionGraph`; () for other nodes.

    The type is `Any`, because `graph` imports this module.
    """
    return BODIES.get(node) or ()


def is_cast(node: object) -> bool:
    return node in CAST


def is_part(node: object, *parts: Part) -> bool:
    result = CAST.get(node)
    return result is not None and result.part in parts


def has_purpose(node: object, purpose: Purpose) -> bool:
    result = CAST.get(node)
    return result is not None and result.purpose is purpose


def cast_source(node: fx.Node) -> fx.Node:
    """Return the node that a cast converts; for values and scale, the source of their quantizer."""
    result = node.args[0]
    while is_part(node, Part.VALUES, Part.SCALE, Part.DEQUANTIZE):
        assert isinstance(result, fx.Node)
        node, result = result, result.args[0]
    assert isinstance(result, fx.Node)
    return result


# Torch preserves this key through AOTAutograd and Inductor, on recomputed and backward nodes too.
_CARRIED: Final = "custom"


def charge(node: fx.Node, owner: OpId | str, part: Part | None = None) -> None:
    """Charge a node's kernels to an operator, as a part of a cast. See `cost_dag.charges`."""
    marks = {**(node.meta.get(_CARRIED) or {}), "qsync": str(owner)}
    marks.pop("qsync_part", None)
    if part is not None:
        marks["qsync_part"] = part.value
    node.meta[_CARRIED] = marks


def charged(node: fx.Node) -> CostAttribution | None:
    """Return the charge that a node at any stage carries itself; None if there is none."""
    marks = node.meta.get(_CARRIED) or {}
    if "qsync" not in marks:
        return None
    part = marks.get("qsync_part")
    return CostAttribution(marks["qsync"], Part(part) if part is not None else None)


def mark_as_put_in(node: fx.Node, by: str) -> None:
    """Mark a node of Dynamo's graph as inserted by the pass `by`; the mark survives retracing."""
    node.meta[_CARRIED] = {**(node.meta.get(_CARRIED) or {}), "qsync_by": by}


def put_in_by(node: fx.Node) -> str:
    """Return the name of the pass that inserted a node; "" for the model's nodes."""
    return str((node.meta.get(_CARRIED) or {}).get("qsync_by", ""))


def take_over(new: fx.Node, old: fx.Node) -> None:
    """Copy the metadata of a node of the model to the node that replaces it."""
    for key in (NOTE.name, _CARRIED, "stack_trace", "nn_module_stack", "seq_nr", "from_node"):
        if key in old.meta:
            new.meta[key] = old.meta[key]
