"""What an operator does otherwise in a precision than in FP32: which tensors it rounds, to what and how, as data.

Invariant: it follows from the notes under the plan that gives this operator alone that precision, so that what a device, an operator or
the cascade makes of the plan is in it. Sums are rounded where a result is, and nowhere else; operators that compute in a narrow format
inside are told apart.

What the cascade makes narrow beside an operator: what follows it computes in the format that it gives out, and rounds anew.

A GELU behind a product in BF16 computes in BF16 and rounds its own result, and in the backward pass its gradient. What moves values or
chooses among them (a view, a ReLU, a pooling of maxima) has nothing to round: its result is on the grid as its input was.

Invariant: read off the notes under the plan that makes this operator alone narrow, so that what the cascade decides is in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from qsync_fx.devices.format_support import row_on
from qsync_fx.diagnostics.explanation import Explained
from qsync_fx.diagnostics.replay_passes import ReplayedPlan
from qsync_fx.formats import Precision, precision
from qsync_fx.graph import node_metadata
from qsync_fx.graph.fx_utils import arguments, is_float
from qsync_fx.graph.graph import Operator, PrecisionGraph
from qsync_fx.ops.spec import Kind, Place
from qsync_fx.options import Options
from qsync_fx.passes.lowering_registry import Role
from qsync_fx.plan.plan import Plan
from qsync_fx.profiler.tensor_capture.tensor_hooks import OUTPUT
from qsync_fx.rounding import Rounding

CHOOSING: Final = frozenset(
    "relu threshold relu6 hardtanh clamp_min abs neg max_pool1d max_pool2d max_pool3d cat pad constant_pad_nd".split()
)
"""Dependent operators whose result is on the grid where their input is, beside those that move values."""

Narrow = Mapping[fx.Node, Operator]


@dataclass(frozen=True)
class Follower:
    """
    Attributes:
        operator: its id.
        fmt: what it computes in.
        leaves: whether its result is read in a wider format, so that the gradient of that is rounded on its way in.
    """

    operator: str
    fmt: Precision
    leaves: bool


def narrowed(operators: Sequence[Operator], before: Mapping[str, Precision | None]) -> Narrow:
    """Returns the dependent operators that compute in another format than `before`, of a graph's operators under a plan."""
    return {
        op.node: op
        for op in operators
        if op.kind is Kind.DEPENDENT and op.precision != before.get(str(op.id))
    }


def followers(narrow: Narrow) -> tuple[Follower, ...]:
    """Returns those that round something."""
    return tuple(
        Follower(str(op.id), op.precision, leaves(op.graph, node, narrow))
        for node, op in narrow.items()
        if op.precision is not None and op.precision.plain and not _hands_on(op)
    )


def leaves(graph: PrecisionGraph, node: fx.Node, narrow: Narrow) -> bool:
    """Whether something that is not narrow reads a result, or what those that have nothing to round make of it."""
    for user in node.users:
        if user in narrow:
            if _hands_on(narrow[user]) and leaves(graph, user, narrow):
                return True
        elif (
            user.op == "output"
            or user in node_metadata.NOTE
            or node_metadata.bodies(user)
            or (_holds_floats(graph.value(user)) and leaves(graph, user, narrow))
        ):
            return True
    return False


def floats(operator: Operator, index: int, argument: Any) -> list[Place]:
    """Returns the places of the floating-point tensors in an argument."""
    value = operator.graph.value
    if isinstance(argument, fx.Node):
        return [index] if is_float(value(argument)) else []
    if isinstance(argument, (list, tuple)):
        return [
            (index, item)
            for item, used in enumerate(argument)
            if isinstance(used, fx.Node) and is_float(value(used))
        ]
    return []


def _hands_on(operator: Operator) -> bool:
    """Whether nothing is rounded: what is read is on the grid, and so is the result. What is drawn cannot be computed again to see."""
    row, target = operator.row, operator.node.target
    if (
        row is None
        or row.moves
        or row.name in CHOOSING
        or not isinstance(target, torch._ops.OpOverload)
    ):
        return True
    drawn = torch.Tag.nondeterministic_seeded in target.tags
    return drawn or target._schema.is_mutable or not is_float(operator.graph.value(operator.node))


def _holds_floats(value: Any) -> bool:
    return is_float(value) or (isinstance(value, (list, tuple)) and any(map(is_float, value)))


@dataclass(frozen=True)
class Rounded:
    """
    Attributes:
        place: of the operand; `OUTPUT` for the result.
        fmt: what it is rounded to.
        rounding: how.
        keep: dimensions with a scale per index.
        gradient: whether it is the gradient of what stands there that is rounded, and not that itself.
    """

    place: Place
    fmt: Precision
    rounding: Rounding
    keep: tuple[int, ...] = ()
    gradient: bool = False

    @property
    def random(self) -> bool:
        """Whether what it errs by is drawn."""
        return self.rounding == "stochastic"


