"""`qsync replay`: duration of a training step on a device or cluster, from plans or traces."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qsync_fx.cli import model_args, output
from qsync_fx.cli.command import Command, add_options
from qsync_fx.cli.model_args import named
from qsync_fx.errors import OptionError

if TYPE_CHECKING:
    from qsync_fx.timeline.timeline import Timeline

_ABOUT = """\
Simulates a training step: the computation of each device, the transfer of
gradients, and the waiting times of devices. No model is run. For several classes
of devices, write plans and profiles as NAME=FILE, with the names of the cluster
file; a FILE without a name applies to all classes.

With --trace, replays the step of a traced run, from one file per rank, or from one
file per class of devices and a cluster."""

_EXAMPLES = """\
examples:
  qsync replay plan.json --profile cpu.json            a step on this machine
  qsync replay plan.json --profile t4.json --any-machine   a step on another machine
  qsync replay v100=a.json t4=b.json --cluster cluster.toml --perfetto out.json
  qsync replay plan.json --cluster cluster.toml        with the profiles of the cluster file
  qsync replay --trace rank0.json rank1.json           a traced run, without its waiting times
  qsync replay plan.json --profile cpu.json --json | jq .seconds"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "plan", nargs="*", metavar="PLAN", help="plan file, or NAME=FILE for a class of devices"
    )
    add_options(
        parser,
        """
        --profile FILE...  profile, or NAME=FILE for a class of devices; repeatable
        --any-machine      accept a profile of a single device from another machine; profiles of a
                           cluster are always accepted
        --cluster FILE     TOML file of devices and links, or the name of one, such as
                           cluster-a; see qsync docs replayer
        """,
        {"cluster": model_args.cluster},
    )
    traced = parser.add_argument_group("traces instead of plans and profiles")
    texts = {
        "--trace": "traces of torch.profiler, or NAME=FILE for classes of devices",
        "--execution-trace": "execution traces of the same runs, in the order of --trace",
    }
    for flag, text in texts.items():
        traced.add_argument(flag, metavar="FILE", nargs="+", default=[], help=text)
    printed = parser.add_argument_group("output")
    add_options(
        printed,
        """
        --operators N    number of operators to show, the longest first; by default 15, with --json
                         all
        --json           print the step, devices and operators as one JSON object
        --perfetto FILE  also write the timeline for ui.perfetto.dev
        """,
        {"operators": int, "perfetto": output.to_write},
    )


def _replay(arguments: argparse.Namespace) -> None:
    shown = arguments.operators
    if shown is not None and shown < 0:
        message = f"the number of operators is {shown}, but must not be negative"
        raise OptionError(message, where="--operators", do="use 0 or more")
    read = _of_traces if arguments.trace else _of_plans
    timeline = read(arguments)
    if arguments.json:
        output.as_json(as_json(timeline, shown))
    else:
        from qsync_fx.timeline.timeline import SHOWN, timeline_table

        output.show(timeline_table(timeline, SHOWN if shown is None else shown))
    if arguments.perfetto:
        timeline.save_perfetto(arguments.perfetto)
        output.wrote(arguments.perfetto)


def _of_plans(arguments: argparse.Namespace) -> Timeline:
    if not arguments.plan:
        do = "add a plan file, or traces with --trace"
        raise OptionError("neither a plan nor a trace is given", where="PLAN", do=do)
    plans, profiles = named(arguments.plan, "PLAN"), named(arguments.profile, "--profile")

    from qsync_fx.timeline.replay_plans import replay

    return replay(
        plans.get("", plans),
        profiles.get("", profiles),
        cluster=arguments.cluster,
        any_machine=arguments.any_machine,
    )


def _of_traces(arguments: argparse.Namespace) -> Timeline:
    if arguments.plan or arguments.profile or arguments.any_machine:
        raise OptionError(
            "a trace already contains its plan and durations",
            where="--trace",
            do="remove plans, --profile and --any-machine, or remove --trace",
        )
    traces = named(arguments.trace, "--trace", "rank {}")
    executions = arguments.execution_trace
    if executions and len(executions) != len(traces):
        raise OptionError(
            f"there are {len(executions)} execution traces for {len(traces)} traces",
            where="--execution-trace",
            do="name one execution trace for each trace, in the same order",
        )

    from qsync_fx.timeline.replay_plans import replay_traces

    return replay_traces(
        traces, dict(zip(traces, executions, strict=False)), cluster=arguments.cluster
    )


def as_json(timeline: Timeline, shown: int | None = None) -> Mapping[str, Any]:
    """Return a JSON-compatible description of the timeline; `shown` limits the operators."""
    played, step = timeline.played, timeline.played.step
    classes = zip(played.cluster.devices.items(), played.devices.values(), strict=True)
    buckets = zip(played.buckets, step.sent.tolist(), step.arrived.tolist(), strict=True)
    return {
        "seconds": timeline.seconds,
        "samples_per_second": timeline.throughput,
        "devices": [
            {
                "name": name,
                "count": device.count,
                "computing": alone.computed,
                "sending": timeline.sending[name],
                "waiting": timeline.waiting[name],
                "optimizer": alone.optimizer,
                "peak_bytes": timeline.peak_bytes.get(name),
            }
            for (name, device), alone in classes
        ],
        "buckets": [
            {
                "parameters": list(bucket.parameters),
                "bytes": bucket.nbytes,
                "codec": getattr(bucket.coded, "codec", None),
                "travelling": bucket.travelling,
                "sent": sent,
                "arrived": arrived,
            }
            for bucket, sent, arrived in buckets
        ],
        "operators": [dataclasses.asdict(item) for item in timeline.by_operator()[:shown]],
    }


COMMAND = Command(
    "predict the time of a training step under a plan", _replay, _arguments, _ABOUT, _EXAMPLES
)
