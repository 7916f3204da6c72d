"""`qsync plan`: format of each operator on each device, compared with other allocators.

plan_inputs.py collects profiles and sensitivities; plan_report.py evaluates and prints the plan.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from qsync_fx.cli import output, training_args
from qsync_fx.cli.command import Command
from qsync_fx.errors import OptionError

_ABOUT = f"""\
Chooses the format of each operator on each class of devices. By default, a step of
the cluster takes no longer than in low precision, and the plan adds the least
variance to gradients; --objective selects another goal. No model is trained.

Devices are described by profiles (qsync measure), or by the catalog if the cluster
file names a catalog device. A model without either is measured here first, which
takes minutes. If a profile is of this machine and the model is given, the plan also
runs here: its measured step corrects the profiles, and planning repeats until
prediction and measurement agree.
{training_args.LOSS}"""

_EXAMPLES = """\
examples:
  qsync plan bert:small --cluster cluster.toml -o plan.json
  qsync plan --profile v100=a.json --profile t4=b.json --cluster cluster.toml --memory t4=30%
  qsync plan --profile cpu.json --objective fastest --budget bf16
  qsync plan bert:small --cluster cluster.toml --compare          all allocators and baselines
  qsync plan --profile cpu.json --explain encoder.0/linear        reason for its format
  qsync plan --profile cpu.json --set 'encoder.*=fp32'            effect of another format
  qsync plan bert:small -o plan.json                              measure, plan, run the plan
  qsync plan bert:small --cluster cluster.toml --codecs qsgd8,qsgd4
  qsync plan --profile cpu.json --pareto front.svg                time against variance"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    given_plan = OptionError(
        "qsync plan computes a plan and does not accept one",
        where="--plan",
        do="remove it, or use qsync replay to evaluate an existing plan",
    )
    group = training_args.add(
        parser,
        "planning problem",
        "comma-separated formats that the plan may use",
        "a plan",
        required=False,
        refused={"plan": given_plan},
    )
    group.add_argument(
        "--cluster", metavar="FILE", help="TOML file of devices and links; see docs/predictor.md"
    )
    group.add_argument(
        "--profile",
        metavar="FILE",
        action="append",
        default=[],
        help="profile, or NAME=FILE for a class of devices; repeatable",
    )
    group.add_argument(
        "--sensitivity",
        metavar="FILE",
        help="file of qsync sensitivity, which replaces the sensitivities in profiles",
    )
    group.add_argument(
        "--method",
        metavar="NAME",
        default="second_order",
        help="method for missing sensitivities: %(default)s, depth or another method of "
        "qsync sensitivity",
    )
    training_args.add_optimizer(group)
    group.add_argument(
        "--objective",
        metavar="NAME",
        help="hybrid, fastest, recover or the name of a custom objective; by default hybrid for "
        "several devices, else fastest",
    )
    group.add_argument(
        "--budget",
        metavar="VARIANCE",
        help="limit of the variance, for fastest and recover: a number, or the format of a "
        "uniform plan",
    )
    group.add_argument(
        "--target",
        metavar="SECONDS",
        help="limit of the step time: a number, or the format of a uniform plan",
    )
    group.add_argument(
        "--margin",
        metavar="SHARE",
        type=float,
        help="share by which devices are assumed slower than predicted; by default the "
        "uncertainty of the prediction",
    )
    group.add_argument(
        "--memory",
        metavar="SIZE",
        action="append",
        default=[],
        help='memory limit: "30%%", "4 GB" or bytes; NAME=SIZE for a class of devices; repeatable',
    )
    group.add_argument(
        "--allocator", metavar="NAME", default="milp", help="allocator; %(default)s by default"
    )
    group.add_argument(
        "--tie-blocks",
        action="store_true",
        help="give corresponding operators of equal blocks the same format",
    )
    group.add_argument(
        "--max-replans",
        "--repeats",
        dest="max_replans",
        metavar="N",
        type=int,
        help="maximum number of runs of the plan on this machine, each followed by new planning; "
        "3 by default, 0 runs none",
    )
    group.add_argument(
        "--codecs",
        metavar="NAMES",
        help="comma-separated codecs for gradient buckets besides fp32, such as qsgd8,qsgd4",
    )
    analyses = parser.add_argument_group("analyses of the plan")
    analyses.add_argument(
        "--compare",
        action="store_true",
        help="compare all allocators and baselines",
    )
    analyses.add_argument(
        "--hessian",
        metavar="FILE",
        nargs="?",
        const="",
        help="also compare with HAWQ's order, computed here or read from a file",
    )
    analyses.add_argument(
        "--explain",
        metavar="OP",
        action="append",
        default=[],
        help="explain the format of an operator, or of each operator that a pattern selects",
    )
    analyses.add_argument(
        "--set",
        metavar="OP=FORMAT",
        action="append",
        default=[],
        help="evaluate the plan with another format for an operator or pattern; repeatable",
    )
    analyses.add_argument(
        "--device",
        metavar="NAME",
        help="class of devices for --explain and --set, if there are several",
    )
    analyses.add_argument(
        "--pareto",
        metavar="FILE",
        nargs="?",
        const="",
        type=_picture,
        help="Pareto front of step time and variance; FILE.svg or FILE.html gets a plot",
    )
    analyses.add_argument(
        "--points",
        metavar="N",
        type=int,
        default=9,
        help="number of points of --pareto; %(default)s by default",
    )
    saved = parser.add_argument_group("output")
    saved.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=output.to_write,
        help="write the plan for all ranks, with the changes of --set",
    )
    saved.add_argument("--json", action="store_true", help="print the report as one JSON object")


def _picture(path: str) -> Path | str:
    if not path:
        return path  # without a path: only a table
    from qsync_fx.allocator.pareto_svg import check_picture

    check_picture(path)
    return output.to_write(path)


def _plan(arguments: argparse.Namespace) -> None:
    from qsync_fx.cli import plan_inputs, plan_report
    from qsync_fx.predictor.replayer.cluster import Cluster

    # Check files before the import of torch, which is slow.
    cluster = None if arguments.cluster is None else Cluster.load(arguments.cluster)
    changes = plan_report.changes(arguments)

    from qsync_fx.allocator.api import find_plan

    inputs = plan_inputs.read(arguments, cluster)
    answer = find_plan(
        inputs.profiles.get("", inputs.profiles),
        inputs.cluster,
        objective=plan_inputs.objective(arguments, inputs),
        budget=plan_inputs.limit(arguments.budget),
        target=plan_inputs.limit(arguments.target),
        memory=plan_inputs.memory(arguments),
        allocator=plan_report.allocator(arguments, inputs),
        precisions=None if arguments.precisions is None else arguments.precisions.split(","),
        sensitivity=inputs.sensitivity,
        tie_blocks=arguments.tie_blocks,
        codecs=() if arguments.codecs is None else arguments.codecs.split(","),
        margin=arguments.margin,
        **plan_inputs.run_arguments(arguments, inputs),
    )
    plan_report.PlanReport(arguments, inputs, answer, changes).show()


COMMAND = Command("choose the format of each operator", _plan, _arguments, _ABOUT, _EXAMPLES)