@dataclass(frozen=True)
class RoundingSite:
    """
    Attributes:
        rounded: the tensors that are rounded.
        inside: the format that it computes in throughout, where rounding its tensors is not all that happens.
        places: of the tensors that are not what they were.
        following: the operators that compute in another format because this one does.
        handed: what the gradient of the result is in already when it gets there; None where it is FP32.
    """

    rounded: tuple[Rounded, ...] = ()
    inside: Precision | None = None
    places: frozenset[Place] = frozenset()
    following: tuple[Follower, ...] = ()
    handed: Precision | None = None

    @property
    def random(self) -> bool:
        """Whether something of it is drawn."""
        return any(item.random for item in self.rounded)


Changes = Mapping[str, Mapping[str, RoundingSite]]
"""By operator and precision. In a precision of 32 bits or more nothing changes."""


def changes(
    part: Explained, precisions: Sequence[str], options: Options
) -> dict[str, dict[str, RoundingSite]]:
    """Returns what each adjustable operator of a graph does otherwise in each precision, where all others compute in FP32."""
    result: dict[str, dict[str, RoundingSite]] = {}
    before = {str(op.id): op.precision for op in part.operators if op.kind is Kind.DEPENDENT}
    with part.context.there():
        for item in part.operators:
            if item.kind is not Kind.ADJUSTABLE or item.row is None:
                continue
            for name in precisions:
                if _wide(precision(name)):
                    result.setdefault(str(item.id), {})[name] = RoundingSite()
                    continue
                plan = Plan("fp32", operators={str(item.id): name})
                operators = ReplayedPlan(part.snapshots, part.costing, plan).operators
                owned = next(op for op in operators if op.id == item.id)
                result.setdefault(str(item.id), {})[name] = _change(
                    owned, narrowed(operators, before), options
                )
    return result


def _wide(fmt: Precision) -> bool:
    return fmt.plain and fmt.bits >= 32


def _change(operator: Operator, narrow: Narrow, options: Options) -> RoundingSite:
    row, fmt, out = operator.row, operator.precision, operator.output
    assert row is not None
    if fmt is None or out is None or _wide(fmt):
        return RoundingSite()
    following = followers(narrow)
    handed = None if not following or leaves(operator.graph, operator.node, narrow) else out
    if fmt.plain and not row.products and not row.output_only:
        places = [
            p
            for index, value in enumerate(_given(operator))
            if index not in row.writes
            for p in floats(operator, index, value)
        ]
        return RoundingSite(
            inside=fmt, places=frozenset([*places, OUTPUT]), following=following, handed=handed
        )
    rounded = tuple(
        _plain(operator, fmt, out, options) if fmt.plain else _scaled(operator, fmt, out, options)
    )
    return RoundingSite(rounded, None, frozenset(item.place for item in rounded), following, handed)


def _plain(operator: Operator, fmt: Precision, out: Precision, options: Options) -> list[Rounded]:
    """What torch's own operator rounds, on converted operands."""
    row, inputs, back = operator.row, _given(operator), options.gradient_rounding
    assert row is not None
    result = [Rounded(OUTPUT, out, "nearest"), Rounded(OUTPUT, out, back, gradient=True)]
    if row.output_only:
        return result
    for index in row.converted(inputs):
        for place in floats(operator, index, inputs[index]):
            result += [Rounded(place, fmt, "nearest"), Rounded(place, fmt, back, gradient=True)]
    return result


def _scaled(operator: Operator, fmt: Precision, out: Precision, options: Options) -> list[Rounded]:
    """What a lowered operator rounds."""
    row, context = operator.row, operator.graph.context
    assert row is not None
    current, lowering = row_on(context.device, fmt), context.lowerings.get(row.name)
    rounding: Rounding = options.rounding
    carrier, incoming = current.carrier, current.gradient
    result = []
    for place, role in zip(row.scaled, Role, strict=True):
        keep: tuple[int, ...] = ()
        if fmt.scaled and lowering is not None:
            keep = tuple(
                (lowering.keep if options.scaling == "channel" else lowering.separate)(
                    operator.node, role
                )
            )
        result.append(Rounded(place, fmt, rounding, keep))
        if carrier.bits < 32:
            result.append(Rounded(place, carrier, options.gradient_rounding, gradient=True))
    if out.bits < 32:
        result.append(Rounded(OUTPUT, out, "nearest"))
    settings: Rounding = options.gradient_rounding if incoming.plain else rounding
    return [*result, Rounded(OUTPUT, incoming, settings, gradient=True)]


def _given(operator: Operator) -> tuple[Any, ...]:
    return tuple(arguments(operator.node).values())
