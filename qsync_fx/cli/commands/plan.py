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
Chooses the format of each operator on each class of devices, so that a step of
the cluster takes no longer than in low precision and gradients are disturbed
least, or what else --objective asks for. Nothing is trained.

What is known of devices comes from profiles (qsync measure), or is reckoned by
the catalog for those that the cluster's file gives a device of. One model alone
is measured here first, which takes minutes. Where profiles are of this machine
and the model is named, the plan is run here, profiles are corrected by what it
takes, and it is looked for again until both agree.
{training_args.LOSS.capitalize()}."""

_EXAMPLES = """\
examples:
  qsync plan bert:small --cluster cluster.toml -o plan.json
  qsync plan --profile v100=a.json --profile t4=b.json --cluster cluster.toml --memory t4=30%
  qsync plan --profile cpu.json --objective fastest --budget bf16
  qsync plan bert:small --cluster cluster.toml --compare          all allocators and baselines
  qsync plan --profile cpu.json --explain encoder.0/linear        why it has its format
  qsync plan --profile cpu.json --set 'encoder.*=fp32'            what if these had another one
  qsync plan bert:small -o plan.json                              measures, plans, runs the plan
  qsync plan bert:small --cluster cluster.toml --codecs qsgd8,qsgd4
  qsync plan --profile cpu.json --pareto front.svg                time against variance"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    given_plan = OptionError(
        "a plan is what is looked for",
        where="--plan",
        do="leave it out; see qsync replay for one that is there",
    )
    group = training_args.add(
        parser,
        "what to plan for",
        "formats that plans may ask for, with commas between them",
        "a plan",
        needed=False,
        refused={"plan": given_plan},
    )
    group.add_argument(
        "--cluster", metavar="FILE", help="devices and links, a file of TOML; see docs/predictor.md"
    )
    group.add_argument(
        "--profile",
        metavar="FILE",
        action="append",
        default=[],
        help="profile, or NAME=FILE; may be repeated",
    )
    group.add_argument(
        "--sensitivity", metavar="FILE", help="of qsync sensitivity, in place of what profiles hold"
    )
    group.add_argument(
        "--method",
        metavar="NAME",
        default="second_order",
        help="how it is found where nothing says it; %(default)s, or depth",
    )
    training_args.add_optimizer(group)
    group.add_argument(
        "--objective",
        metavar="NAME",
        help="hybrid, fastest, recover, or of your own; hybrid for several devices, else fastest",
    )
    group.add_argument(
        "--budget",
        metavar="VARIANCE",
        help="for fastest and recover: a number, or the format of a uniform plan",
    )
    group.add_argument(
        "--target",
        metavar="SECONDS",
        help="what a step may take: a number, or the format of a uniform plan",
    )
    group.add_argument(
        "--margin",
        metavar="SHARE",
        type=float,
        help="by which devices are planned on as slower; what is uncertain by default",
    )
    group.add_argument(
        "--memory",
        metavar="SIZE",
        action="append",
        default=[],
        help='"30%%", "4 GB" or bytes, or NAME=SIZE; repeatable',
    )
    group.add_argument(
        "--allocator", metavar="NAME", default="milp", help="what chooses; %(default)s by default"
    )
    group.add_argument(
        "--tie-blocks",
        action="store_true",
        help="operators at one place of equal blocks get one format",
    )
    group.add_argument(
        "--max-replans",
        "--repeats",
        dest="max_replans",
        metavar="N",
        type=int,
        help="how often a plan at hand is run and looked for again; 3 at most by default, 0 for not",
    )
    group.add_argument(
        "--codecs",
        metavar="NAMES",
        help="what buckets of gradients may be sent in beside fp32, with commas between them: qsgd8,qsgd4",
    )
    looked = parser.add_argument_group("what to ask of the plan")
    looked.add_argument(
        "--compare",
        action="store_true",
        help="what all allocators and baselines make of it, side by side",
    )
    looked.add_argument(
        "--hessian",
        metavar="FILE",
        nargs="?",
        const="",
        help="compare with HAWQ's order, too: found here, or from a file",
    )
    looked.add_argument(
        "--explain",
        metavar="OP",
        action="append",
        default=[],
        help="why an operator, or each that a pattern selects, has its format",
    )
    looked.add_argument(
        "--set",
        metavar="OP=FORMAT",
        action="append",
        default=[],
        help="what if it had another, or all of a pattern; repeatable",
    )
    looked.add_argument(
        "--device",
        metavar="NAME",
        help="of which class --explain and --set speak, where there are several",
    )
    looked.add_argument(
        "--pareto",
        metavar="FILE",
        nargs="?",
        const="",
        type=_picture,
        help="time against variance; FILE.svg or FILE.html gets a picture",
    )
    looked.add_argument(
        "--points", metavar="N", type=int, default=9, help="of --pareto; %(default)s by default"
    )
    saved = parser.add_argument_group("what to write")
    saved.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=output.to_write,
        help="the plan, for all ranks; with --set as changed",
    )
    saved.add_argument("--json", action="store_true", help="all of it as one JSON object")


def _picture(path: str) -> Path | str:
    if not path:
        return path  # without a path: only a table
    from qsync_fx.allocator.pareto_svg import check_picture

    check_picture(path)
    return output.to_write(path)


def _plan(arguments: argparse.Namespace) -> None:
    from qsync_fx.cli import plan_inputs as knowing, plan_report
    from qsync_fx.predictor.replayer.cluster import Cluster

    # Check files before the import of torch, which is slow.
    cluster = None if arguments.cluster is None else Cluster.load(arguments.cluster)
    changes = plan_report.changes(arguments)

    from qsync_fx.allocator.api import find_plan

    inputs = knowing.read(arguments, cluster)
    answer = find_plan(
        inputs.profiles.get("", inputs.profiles),
        inputs.cluster,
        objective=knowing.objective(arguments, inputs),
        budget=knowing.limit(arguments.budget),
        target=knowing.limit(arguments.target),
        memory=knowing.memory(arguments),
        allocator=plan_report.allocator(arguments, inputs),
        precisions=None if arguments.precisions is None else arguments.precisions.split(","),
        sensitivity=inputs.sensitivity,
        tie_blocks=arguments.tie_blocks,
        codecs=() if arguments.codecs is None else arguments.codecs.split(","),
        margin=arguments.margin,
        **knowing.at_hand(arguments, inputs),
    )
    plan_report.PlanReport(arguments, inputs, answer, changes).show()


COMMAND = Command("which operator computes in which format", _plan, _arguments, _ABOUT, _EXAMPLES)
