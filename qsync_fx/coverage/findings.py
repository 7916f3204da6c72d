"""What of a plan is not applied to a model, over all graphs that there are so far.

Invariant: a finding is data. What a default says counts for what torch.compile was given; what the plan names counts wherever it stands.
A module that runs as written in the very format that is planned for it is as planned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from qsync_fx.coverage.causes import CoverageCause, Reason, cause_of, nested
from qsync_fx.coverage.compilation_log import Frame
from qsync_fx.coverage.module_coverage import Tree, has_gradients, stale
from qsync_fx.formats import Precision
from qsync_fx.graph.fx_utils import format_of
from qsync_fx.module_paths import joined, own_parameters
from qsync_fx.plan import Plan
from qsync_fx.plan.operator_id import OpId, escaped
from qsync_fx.plan.patterns import module_regex
from qsync_fx.plan.validation import misfit


@dataclass(frozen=True)
class Uncovered:
    """A module with parameters that no graph of ours holds, or none that still runs.

    Attributes:
        path, type: of the module.
        cause: why.
        ran: whether it has run, as far as one can know.
        own: the format that it computes in as written; None where no plan decides on it.
        likely: the operator that it would be in a graph, as far as its class is named after it.
        planned: what the plan says of it; None for nothing.
        lost: whether it runs otherwise than planned.
    """

    path: str
    type: str
    cause: CoverageCause
    ran: bool
    own: Precision | None
    likely: OpId
    planned: Precision | None = None
    lost: bool = False

    def under(self, plan: Plan) -> Uncovered:
        """Returns the same under another plan."""
        choice = plan.precision_for(self.likely)
        if choice is None:
            return replace(self, planned=None, lost=False)
        counts = self.ran and (choice.explicit or self.cause.why is not Reason.NOT_GIVEN)
        return replace(
            self, planned=choice.precision, lost=counts and not self.holds(choice.precision)
        )

    def holds(self, planned: Precision) -> bool:
        """Whether it computes in a planned format by itself."""
        return self.own is None or self.own is planned


@dataclass(frozen=True)
class Unused:
    """An operator or pattern of the plan that decides on nothing.

    Attributes:
        entry: the operator's id, or the pattern.
        precision: what it asks for.
        near: what it resembles.
        inside: the modules it may mean that are in no graph.
    """

    entry: OpId | str
    precision: Precision
    near: tuple[str, ...]
    inside: tuple[Uncovered, ...]


@dataclass(frozen=True)
class Findings:
    """
    Attributes:
        uncovered: the modules that are in no graph.
        unused: what of the plan decides on nothing.
        as_written: what of the plan decides on nothing, and is true of modules that are in no graph.
    """

    uncovered: tuple[Uncovered, ...]
    unused: tuple[Unused, ...]
    as_written: tuple[OpId | str, ...] = ()

    @property
    def lost(self) -> list[Uncovered]:
        """The modules that run otherwise than planned."""
        return [module for module in self.uncovered if module.lost]

    def __bool__(self) -> bool:
        return bool(self.lost or self.unused)


def findings(plan: Plan, decided: Iterable[OpId], modules: Sequence[Uncovered]) -> Findings:
    """Returns what of a plan is not applied.

    Args:
        plan: the plan.
        decided: the operators in graphs that a plan decides on.
        modules: those that are in no graph.
    """
    modules = tuple(module.under(plan) for module in modules)
    amiss = misfit(plan, list(decided))
    unused = [_unused(entry, precision, near, modules) for entry, precision, near in amiss.unused]
    fulfilled = [
        item
        for item in unused
        if item.inside and all(part.holds(item.precision) for part in item.inside)
    ]
    return Findings(
        modules,
        tuple(item for item in unused if item not in fulfilled),
        tuple(item.entry for item in fulfilled),
    )


def uncovered(tree: Tree) -> tuple[Uncovered, ...]:
    """Returns the modules of a model that are in no graph, or in none that still runs."""
    return tuple(
        _uncovered(tree, path, module)
        for path, module in tree.parameterised.items()
        if _missing(tree, path)
    )


def in_doubt(tree: Tree) -> list[nn.Module]:
    """Returns the modules that are in no graph and have gradients, where it is not known whether they have run on this rank."""
    return [
        module
        for path, module in tree.parameterised.items()
        if _missing(tree, path)
        and has_gradients(module)
        and cause_of(tree, path).why is Reason.NOT_CALLED
    ]


def packed(tree: Tree, frames: Sequence[Frame]) -> Findings:
    """Returns which of a model's layers run as written because one of these functions packs what they take into nested tensors."""
    causes = {frame.module(): cause for frame in frames if (cause := nested(frame)) is not None}
    result = (
        _uncovered(tree, inner, module, cause)
        for path, part in tree.modules.items()
        if (cause := causes.get(part)) is not None
        for inner, module in tree.parameterised.items()
        if inner.startswith(joined(path, "layers."))
    )
    return findings(tree.intended, tree.decided(), list(result))


def _missing(tree: Tree, path: str) -> bool:
    return path not in tree.held or any(
        stale(frame) for part in tree.above(path) for frame in tree.frames(part)
    )


def _uncovered(
    tree: Tree, path: str, module: nn.Module, cause: CoverageCause | None = None
) -> Uncovered:
    cause, kind = cause or cause_of(tree, path), type(module).__name__
    # Linear, LayerNorm, Conv2d: linear, layer_norm, conv2d.
    likely = OpId(joined(tree.within, path), re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower())
    owned = None if isinstance(module, nn.RNNBase) else format_of(list(own_parameters(module)))
    return Uncovered(path, kind, cause, _ran(tree, module, cause), owned, likely)


def _unused(
    entry: OpId | str, precision: Precision, near: tuple[str, ...], modules: Sequence[Uncovered]
) -> Unused:
    def named(path: str) -> bool:
        if isinstance(entry, OpId):
            return path == (entry.module or entry.after)
        return module_regex(entry).match(escaped(path)) is not None

    return Unused(
        entry, precision, near, tuple(module for module in modules if named(module.likely.module))
    )


def _ran(tree: Tree, module: nn.Module, cause: CoverageCause) -> bool:
    """Whether a module that is in no graph has run: by its gradients, where the model has any."""
    if cause.why is Reason.NOT_CALLED:
        return False
    learns = any(p.requires_grad for p in own_parameters(module)) and tree.trained
    return has_gradients(module) if learns or cause.why is Reason.NOT_MET else True
