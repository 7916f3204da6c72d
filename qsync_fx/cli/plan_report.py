"""Report of `qsync plan`: tables or JSON of a plan and its comparisons.

Invariant: the written plan is the one that was shown last.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qsync_fx.cli import output, plan_inputs
from qsync_fx.errors import OptionError, QSyncError, shown
from qsync_fx.progress import progress

if TYPE_CHECKING:
    from qsync_fx.allocator.analysis import AllocatorComparison, ParetoFront, SingleChange
    from qsync_fx.allocator.plan_result import Allocator, PlanResult, Trial
    from qsync_fx.cli.plan_inputs import PlanInputs


def changes(arguments: argparse.Namespace) -> dict[str, str]:
    result: dict[str, str] = {}
    for text in arguments.set:
        operator, equals, fmt = text.rpartition("=")
        if not equals or not operator:
            raise OptionError(
                f"{shown(text)} contains no format", where="--set", do="write OP=FORMAT"
            )
        result[operator] = fmt
    return result


def allocator(arguments: argparse.Namespace, available: PlanInputs) -> Allocator | str:
    if arguments.allocator == "hessian":
        return _hessian(arguments.hessian or "", available)
    return str(arguments.allocator)


@dataclass(frozen=True)
class PlanReport:
    """Plan with the analyses that the command line requests.

    Attributes:
        arguments: the command line.
        inputs: profiles, cluster and sensitivities of the plan.
        answer: result of the planner.
        changes: formats to try, by operator or pattern.
    """

    arguments: argparse.Namespace
    inputs: PlanInputs
    answer: PlanResult
    changes: Mapping[str, str]

    def show(self) -> None:
        from qsync_fx.allocator.analysis import selected, single_change, what_if

        answer, arguments = self.answer, self.arguments
        explained = [
            item
            for chosen in arguments.explain
            for item in selected(answer, chosen, arguments.device)
        ]
        steps = [
            single_change(answer, operator, arguments.device)
            for operator in dict.fromkeys(explained)
        ]
        changed = what_if(answer, self.changes, arguments.device) if self.changes else None
        compared = self._compared() if arguments.compare or arguments.hessian is not None else []
        front = self._front() if arguments.pareto is not None else None
        if arguments.json:
            output.as_json(as_json(answer, steps, changed, compared, front))
        else:
            self._tables(steps, changed, compared, front)
        if front is not None and arguments.pareto:
            from qsync_fx.allocator.pareto_svg import save_front

            save_front(front, arguments.pareto)
            output.wrote(arguments.pareto)
        if arguments.output is not None:
            (changed or answer).save(arguments.output)
            output.wrote(arguments.output)

    def _tables(
        self,
        steps: Sequence[Sequence[SingleChange]],
        changed: PlanResult | None,
        compared: Sequence[AllocatorComparison],
        front: ParetoFront | None,
    ) -> None:
        from qsync_fx.allocator.analysis import (
            changes_table,
            comparison_table,
            front_table,
            steps_table,
        )
        from qsync_fx.allocator.plan_result import answer_table

        output.show(answer_table(self.answer))
        for item in steps:
            output.show(steps_table(item))
        if changed is not None:
            output.show(changes_table(self.answer, changed))
        if compared:
            output.show(comparison_table(compared))
        if front is not None:
            output.show(front_table(front))

    def _compared(self) -> list[AllocatorComparison]:
        from qsync_fx.allocator.analysis import compare, side_by_side

        problem = self.answer.problem
        more: list[Allocator] = []
        try:
            from qsync_fx.allocator.baselines import DynamicBatches

            more.append(DynamicBatches(plan_inputs.resizer(self.inputs, problem)))
        except QSyncError as error:
            output.note(f"the comparison omits dynamic batches: {error.what}")
        if self.arguments.hessian is not None:
            more.append(_hessian(self.arguments.hessian, self.inputs))
        allocators = side_by_side(problem, more)
        with progress("allocators", len(allocators)) as done:
            return compare(problem, allocators, done)

    def _front(self) -> ParetoFront:
        from qsync_fx.allocator.analysis import pareto
        from qsync_fx.allocator.api import get_allocator

        with progress("points", self.arguments.points) as done:
            selected = get_allocator(allocator(self.arguments, self.inputs))
            return pareto(self.answer.problem, selected, self.arguments.points, self.answer, done)


def _hessian(path: str, available: PlanInputs) -> Allocator:
    from qsync_fx.allocator.baselines import HessianGreedy
    from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity

    if path:
        return HessianGreedy(Sensitivity.load(path))
    return HessianGreedy(plan_inputs.sensitivities(available, "hessian", anew=True))


def as_json(
    answer: PlanResult,
    steps: Sequence[Sequence[SingleChange]] = (),
    changed: PlanResult | None = None,
    compared: Sequence[AllocatorComparison] = (),
    front: ParetoFront | None = None,
) -> dict[str, Any]:
    """Return a JSON-compatible description of the report, with more details than the tables."""
    result: dict[str, Any] = _answer(answer) | {
        "plans": {name: dict(plan) for name, plan in answer.plans.items()},
        "notes": [
            {
                "kind": note.kind.name.lower(),
                "device": note.device,
                "operator": note.operator,
                "formats": list(note.formats),
                "numbers": dict(note.numbers),
            }
            for note in answer.notes
        ],
    }
    if steps:
        result["explain"] = [[_step(step) for step in item] for item in steps]
    if changed is not None:
        result["changed"] = _answer(changed)
    if compared:
        result["compared"] = [_compared(item) for item in compared]
    if front is not None:
        uniform = {fmt: _answer(item) for fmt, item in front.uniform.items()}
        result["pareto"] = {"points": [_answer(item) for item in front.points], "uniform": uniform}
    return result


def _answer(answer: PlanResult) -> dict[str, Any]:
    classes = {
        name: {
            "computing": figures.computing,
            "waiting": figures.waiting,
            "sending": figures.sending,
            "peak_bytes": figures.peak_bytes,
            "memory": answer.problem.classes[name].memory,
            "variance": figures.variance,
        }
        for name, figures in answer.evaluation.classes.items()
    }
    return {
        "allocator": answer.allocator,
        "seconds": answer.evaluation.seconds,
        "variance": answer.evaluation.variance,
        "least": answer.problem.least,
        "bound": answer.bound,
        "gap": answer.gap,
        "took": answer.took,
        "fits": answer.fits,
        "trials": [[_trial(trial) for trial in trials] for trials in answer.trials],
        "ran": answer.ran,
        "exceeds": answer.evaluation.exceeds(answer.problem),
        "codecs": dict(answer.codecs),
        "coding": answer.evaluation.coding,
        "classes": classes,
    }


def _trial(trial: Trial) -> dict[str, Any]:
    return {**dataclasses.asdict(trial), "agrees": trial.agrees}


def _step(step: SingleChange) -> dict[str, Any]:
    return {
        "device": step.device,
        "operator": step.operator,
        "format": step.fmt,
        "seconds": step.seconds,
        "computing": step.computing,
        "peak_bytes": step.peak_bytes,
        "variance": step.variance,
        "exceeds": dict(step.exceeds),
        "why": step.why.name.lower(),
    }


def _compared(item: AllocatorComparison) -> dict[str, Any]:
    if item.answer is None:
        return {"allocator": item.allocator, "error": "" if item.error is None else item.error.what}
    return _answer(item.answer) | {"gap": item.gap}
