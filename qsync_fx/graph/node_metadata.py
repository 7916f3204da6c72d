"""Node metadata: the keys of `node.meta` through which passes communicate.

Invariant: only this module names the keys. A value is frozen, or a graph that later passes rewrite.
A pass that learns more about an operator replaces its `OperatorInfo` (`Operator.update`).
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """Facts and decisions about one operator; a decision is None before it is made.

    Attributes:
        id: identity, stable across graph splits, ranks and machines.
        row: row of the operator table; None for an unknown operator.
        instead: why `precision` differs from the `planned` one; "" if they are equal.
        output: the format of a floating-point output.
        autocast: the format in the model's autocast region, "off" if the region disables autocast,
            None outside of regions.
        pinned: set by `Operator.assign`: later passes do not override the precision.
        stream: random stream of its gradients' roundings; None without qsync roundings.
        computed: implementation of a lowered operator's products; None for other operators, and on
            devices without qsync kernels.
        by, change: the pass that inserted the operator ("" for none); "inserted" or "rewritten".
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
    change: str = "inserted"


@dataclass(frozen=True)
class Rewritten:
    """Number of rewritten sites, and matching sites left unchanged, with the reasons."""

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

    The `owner` is the first operator whose operand or result it converts, if any. The target format
    is None if the node converts no value, `stream` if it does not round randomly, and `policy`, the
    rule of autocast, for other purposes.
    """

    part: Part
    owner: OpId | None
    format: Precision | None = None
    stream: int | None = None
    purpose: Purpose = Purpose.OPERAND
    policy: Policy | None = None


class CostAttribution(NamedTuple):
    """The operator that the time of a node's kernels is charged to.

    `owner` is its id as text, which profiles store; `part` is None if the node is not a cast.
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
"""Facts of an operator, by `identify`, `identify_new` and `Operator.update`."""
CAST: Final = Key[CastInfo]("qsync_cast")
"""Marks a cast. Written by `Casts` and passes; read by `lower`, the verifier and costs."""
BODIES: Final = Key[tuple[Any, ...]]("qsync_bodies")
"""Graphs of a higher-order operator that the passes rewrite. Written by normalize."""
CALLER: Final = Key[fx.Node]("qsync_called_by")
"""The higher-order operator, on the output node of its body. Written by normalize."""
OPAQUE: Final = Key[str]("qsync_opaque")
"""Reason why a node stays as Dynamo wrote it, from normalize and retrace to classify."""
REGION: Final = Key[tuple[bool, torch.dtype | None]]("qsync_region")
"""Autocast region around an opaque node, (enabled, dtype), for `PrecisionGraph.computed`."""
KEPT: Final = Key[bool]("qsync_keep")
"""Marks an autocast switch that stays in the graph, for autocast alone."""
UNLISTED: Final = Key[bool]("qsync_unlisted")
"""Marks a call with an effect that `fx_utils` does not list. Written by `mark_unlisted`."""
PATH: Final = Key[str]("qsync_input")
"""Path in the model of a parameter or buffer that is a graph input. Written by normalize."""

OURS: Final = (NOTE, CAST, BODIES, CALLER, OPAQUE, REGION, KEPT, UNLISTED, PATH)


def bodies(node: fx.Node) -> tuple[Any, ...]:
    """Return the `PrecisionGraph` of each body of a higher-order operator; () for other nodes."""
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
    """Charge a node's kernels to an operator, as a part of a cast; see `charges`."""
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
    return CostAttribution(marks["qsync"], part and Part(part))


def computes(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method", "call_module")


def charges(graph: fx.Graph) -> dict[fx.Node, CostAttribution]:
    """Return the charge of each computing node of a graph at any stage after lowering.

    A node without a mark belongs to its reader: the sum of two gradients to the operator that
    produced the value, the middle of a fused attention to the product at its end. A node without
    readers belongs to an operand. A node without a connection to an operator is missing.
    """
    nodes = [node for node in graph.nodes if computes(node)]
    result = {node: charge for node in nodes if (charge := charged(node)) is not None}

    def charge_to_neighbor(node: fx.Node, neighbors: Iterable[fx.Node]) -> None:
        near = [result[other] for other in neighbors if other in result]
        if near and node not in result:
            # Preferably an operator rather than a cast.
            owner = min(near, key=lambda charge: charge.part is not None).owner
            result[node] = CostAttribution(owner)

    available = -1
    # Repeat to a fixed point: a node charged to an operand may read constants of its own.
    while available < len(result):
        available = len(result)
        for node in reversed(nodes):
            charge_to_neighbor(node, node.users)
        for node in nodes:
            charge_to_neighbor(node, node.all_input_nodes)
    return result


def charge_all(graph: fx.Graph) -> None:
    """Charge the nodes of a graph with casts: an operator to itself, a cast to its owner.

    Other nodes belong to their neighbors. A node without a connection to an operator, such as the
    counter of a batch norm, belongs to the operator that follows it.
    """
    operators = {node: note for node in graph.nodes if (note := NOTE.get(node)) is not None}
    for node in graph.nodes:
        cast = CAST.get(node)
        if node in operators:
            charge(node, operators[node].id)
        elif cast is not None and cast.owner is not None:
            charge(node, cast.owner, cast.part)
    result = charges(graph)
    near = next((str(note.id) for note in reversed(operators.values())), None)
    for node in reversed(graph.nodes):
        if node in operators:
            near = str(operators[node].id)
        owner = getattr(result.get(node), "owner", near)
        if computes(node) and owner is not None:
            charge(node, owner, getattr(CAST.get(node), "part", None))


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
