"""`plan_coverage`: the parts of a plan that run in a training model, and those that do not.

The report covers the code compiled so far, with the latest options of each module. It neither
compiles nor runs code.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from qsync_fx.coverage.causes import Reason
from qsync_fx.coverage.compilation_log import Log, Ran, logs
from qsync_fx.coverage.findings import Findings, Uncovered, Unused, findings, uncovered
from qsync_fx.coverage.module_coverage import Tree
from qsync_fx.errors import OptionError
from qsync_fx.module_paths import own_parameters, unwrapped
from qsync_fx.options import Options
from qsync_fx.plan import Plan
from qsync_fx.plan.plan import CACHED


@dataclass(frozen=True)
class AppliedModule:
    """One module.

    Attributes:
        path: its path in the model.
        type: its class name.
        operators: its operators in compiled code.
        uncovered: why compiled code does not, or no longer, compute it; None if it does.
    """

    path: str
    type: str
    operators: tuple[Ran, ...]
    uncovered: Uncovered | None


@dataclass(frozen=True)
class PlanCoverage:
    """Coverage of a model by compiled code, and the unapplied parts of its plan.

    Attributes:
        model: name of its class.
        modules: modules with parameters or operators.
        unused: operators and patterns of plans without effect.
        unasked: notes on plans that were selected automatically from a cached profile.
        called: whether Dynamo has processed a call of the model, compiled or skipped.
        planned: whether there is a plan or a precision; without one no module is `lost`.
    """

    model: str
    modules: tuple[AppliedModule, ...]
    unused: tuple[Unused, ...]
    unasked: tuple[str, ...] = ()
    called: bool = True
    planned: bool = True

    @property
    def operators(self) -> list[Ran]:
        """All operators in compiled code."""
        return [ran for module in self.modules for ran in module.operators]

    @property
    def uncovered(self) -> list[Uncovered]:
        """Modules with parameters that no compiled code computes, with reasons."""
        return [module.uncovered for module in self.modules if module.uncovered is not None]

    @property
    def complete(self) -> bool:
        """Whether all code that has run applies the full plan; False before the first call."""
        waiting = any(module.cause.why is Reason.NOT_MET for module in self.uncovered)
        return self.called and not waiting and not Findings(tuple(self.uncovered), self.unused)

    def table(self, width: int | None = None) -> str:
        """Return the table that `print` shows, fitted to `width` if given."""
        from qsync_fx.diagnostics.explanation_table import coverage_text

        return coverage_text(self, width)

    def __str__(self) -> str:
        return self.table()


def plan_coverage(model: nn.Module) -> PlanCoverage:
    """Report the parts of a model that run in compiled code, and the unapplied parts of its plan.

    Graphs exist only after the model is called, so call this after a training step.

    Args:
        model: the model, before or after torch.compile, or a module that contains or is called by
            the compiled one.

    Raises:
        OptionError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"plan_coverage takes a module, not {type(model).__name__}",
            do="give the model that is trained",
        )
    root = unwrapped(model)
    trees = [tree for log in logs() if (tree := Tree(root, log)).ran or tree.compiled]
    unseen = Tree(root, Log(Options()))
    owner = {
        path: next((tree for tree in reversed(trees) if tree.concerns(path)), unseen)
        for path in unseen.modules
    }
    result = {id(tree): _findings(tree) for tree in (*trees, unseen)}
    operators = {id(tree): tree.operators() for tree in trees}
    missing = {
        (id(tree), module.path): module
        for tree in (*trees, unseen)
        for module in result[id(tree)].uncovered
    }
    modules = (
        AppliedModule(
            path,
            type(unseen.modules[path]).__name__,
            tuple(operators.get(id(tree), {}).get(path, ())),
            missing.get((id(tree), path)),
        )
        for path, tree in owner.items()
    )
    used = {id(tree) for tree in owner.values()}
    return PlanCoverage(
        type(root).__name__,
        tuple(
            module
            for module in modules
            if module.operators or module.uncovered or own_parameters(unseen.modules[module.path])
        ),
        tuple(entry for tree in trees if id(tree) in used for entry in result[id(tree)].unused),
        tuple(
            tree.plan.notes[CACHED]
            for tree in trees
            if id(tree) in used and CACHED in tree.plan.notes
        ),
        called=any(tree.ran for tree in trees),
        planned=any(tree.intended != Plan() for tree in trees),
    )


def _findings(tree: Tree) -> Findings:
    plan = tree.intended if tree.ran or tree.compiled else Plan()
    return findings(plan, tree.decided(), uncovered(tree))
