"""`qsync report`: one HTML file about a model, a plan, profiles and a fleet.

Invariant: the file shows results of the other verbs; only planning and the front are computed here.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qsync_fx.cli import model_args, output
from qsync_fx.cli.command import Command, add_options
from qsync_fx.cli.model_args import named
from qsync_fx.errors import OptionError
from qsync_fx.progress import progress

if TYPE_CHECKING:
    from qsync_fx.plan.cluster_plan import ClusterPlan
    from qsync_fx.plan.plan import Plan

_ABOUT = """\
Writes one HTML file that needs no network. Its tabs depend on what is given:

  a model        graph, with the formats after each pass, and the plan
  --plan         formats of each operator; with profiles also the timeline
  --profile      timeline, memory, sensitivity, predicted against measured;
                 without --plan, a plan is computed, with its trade-offs
  --sensitivity  variance of each operator

The model runs once on its inputs if it is given. No model is trained."""

_EXAMPLES = """\
examples:
  qsync report bert:small --precision int8 -o report.html
  qsync report --plan plan.json --profile v100=a.json --profile t4=b.json --cluster cluster.toml
  qsync report bert:small --profile cpu.json -o report.html
  qsync report --sensitivity sensitivity.json -o report.html"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    model_args.add(parser, inspection=True, required=False)
    group = parser.add_argument_group("what the report shows")
    add_options(
        group,
        """
        --cluster FILE      TOML file of devices and links, or the name of one, such as
                            cluster-a; see qsync docs replayer
        --profile FILE...   profile, or NAME=FILE for a class of devices; repeatable
        --sensitivity FILE  file of qsync sensitivity
        --points N          number of points of the trade-off; %(default)s by default, 0 for none
        """,
        {"cluster": model_args.cluster, "points": int},
        points=9,
    )
    saved = parser.add_argument_group("output")
    add_options(
        saved,
        """
        --title TEXT      heading of the page
        -o --output FILE  file to write (%(default)s)
        --json            print the data of the page instead of writing it
        """,
        {"output": output.to_write},
        title="qsync report",
        output="report.html",
    )


def _report(arguments: argparse.Namespace) -> None:
    from qsync_fx.report.document import Report

    values = _values(arguments)
    if not values:
        raise OptionError(
            "there is nothing to report on",
            where="MODULE:CALLABLE",
            do="add a model, --plan, --profile or --sensitivity",
        )
    report = Report(*values, title=arguments.title)
    if arguments.json:
        output.as_json(report.document)
        return
    report.save(arguments.output)
    output.wrote(arguments.output)


def _values(arguments: argparse.Namespace) -> list[Any]:
    """Return the values of the report, read from files or computed.

    The graph is that of the plan: of --plan, or computed from one profile, or of --precision.
    """
    from qsync_fx.allocator.plan_result import PlanResult
    from qsync_fx.plan.cluster_plan import read_plan
    from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
    from qsync_fx.profiler.profile import Profile

    values: list[Any] = []
    paths = named(arguments.profile, "--profile")
    profiles = {name: Profile.load(path, any_machine=True) for name, path in paths.items()}
    sensitivity = None
    if arguments.sensitivity is not None:
        sensitivity = Sensitivity.load(arguments.sensitivity)
    plan = read_plan(arguments.plan) if arguments.plan is not None else None
    computed: Plan | None = None
    if plan is None and profiles:
        values += _planned(arguments, profiles, sensitivity)
        if isinstance(values[0], PlanResult) and len(profiles) == 1:
            computed = values[0].plan()
    elif plan is not None and profiles:
        values += [_timeline(arguments, plan, profiles), profiles]
    if sensitivity is not None:
        values.append(sensitivity)
    if arguments.model is not None:
        inputs = model_args.read(arguments)
        if computed is not None and arguments.precision is None:
            inputs = replace(inputs, options=replace(inputs.options, plan=computed))
        values.append(inputs.explain())
    if plan is not None:
        values.append(plan)
    return values


def _planned(
    arguments: argparse.Namespace, profiles: dict[str, Any], sensitivity: Any
) -> list[Any]:
    """Return the plan of the profiles and its front; the profiles alone if no plan can be made."""
    if sensitivity is None and any(profile.sensitivity is None for profile in profiles.values()):
        output.note("the profiles have no sensitivity, so no plan is computed (--sensitivity)")
        return [profiles]

    from qsync_fx.allocator.analysis import pareto
    from qsync_fx.allocator.api import find_plan, get_allocator

    answer = find_plan(profiles.get("", profiles), arguments.cluster, sensitivity=sensitivity)
    values: list[Any] = [answer, profiles]
    if arguments.points:
        with progress("points", arguments.points) as done:
            allocator = get_allocator(answer.allocator)
            values.append(pareto(answer.problem, allocator, arguments.points, answer, done))
    return values


def _timeline(
    arguments: argparse.Namespace, plan: Plan | ClusterPlan, profiles: dict[str, Any]
) -> Any:
    from qsync_fx.timeline.replay_plans import replay

    inputs = profiles.get("", profiles)
    result = replay(plan, inputs, cluster=arguments.cluster, any_machine=True)
    return {"this plan": result}


COMMAND = Command(
    "write one HTML file about a plan, a model or profiles", _report, _arguments, _ABOUT, _EXAMPLES
)
