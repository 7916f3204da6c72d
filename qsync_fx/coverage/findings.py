"""Parts of a plan that do not apply to a model, over all graphs compiled so far.

Findings are data. A plan's default counts only for modules given to torch.compile; entries of the
plan count everywhere. A module that runs as written in its planned format conforms to the plan.
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
from qsync_fx.plan.operator_id import OpId, escaped, module_regex
from qsync_fx.plan.plan import misfit


@dataclass(frozen=True)
class Uncovered:
    """Module with parameters that is in no compiled graph, or only in graphs that no longer run.

    Attributes:
        path, type: path and class name of the module.
        cause: why it is in no graph.
        ran: whether it has run, as far as known.
        own: format that it computes in as written; None if no plan decides on it.
        likely: operator that it would be in a graph, derived from its class name.
        planned: format in the plan; None for none.
        lost: whether it runs differently than planned.
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
        """Return the same module under another plan."""
        choice = plan.precision_for(self.likely)
        if choice is None:
            return replace(self, planned=None, lost=False)
        counts = self.ran and (choice.explicit or self.cause.why is not Reason.NOT_GIVEN)
        return replace(
            self, planned=choice.precision, lost=counts and not self.holds(choice.precision)
        )

    def holds(self, planned: Precision) -> bool:
        """Return whether the uncompiled module computes in the planned format."""
        return self.own is None or self.own is planned


@dataclass(frozen=True)
class Unused:
    """Operator or pattern of the plan that matches no operator.

    Attributes:
        entry: id of the operator, or the pattern.
        precision: its planned format.
        near: similar operators.
        inside: uncovered modules that the entry may refer to.
    """

    entry: OpId | str
    precision: Precision
    near: tuple[str, ...]
    inside: tuple[Uncovered, ...]


@dataclass(frozen=True)
class Findings:
    """Differences between a plan and its application to a model.

    Attributes:
        uncovered: modules in no compiled graph.
        unused: entries of the plan that match no operator.
        as_written: entries that match no operator, but describe modules in no graph correctly.
    """

    uncovered: tuple[Uncovered, ...]
    unused: tuple[Unused, ...]
    as_written: tuple[OpId | str, ...] = ()

    @property
    def lost(self) -> list[Uncovered]:
        """Modules that run differently than planned."""
        return [module for module in self.uncovered if module.lost]

    def __bool__(self) -> bool:
        return bool(self.lost or self.unused)


def findings(plan: Plan, decided: Iterable[OpId], modules: Sequence[Uncovered]) -> Findings:
    """Return the differences between a plan and its application.

    Args:
        plan: the plan.
        decided: adjustable operators in compiled graphs.
        modules: modules in no graph.
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
    """Return the modules of a model in no compiled graph, or only in graphs that no longer run."""
    return tuple(
        _uncovered(tree, path, module)
        for path, module in tree.parameterised.items()
        if _missing(tree, path)
    )


def in_doubt(tree: Tree) -> list[nn.Module]:
    """Return uncovered modules with gradients that may not have run on this rank."""
    return [
        module
        for path, module in tree.parameterised.items()
        if _missing(tree, path)
        and has_gradients(module)
        and cause_of(tree, path).why is Reason.NOT_CALLED
    ]


def packed(tree: Tree, frames: Sequence[Frame]) -> Findings:
    """Return findings for layers that run uncompiled because a function packs nested tensors."""
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
    """Return whether an uncovered module has run, by its gradients if the model has gradients."""
    if cause.why is Reason.NOT_CALLED:
        return False
    learns = any(p.requires_grad for p in own_parameters(module)) and tree.trained
    return has_gradients(module) if learns or cause.why is Reason.NOT_MET else True
