"""`qsync plan`: format of each operator on each device, compared with other allocators.

plan_inputs.py collects profiles and sensitivities. The written plan is the one shown last.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qsync_fx.cli import model_args, output, plan_inputs
from qsync_fx.cli.command import Command, add_options
from qsync_fx.errors import OptionError, QSyncError, shown
from qsync_fx.progress import progress

if TYPE_CHECKING:
    from qsync_fx.allocator.analysis import AllocatorComparison, ParetoFront, SingleChange
    from qsync_fx.allocator.plan_result import Allocator, PlanResult
    from qsync_fx.allocator.problem import Problem
    from qsync_fx.cli.plan_inputs import PlanInputs

_ABOUT = f"""\
Chooses the format of each operator on each class of devices. By default, a step of
the cluster is as fast as in low precision, and the plan adds the least
variance to gradients; --objective selects another goal. No model is trained.

Devices are described by profiles (qsync measure), or by the catalog if the cluster
file names a catalog device. A model without either is measured here first, which
takes minutes. If a profile is of this machine and the model is given, the plan also
runs here: its measured step corrects the profiles, and planning repeats until
prediction and measurement agree.
{model_args.LOSS}"""

_EXAMPLES = """\
examples:
  qsync plan bert:small --cluster cluster.toml -o plan.json
  qsync plan bert:small --cluster cluster-a                       16 V100 and 16 T4 (QSync)
  qsync plan --profile v100=a.json --profile t4=b.json --cluster cluster.toml --memory t4=30%
  qsync plan --profile cpu.json --objective fastest --budget bf16
  qsync plan bert:small --cluster cluster.toml --compare          all allocators and baselines
  qsync plan --profile cpu.json --explain encoder.0/linear        reason for its format
  qsync plan --profile cpu.json --set 'encoder.*=fp32'            effect of another format
  qsync plan bert:small -o plan.json                              measure, plan, run the plan
  qsync plan bert:small --cluster cluster.toml --codecs qsgd8,qsgd4
  qsync plan bert:small --cluster cluster.toml --batch global     batches and formats together
  qsync plan bert:small --cluster cluster.toml --batch global --recompute --memory t4=30%
  qsync plan --profile cpu.json --pareto                          time against variance"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    given_plan = OptionError(
        "qsync plan computes a plan and does not accept one",
        where="--plan",
        do="remove it, or use qsync replay to evaluate an existing plan",
    )
    group = model_args.add_training(
        parser,
        "planning problem",
        "comma-separated formats that the plan may use",
        "a plan",
        required=False,
        refused={"plan": given_plan, "skip_unprofitable": model_args.EVERY_FORMAT},
    )
    add_options(
        group,
        """
        --cluster FILE      TOML file of devices and links, or the name of one, such as
                            cluster-a; see qsync docs replayer
        --profile FILE...   profile, or NAME=FILE for a class of devices; repeatable
        --sensitivity FILE  file of qsync sensitivity, which replaces the sensitivities in profiles
        --method NAME       method for missing sensitivities: %(default)s, paper or another method
                            of qsync sensitivity
        """,
        {"cluster": model_args.cluster},
        method="second_order",
    )
    model_args.add_optimizer(group)
    add_options(
        group,
        """
        --objective NAME          hybrid, fastest, recover, cost or the name of a custom objective;
                                  by default hybrid for several devices, else fastest
        --budget VARIANCE         limit of the variance, for fastest, cost and recover: a number, or
                                  the format of a uniform plan
        --target SECONDS          limit of the step time: a number, or the format of a uniform plan
        --margin SHARE            share by which devices are assumed slower than predicted; by
                                  default the uncertainty of the prediction
        --memory SIZE...          memory limit: "30%%", "4 GB" or bytes; NAME=SIZE for a class of
                                  devices; repeatable
        --allocator NAME          allocator; %(default)s by default
        --tie-blocks              give corresponding operators of equal blocks the same format
        --max-replans --repeats N
                                  maximum number of runs of the plan on this machine, each followed
                                  by new planning; 3 by default, 0 runs none
        --codecs NAMES            comma-separated codecs for gradient buckets besides fp32, such as
                                  qsgd8,qsgd4
        --inside-codecs NAMES     comma-separated codecs inside nodes besides fp32, such as qsgd8
        --batch SAMPLES           plan the batch of each device, too: global for the samples of the
                                  cluster file in a step, or their range, such as 1024-2048
        --min-batch N             least samples per device for --batch
        --recompute               allow recomputation of activations on devices whose memory limits
                                  the plan
        """,
        {
            "budget": plan_inputs.limit,
            "target": plan_inputs.limit,
            "margin": float,
            "max_replans": int,
            "codecs": model_args.names,
            "inside_codecs": model_args.names,
            "batch": plan_inputs.global_batch,
            "min_batch": int,
        },
        allocator="milp",
    )
    analyses = parser.add_argument_group("analyses of the plan")
    add_options(
        analyses,
        """
        --compare           compare all allocators and baselines
        --explain OP...     explain the format of an operator, or of each operator that a pattern
                            selects
        --set OP=FORMAT...  evaluate the plan with another format for an operator or pattern;
                            repeatable
        --device NAME       class of devices for --explain and --set, if there are several
        --pareto            Pareto front of step time and variance; qsync report draws it
        --points N          number of points of --pareto; %(default)s by default
        """,
        {"points": int},
        points=9,
    )
    saved = parser.add_argument_group("output")
    add_options(
        saved,
        """
        -o --output FILE  write the plan for all ranks, with the changes of --set
        --json            print the report as one JSON object
        """,
        {"output": output.to_write},
    )


