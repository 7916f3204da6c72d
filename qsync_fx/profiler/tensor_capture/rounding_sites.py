"""Rounding sites: the tensors that an operator rounds in a precision, compared with FP32.

They follow from the plan that gives only this operator the precision, with the cascade: a GELU
behind a BF16 product computes in BF16, and rounds its result and its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from qsync_fx.devices.format_support import row_on
from qsync_fx.diagnostics.explanation import Explained, ReplayedPlan
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
from qsync_fx.torch_internals import OpOverload

CHOOSING: Final = frozenset(
    "relu threshold relu6 hardtanh clamp_min abs neg max_pool1d max_pool2d max_pool3d cat pad "
    "constant_pad_nd".split()
)
"""Dependent operators that select values and so do not round."""

Narrow = Mapping[fx.Node, Operator]


@dataclass(frozen=True)
class Follower:
    """An operator that the cascade narrows; `leaves` if a wider one reads its result."""

    operator: str
    fmt: Precision
    leaves: bool


def leaves(graph: PrecisionGraph, node: fx.Node, narrow: Narrow) -> bool:
    """Return whether a wider operator reads a result, directly or through non-rounding ones."""
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
    used: dict[Place, Any] = {index: argument}
    if isinstance(argument, (list, tuple)):
        used = {(index, item): element for item, element in enumerate(argument)}
    nodes = [(place, node) for place, node in used.items() if isinstance(node, fx.Node)]
    return [place for place, node in nodes if is_float(operator.graph.value(node))]


def _hands_on(operator: Operator) -> bool:
    """Return whether an operator does not round, or is random and cannot be rerun to measure it."""
    row, target = operator.row, operator.node.target
    if row is None or row.moves or row.name in CHOOSING:
        return True
    if not isinstance(target, OpOverload):
        return True
    drawn = torch.Tag.nondeterministic_seeded in target.tags
    return drawn or target._schema.is_mutable or not is_float(operator.graph.value(operator.node))


def _holds_floats(value: Any) -> bool:
    return is_float(value) or (isinstance(value, (list, tuple)) and any(map(is_float, value)))


@dataclass(frozen=True)
class Rounded:
    """A tensor that is rounded, or its gradient; `keep` has dimensions with separate scales."""

    place: Place
    fmt: Precision
    rounding: Rounding
    keep: tuple[int, ...] = ()
    gradient: bool = False

    @property
    def random(self) -> bool:
        return self.rounding == "stochastic"


@dataclass(frozen=True)
class RoundingSite:
    """Rounding of one operator in one precision.

    Attributes:
        inside: format in which it computes internally, if it rounds more than its tensors.
        places: places of the tensors with errors.
        following: operators that the cascade narrows because of this one.
        handed: format in which the gradient of the result arrives; None for FP32.
    """

    rounded: tuple[Rounded, ...] = ()
    inside: Precision | None = None
    places: frozenset[Place] = frozenset()
    following: tuple[Follower, ...] = ()
    handed: Precision | None = None

    def draws(self, most: int) -> int:
        """Return the useful number of runs: `most`, or 1 if rounding is deterministic."""
        return most if any(item.random for item in self.rounded) else 1


Changes = Mapping[str, Mapping[str, RoundingSite]]
"""By operator and precision; empty sites for precisions of 32 bits or more."""


def changes(
    part: Explained, precisions: Sequence[str], options: Options
) -> dict[str, dict[str, RoundingSite]]:
    """Return each adjustable operator's rounding site in each precision, the others in FP32."""
    result: dict[str, dict[str, RoundingSite]] = {}
    before = {str(op.id): op.precision for op in part.operators if op.kind is Kind.DEPENDENT}
    with part.context.on_target():
        for item in part.operators:
            if item.kind is not Kind.ADJUSTABLE or item.row is None:
                continue
            sites = result.setdefault(str(item.id), {})
            for name in precisions:
                if _wide(precision(name)):
                    sites[name] = RoundingSite()
                    continue
                plan = Plan("fp32", operators={str(item.id): name})
                operators = ReplayedPlan(part.snapshots, part.costing, plan).operators
                owned = next(op for op in operators if op.id == item.id)
                narrow = {
                    op.node: op
                    for op in operators
                    if op.kind is Kind.DEPENDENT and op.precision != before.get(str(op.id))
                }
                sites[name] = site = _change(owned, narrow, options)
                if owned.precision is not None and not _wide(owned.precision):
                    # An operator without this precision computes in another one.
                    sites.setdefault(owned.precision.name, site)
    return result


def _wide(fmt: Precision) -> bool:
    return fmt.plain and fmt.bits >= 32


def _change(operator: Operator, narrow: Narrow, options: Options) -> RoundingSite:
    row, fmt, out = operator.row, operator.precision, operator.output
    assert row is not None
    if fmt is None or out is None or _wide(fmt):
        return RoundingSite()
    following = tuple(
        Follower(str(op.id), op.precision, leaves(op.graph, node, narrow))
        for node, op in narrow.items()
        if op.precision is not None and op.precision.plain and not _hands_on(op)
    )
    handed = None
    if following and not leaves(operator.graph, operator.node, narrow):
        handed = out
    if fmt.plain and not row.products and not row.output_only:
        places: list[Place] = [OUTPUT]
        for index, value in enumerate(arguments(operator.node).values()):
            if index not in row.writes:
                places += floats(operator, index, value)
        return RoundingSite((), fmt, frozenset(places), following, handed)
    roundings = _plain if fmt.plain else _scaled
    rounded = tuple(roundings(operator, fmt, out, options))
    return RoundingSite(rounded, None, frozenset(item.place for item in rounded), following, handed)


def _plain(operator: Operator, fmt: Precision, out: Precision, options: Options) -> list[Rounded]:
    row, back = operator.row, options.gradient_rounding
    inputs = tuple(arguments(operator.node).values())
    assert row is not None
    result = [Rounded(OUTPUT, out, "nearest"), Rounded(OUTPUT, out, back, gradient=True)]
    if row.output_only:
        return result
    for index in row.converted(inputs):
        for place in floats(operator, index, inputs[index]):
            result += [Rounded(place, fmt, "nearest"), Rounded(place, fmt, back, gradient=True)]
    return result


def _scaled(operator: Operator, fmt: Precision, out: Precision, options: Options) -> list[Rounded]:
    row, context = operator.row, operator.graph.context
    assert row is not None
    current, lowering = row_on(context.device, fmt), context.lowerings.get(row.name)
    rounding: Rounding = options.rounding
    carrier, incoming = current.carrier, current.gradient
    result = []
    for place, role in zip(row.scaled, Role, strict=True):
        keep: tuple[int, ...] = ()
        if fmt.scaled and lowering is not None:
            dimensions = lowering.keep if options.scaling == "channel" else lowering.separate
            keep = tuple(dimensions(operator.node, role))
        result.append(Rounded(place, fmt, rounding, keep))
        if carrier.bits < 32:
            result.append(Rounded(place, carrier, options.gradient_rounding, gradient=True))
    if out.bits < 32:
        result.append(Rounded(OUTPUT, out, "nearest"))
    settings: Rounding = options.gradient_rounding if incoming.plain else rounding
    return [*result, Rounded(OUTPUT, incoming, settings, gradient=True)]
