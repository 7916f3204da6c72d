"""`qsync replay`: duration of a training step on a device or cluster, from plans or traces."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qsync_fx.cli import output
from qsync_fx.cli.command import Command
from qsync_fx.cli.model_args import named
from qsync_fx.errors import OptionError

if TYPE_CHECKING:
    from qsync_fx.predictor.replayer.cluster import Cluster
    from qsync_fx.timeline.timeline import Timeline

_ABOUT = """\
Replays a training step: what each device computes, when gradients travel, and
who waits for whom. Nothing is run. Plans and profiles of several classes of
devices are given as NAME=FILE, with the names of the cluster's file; what
stands there without a name is that of all.

With --trace the step of a run that was traced is replayed: one file of each
rank, or one of each class of devices together with a cluster."""

_EXAMPLES = """\
examples:
  qsync replay plan.json --profile cpu.json            a step on this machine
  qsync replay plan.json --profile t4.json --any-machine   one that was measured elsewhere
  qsync replay v100=a.json t4=b.json --cluster cluster.toml --perfetto out.json
  qsync replay plan.json --cluster cluster.toml        profiles that the cluster names
  qsync replay --trace rank0.json rank1.json           a run as it was, without waiting in collectives
  qsync replay plan.json --profile cpu.json --json | jq .seconds"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "plan", nargs="*", metavar="PLAN", help="plan file, or NAME=FILE for a class of devices"
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        action="append",
        default=[],
        help="profile, or NAME=FILE; may be repeated",
    )
    parser.add_argument(
        "--any-machine",
        action="store_true",
        help="the profile of one device may be one that was measured on another machine, as those of a cluster may",
    )
    parser.add_argument(
        "--cluster", metavar="FILE", help="devices and links, a file of TOML; see docs/predictor.md"
    )
    traced = parser.add_argument_group("traces in place of plans and profiles")
    traced.add_argument(
        "--trace",
        metavar="FILE",
        nargs="+",
        default=[],
        help="traces of torch.profiler, or NAME=FILE",
    )
    traced.add_argument(
        "--execution-trace",
        metavar="FILE",
        nargs="+",
        default=[],
        help="execution traces of the same runs, in order",
    )
    printed = parser.add_argument_group("what to print and write")
    printed.add_argument(
        "--operators",
        metavar="N",
        type=int,
        help="how many operators to show, the longest first; 15, and all with --json",
    )
    printed.add_argument(
        "--json", action="store_true", help="the step, devices and operators as one JSON object"
    )
    printed.add_argument(
        "--perfetto",
        metavar="FILE",
        type=output.to_write,
        help="also write the timeline for ui.perfetto.dev",
    )


def _replay(arguments: argparse.Namespace) -> None:
    shown = arguments.operators
    if shown is not None and shown < 0:
        raise OptionError(
            f"{shown} operators cannot be shown", where="--operators", do="give 0 or more"
        )
    timeline = _of_traces(arguments) if arguments.trace else _of_plans(arguments)
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
        raise OptionError(
            "there is no plan to replay",
            where="PLAN",
            do="name a plan file, or traces with --trace",
        )
    plans, profiles = named(arguments.plan, "PLAN"), named(arguments.profile, "--profile")
    cluster = _cluster(arguments)

    from qsync_fx.timeline.replay_plans import replay

    return replay(
        plans.get("", plans),
        profiles.get("", profiles),
        cluster=cluster,
        any_machine=arguments.any_machine,
    )


def _of_traces(arguments: argparse.Namespace) -> Timeline:
    if arguments.plan or arguments.profile or arguments.any_machine:
        raise OptionError(
            "a trace is of the plan that ran", where="--trace", do="leave plans and profiles out"
        )
    traces = named(arguments.trace, "--trace", "rank {}")
    executions = arguments.execution_trace
    if executions and len(executions) != len(traces):
        message = f"{len(executions)} execution traces for {len(traces)} traces"
        raise OptionError(
            message, where="--execution-trace", do="give one for each trace, in the same order"
        )
    cluster = _cluster(arguments)

    from qsync_fx.timeline.replay_plans import replay_traces

    return replay_traces(traces, dict(zip(traces, executions, strict=False)), cluster=cluster)


def _cluster(arguments: argparse.Namespace) -> Cluster | None:
    """Return the cluster in the file of --cluster, before the slow import of torch."""
    from qsync_fx.predictor.replayer.cluster import Cluster

    return None if arguments.cluster is None else Cluster.load(arguments.cluster)


def as_json(timeline: Timeline, shown: int | None = None) -> Mapping[str, Any]:
    """Return a JSON-compatible description of the timeline.

    Args:
        shown: number of operators; None for all.
    """
    cluster = timeline.played.cluster
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
            for (name, device), alone in zip(
                cluster.devices.items(), timeline.played.devices.values(), strict=True
            )
        ],
        "buckets": [
            {
                "parameters": list(bucket.parameters),
                "bytes": bucket.nbytes,
                "codec": None if bucket.coded is None else bucket.coded.codec,
                "travelling": bucket.travelling,
                "sent": sent,
                "arrived": arrived,
            }
            for bucket, sent, arrived in zip(
                timeline.played.buckets,
                timeline.played.step.sent.tolist(),
                timeline.played.step.arrived.tolist(),
                strict=True,
            )
        ],
        "operators": [
            {
                "device": item.device,
                "operator": item.operator,
                "forward": item.forward,
                "backward": item.backward,
                "casts": item.casts,
                "other": item.other,
            }
            for item in timeline.by_operator()[:shown]
        ],
    }


COMMAND = Command(
    "how long a training step takes under a plan", _replay, _arguments, _ABOUT, _EXAMPLES
)
