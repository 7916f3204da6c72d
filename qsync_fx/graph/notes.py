"""What is known of one operator: what the passes have found and decided, and what it costs.

Invariant: a note is frozen. A pass that learns more puts another in its place (`Operator.update`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from qsync_fx.graph.algebra import Cost
from qsync_fx.ops import Kind, OperatorRow
from qsync_fx.plan.opid import OpId
from qsync_fx.precision import Precision

if TYPE_CHECKING:
    from qsync_fx.backend.cuda.choose.select import Decision
    from qsync_fx.backend.cuda.problem import Problem


@dataclass(frozen=True)
class Product:
    """One product of a layer on a device that kernels may be had for, and what computes it.

    Attributes:
        name: "output", "input gradient" or "weight gradient"; "product" where its layouts do not tell.
        problem: what is computed, by which kernels are chosen.
        decision: which kernel computes it, or that torch does, and why.
    """

    name: str
    problem: Problem
    decision: Decision


@dataclass(frozen=True)
class Computed:
    """What computes a layer's products: decided once, when the layer is lowered; reports, compilation and cache keys read it.

    Attributes:
        arch: what kernels are compiled for; "" where there are none.
        products: each with its kernel; none where there are no kernels for layers like it.
        because: why torch computes all of them.
    """

    arch: str = ""
    products: tuple[Product, ...] = ()
    because: str = ""

    def __str__(self) -> str:
        if self.because:
            return f"torch computes: {self.because}"
        ours = [product.name for product in self.products if product.decision.config is not None]
        left: dict[str, list[str]] = {}
        for product in self.products:
            if product.decision.config is None:
                left.setdefault(product.decision.reason, []).append(product.name)
        clauses = [f"CUTLASS {self.arch} kernels for {', '.join(ours)}"] if ours else []
        clauses += [f"torch computes {', '.join(names)}: {reason}" for reason, names in left.items()]
        return "; ".join(clauses)


@dataclass(frozen=True)
class Note:
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
    computed: Computed | None = None
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
