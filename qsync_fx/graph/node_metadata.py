"""What is known of a node beside torch's own facts: the one contract between passes, and the only file that names keys of `node.meta`.

Invariant: a key is written by one place and read by the others, as its line says; what a key holds is a frozen value, or a graph that
the passes go on to rewrite. Where a cast's operand comes from is not kept, as the graph says it: `cast_source` reads it there.

What is known of one operator: what the passes have found and decided, and what it costs.

Invariant: a note is frozen. A pass that learns more puts another in its place (`Operator.update`).
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
    """What the passes have found and decided about one operator.

    Attributes:
        id: identity, stable across graph splits, ranks and machines.
        kind: who decides the precision.
        row: what the operator table says of it; None for an operator that the table does not know.
        reason: why the operator runs in `precision`, in words a user understands.
        planned: the precision that the plan asks for; None where no plan speaks.
        instead: why it is not the planned one that it computes in; "" where it is.
        precision: the format it computes in; None until assigned. It differs from `planned` only for the reason in `instead`.
        output: the format of its output; None until known, or for outputs that are no floating-point tensors.
        autocast: the format that the model's own autocast region gives it, "off" where that disables autocast, None outside of all.
        pinned: set by `Operator.assign`: later passes do not override it.
        cost: filled in by annotate_cost.
        stream: where the roundings of its gradients draw from; None where nothing of ours is rounded.
        computed: what computes the products of a layer of ours; None for all else, and on devices that never have kernels.
        by: the pass that put the operator in; "" for the model's own.
        how: what that pass did there: "inserted", or "rewritten" where it replaced what a pattern had found.
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
    """What a rewrite has done.

    Attributes:
        count: the places that it has changed.
        left: the places that compute its pattern and were left alone, each with the reason.
    """

    count: int = 0
    left: tuple[str, ...] = ()

    def __add__(self, other: Rewritten) -> Rewritten:
        return Rewritten(self.count + other.count, self.left + other.left)


T = TypeVar("T")


class Part(Enum):
    """What a node that passes have put in does: the parts of a cast, and what goes with them."""

    CONVERT = "convert"
    ROUND = "round"
    QUANTIZE = "quantize"
    VALUES = "values"
    SCALE = "scale"
    DEQUANTIZE = "dequantize"
    COPY = "copy"
    SEED = "seed"


class Purpose(Enum):
    """Whom a cast is for."""

    OPERAND = "operand"
    RESULT = "result"
    AUTOCAST = "autocast"


@dataclass(frozen=True)
class CastInfo:
    """A node that changes in which format a value is held, and not what it stands for.

    Attributes:
        part: what the node does.
        owner: the operator whose operand or result it converts, the first of those that share it; None where no operator does.
        format: what it converts to; None for what converts nothing.
        stream: where its roundings draw from; None where nothing is rounded at random.
        purpose: an operand of its owner's, its result, or what the model's own autocast region asks for.
        policy: by which rule of autocast; None for all other purposes.
    """

    part: Part
    owner: OpId | None
    format: Precision | None = None
    stream: int | None = None
    purpose: Purpose = Purpose.OPERAND
    policy: Policy | None = None


class CostAttribution(NamedTuple):
    """Whose time the kernels of a node take.

    Attributes:
        owner: the id of an operator of the model, as text: it outlives the process in profiles.
        part: what the node does of a cast of that operator's; None where it is none.
    """

    owner: str
    part: Part | None = None


class Key(Generic[T]):
    """One fact of a node, or the lack of it."""

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
"""What is known of an operator; nodes without one are none. Written by `identify` and `Operator.update`, read by every pass and report."""

CAST: Final = Key[CastInfo]("qsync_cast")
"""That the node is a cast, and which. Written by `Casts`, `autocast` and `drawn`; read by `lower`, the verifier and costs."""

BODIES: Final = Key[tuple[Any, ...]]("qsync_bodies")
"""The graphs that a higher-order operator calls and that the passes rewrite. Written by normalize, read by whatever walks into them."""

CALLER: Final = Key[fx.Node]("qsync_called_by")
"""On the output node of a body: the higher-order operator that calls it. Written by normalize, read by `bodies.readers`."""

REPLACED: Final = Key[dict[fx.Node, Any]]("qsync_replaced")
"""Of a higher-order operator: what stood for its rewritten bodies. Written by normalize, taken by retrace, which puts it back."""

OPAQUE: Final = Key[str]("qsync_opaque")
"""Why a node stays as Dynamo wrote it. Written by normalize and retrace, read by classify."""

REGION: Final = Key[tuple[bool, torch.dtype | None]]("qsync_region")
"""The autocast region that a node is left in: (enabled, type). Written by autocast, read where values are propagated."""

KEPT: Final = Key[bool]("qsync_keep")
"""That a switch of autocast is to stay in the graph. Written and read by autocast."""

UNLISTED: Final = Key[bool]("qsync_unlisted")
"""That a call changes state which the table in `effects.modes` does not list. Written by retrace."""

PATH: Final = Key[str]("qsync_input")
"""The path in the model of a parameter or buffer that is an input. Written by normalize, read by the DAG."""

OURS: Final = (NOTE, CAST, BODIES, CALLER, REPLACED, OPAQUE, REGION, KEPT, UNLISTED, PATH)


def bodies(node: fx.Node) -> tuple[Any, ...]:
    """Return the bodies of a higher-order operator, each a `PrecisionGraph`; () for all other nodes.

    The type is not named here: graphs import this module.
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
    """Returns the node whose value a cast converts: of a scale the quantized one, too."""
    result = node.args[0]
    while is_part(node, Part.VALUES, Part.SCALE, Part.DEQUANTIZE):
        assert isinstance(result, fx.Node)
        node, result = result, result.args[0]
    assert isinstance(result, fx.Node)
    return result


# What follows an operator through AOTAutograd and Inductor: torch carries this key on, to recomputed and backward nodes too.
_CARRIED: Final = "custom"


def charge(node: fx.Node, owner: OpId | str, part: Part | None = None) -> None:
    """Says to which operator the time of a node's kernels belongs, and as which part of a cast. `charging.charges` reads it."""
    marks = {
        key: value for key, value in (node.meta.get(_CARRIED) or {}).items() if key != "qsync_part"
    }
    node.meta[_CARRIED] = {
        **marks,
        "qsync": str(owner),
        **({"qsync_part": part.value} if part is not None else {}),
    }


def charged(node: fx.Node) -> CostAttribution | None:
    """Returns what a node of whichever stage says itself of whose time it takes; None if nothing."""
    marks = node.meta.get(_CARRIED) or {}
    if "qsync" not in marks:
        return None
    part = marks.get("qsync_part")
    return CostAttribution(marks["qsync"], Part(part) if part is not None else None)


def mark_as_put_in(node: fx.Node, by: str) -> None:
    """Says that the pass called `by` has put a node into a graph of Dynamo's: retracing forgets all but what is carried on."""
    node.meta[_CARRIED] = {**(node.meta.get(_CARRIED) or {}), "qsync_by": by}


def put_in_by(node: fx.Node) -> str:
    """Returns the name of the pass that has put a node in; "" for the model's own."""
    return str((node.meta.get(_CARRIED) or {}).get("qsync_by", ""))


def take_over(new: fx.Node, old: fx.Node) -> None:
    """Lets a node stand for another one of the model's: what is known of it and carried on, and where it comes from."""
    for key in (NOTE.name, _CARRIED, "stack_trace", "nn_module_stack", "seq_nr", "from_node"):
        if key in old.meta:
            new.meta[key] = old.meta[key]
