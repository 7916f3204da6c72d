"""`plan_coverage`: the parts of a plan that run in a training model, and those that do not.

The report covers the code compiled so far, with the latest options of each module. It neither
compiles nor runs code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text
from torch import nn

from qsync_fx.coverage.compilation_log import Log, Ran, Tree, logs
from qsync_fx.coverage.findings import Findings, Reason, Uncovered, Unused, findings_of
from qsync_fx.coverage.first_step_check import unused_text
from qsync_fx.diagnostics.explanation import fit, precision_cell, uncovered_cells
from qsync_fx.errors import OptionError
from qsync_fx.html_view import HtmlView
from qsync_fx.module_paths import own_parameters, unwrapped
from qsync_fx.options import Options
from qsync_fx.plan import Plan
from qsync_fx.plan.plan import CACHED
from qsync_fx.text_tables import plain, table_of

_COLUMNS = ("operator", "kind", "precision", "output", "line", "reason")


@dataclass(frozen=True)
class AppliedModule:
    """Operators of a module in compiled code; `uncovered` if compiled code does not compute it."""

    path: str
    type: str
    operators: tuple[Ran, ...]
    uncovered: Uncovered | None


@dataclass(frozen=True)
class PlanCoverage(HtmlView):
    """Coverage of a model by compiled code, and the unapplied parts of its plan.

    Attributes:
        modules: modules with parameters or operators.
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
        table = table_of(_COLUMNS)
        for module in self.modules:
            for ran in module.operators:
                precision = precision_cell(ran.precision, ran.planned)
                cells = (str(ran.id), str(ran.kind), precision, str(ran.output or "-"))
                table.add_row(*map(Text, (*cells, ran.line, ran.reason)))
            if module.uncovered is not None:
                table.add_row(*map(Text, uncovered_cells(module.uncovered, _COLUMNS)))
        fit(table, width)
        return plain(Group(table, *map(Text, _notes(self))), width)

    def __str__(self) -> str:
        return self.table()


def _notes(applied: PlanCoverage) -> Iterator[str]:
    missing, count = applied.uncovered, len(applied.modules)
    compiled = count - len(missing)
    yield f"{applied.model}: {compiled} of {count} modules run in compiled code"
    yield from applied.unasked
    yield from map(unused_text, applied.unused)
    if not applied.called:
        yield "no part of it has run in compiled code yet"
    advice = dict.fromkeys(m.cause.advice for m in missing if _needs_advice(m, applied))
    yield from (f"to do: {text}" for text in advice if text)
    if applied.complete and (applied.planned or not missing):
        uncalled = any(module.cause.why is Reason.NOT_CALLED for module in missing)
        text = "all that is planned is applied"
        yield f"{text}, as far as the model has been called" if uncalled else text
    elif applied.complete:
        yield "no plan or precision is given: modules in no graph run as written"


def _needs_advice(module: Uncovered, applied: PlanCoverage) -> bool:
    """Return whether to advise how a module gets into a graph."""
    if module.lost or module.cause.why is Reason.NOT_MET:
        return True
    return not applied.planned and module.ran and module.cause.why is not Reason.NOT_GIVEN


def plan_coverage(model: nn.Module) -> PlanCoverage:
    """Report the parts of a model that run in compiled code, and the unapplied parts of its plan.

    Graphs exist only after the model is called, so call this after a training step.

    Args:
        model: the model, before or after torch.compile, or a module that contains or is called by
            the compiled one; `OptionError` if it is no module.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"the argument of plan_coverage is of type {type(model).__name__}, not a module",
            do="pass the model that is trained",
        )
    root = unwrapped(model)
    trees = [tree for log in logs() if (tree := Tree(root, log)).ran or tree.compiled]
    unseen = Tree(root, Log(Options()))
    # The latest log that concerns a module describes it.
    owner: dict[str, Tree] = {}
    for path in unseen.modules:
        owner[path] = next((tree for tree in reversed(trees) if tree.concerns(path)), unseen)
    results, operators, missing = {}, {}, {}
    for tree in (*trees, unseen):
        results[tree] = findings_of(tree)
        operators[tree] = tree.operators()
        missing[tree] = {module.path: module for module in results[tree].uncovered}
    modules = []
    for path, tree in owner.items():
        module, ran = unseen.modules[path], tuple(operators[tree].get(path, ()))
        why = missing[tree].get(path)
        if ran or why or own_parameters(module):
            modules.append(AppliedModule(path, type(module).__name__, ran, why))
    used = [tree for tree in trees if tree in owner.values()]
    return PlanCoverage(
        type(root).__name__,
        tuple(modules),
        tuple(entry for tree in used for entry in results[tree].unused),
        tuple(tree.plan.notes[CACHED] for tree in used if CACHED in tree.plan.notes),
        called=any(tree.ran for tree in trees),
        planned=any(tree.intended != Plan() for tree in trees),
    )