def _plan(arguments: argparse.Namespace) -> None:
    changes = _changes(arguments)

    from qsync_fx.allocator.api import find_plan

    inputs = plan_inputs.read(arguments, arguments.cluster)
    answer = find_plan(
        inputs.profiles.get("", inputs.profiles),
        inputs.cluster,
        allocator=arguments.allocator,
        sensitivity=inputs.sensitivity,
        tie_blocks=arguments.tie_blocks,
        **plan_inputs.request(arguments, inputs),
        **plan_inputs.batch_arguments(arguments, inputs),
    )
    _report(arguments, inputs, answer, changes)


def _changes(arguments: argparse.Namespace) -> dict[str, str]:
    result: dict[str, str] = {}
    for text in arguments.set:
        operator, equals, fmt = text.rpartition("=")
        if not equals or not operator:
            message = f"{shown(text)} contains no format"
            raise OptionError(message, where="--set", do="write OP=FORMAT")
        result[operator] = fmt
    return result


def _report(
    arguments: argparse.Namespace,
    inputs: PlanInputs,
    answer: PlanResult,
    changes: Mapping[str, str],
) -> None:
    """Print the plan and its analyses, and write the plan with the `changes` of --set."""
    from qsync_fx.allocator import analysis
    from qsync_fx.allocator.plan_result import answer_table

    device, result = arguments.device, answer
    document, tables = plan_as_json(answer), [answer_table(answer)]
    explained = [op for item in arguments.explain for op in analysis.selected(answer, item, device)]
    if explained:
        steps = [analysis.single_change(answer, op, device) for op in dict.fromkeys(explained)]
        document["explain"] = [[_step(step) for step in item] for item in steps]
        tables += map(analysis.steps_table, steps)
    if changes:
        result = analysis.what_if(answer, changes, device)
        document["changed"] = _answer(result)
        tables.append(analysis.changes_table(answer, result))
    if arguments.compare:
        compared = _compare(inputs, answer.problem)
        document["compared"] = [_compared(item) for item in compared]
        tables.append(analysis.comparison_table(compared))
    if arguments.pareto:
        front = _front(answer, arguments)
        uniform = {fmt: _answer(item) for fmt, item in front.uniform.items()}
        points = [_answer(item) for item in front.points]
        document["pareto"] = {"points": points, "uniform": uniform}
        tables.append(analysis.front_table(front))
    if arguments.json:
        output.as_json(document)
    else:
        for table in tables:
            output.show(table)
    if arguments.output is not None:
        result.save(arguments.output)
        output.wrote(arguments.output)


def _compare(inputs: PlanInputs, problem: Problem) -> list[AllocatorComparison]:
    from qsync_fx.allocator.analysis import compare, side_by_side
    from qsync_fx.allocator.baselines import DynamicBatches
    from qsync_fx.allocator.problem_builder import class_at_batch
    from qsync_fx.timeline.device_profiles import load_device_profiles

    more: list[Allocator] = []
    try:
        _, profiles = load_device_profiles(
            inputs.profiles.get("", inputs.profiles), inputs.cluster or problem.cluster
        )
        resized = plan_inputs.resizer(inputs)
        more.append(DynamicBatches(class_at_batch(problem.classes, profiles, resized)))
    except QSyncError as error:
        output.note(f"the comparison omits dynamic batches: {error.what}")
    allocators = side_by_side(problem, more)
    with progress("allocators", len(allocators)) as done:
        return compare(problem, allocators, done)


def _front(answer: PlanResult, arguments: argparse.Namespace) -> ParetoFront:
    from qsync_fx.allocator.analysis import pareto
    from qsync_fx.allocator.api import get_allocator

    with progress("points", arguments.points) as done:
        chosen = get_allocator(arguments.allocator)
        return pareto(answer.problem, chosen, arguments.points, answer, done)


def plan_as_json(answer: PlanResult) -> dict[str, Any]:
    """Return a JSON-compatible description of a plan, with more details than the table."""
    return _answer(answer) | {
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


def _answer(answer: PlanResult) -> dict[str, Any]:
    classes = {
        name: {**dataclasses.asdict(metrics), "memory": answer.problem.classes[name].memory}
        for name, metrics in answer.evaluation.classes.items()
    }
    return {
        "allocator": answer.allocator,
        "seconds": answer.evaluation.seconds,
        "variance": answer.evaluation.variance,
        "least": answer.problem.least,
        "bound": answer.bound,
        "samples_per_price": answer.samples_per_price,
        "gap": answer.gap,
        "took": answer.took,
        "fits": answer.fits,
        "trials": [
            [{**dataclasses.asdict(trial), "agrees": trial.agrees} for trial in trials]
            for trials in answer.trials
        ],
        "ran": answer.ran,
        "exceeds": answer.evaluation.exceeds(answer.problem),
        "codecs": dict(answer.codecs),
        "batches": dict(answer.batches),
        "memory_budgets": dict(answer.memory_budgets),
        "coding": answer.evaluation.coding,
        "classes": classes,
    }


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


COMMAND = Command("choose the format of each operator", _plan, _arguments, _ABOUT, _EXAMPLES)
