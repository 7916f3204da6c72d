"""`qsync comm`: costs of compressed gradients.

`qsync comm bench` measures the speed of codecs. `qsync comm predict` replays steps of a cluster
with each codec, and prints the bandwidth below which a codec pays.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any, Final

from qsync_fx.cli import model_args, output
from qsync_fx.cli.command import Command, add_options
from qsync_fx.errors import OptionError, nearest, shown

if TYPE_CHECKING:
    from qsync_fx.communication.codec_cost_model import Rates
    from qsync_fx.predictor.replayer.cluster import Cluster, Transport
    from qsync_fx.profiler.profile import Profile
    from qsync_fx.timeline.replay_plans import Paying


_PREDICT_ABOUT = f"""\
Predicts which gradient codec pays: replays a training step of a cluster with each
codec. Byte counts are exact; durations come from a profile or the device catalog.
No gradient is sent, and no model is trained.
{model_args.LOSS}"""

_PREDICT_EXAMPLES = """\
examples:
  qsync comm predict bert:small --gpus 16 --bandwidth 1gbit
  qsync comm predict bert:small --gpus 8 --device v100 --bandwidth 100gbit
  qsync comm predict bert:small --gpus 16 --gpus-per-node 4 --inside 100gbit --bandwidth 1gbit
  qsync comm predict --profile cpu.json --gpus 4 --bandwidth 100mbit --json"""

_UNITS: Final = {"bit": 1 / 8, "b": 1.0}
_DEVICES: Final = "devices"
"""Name of the only class of devices."""
_POWERS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def _add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    one_format = OptionError(
        "qsync comm predict uses one format for all operators",
        where="--plan",
        do="set the format with --precision; qsync replay accepts a plan and its codecs",
    )
    model_args.add(parser, required=False, used=("precision",), refused={"plan": one_format})
    requested = parser.add_argument_group(
        "cluster and codecs", "By default all operators compute in fp32."
    )
    requested.add_argument(
        "--gpus", "--ranks", metavar="N", type=int, required=True, help="number of devices"
    )
    bandwidth = "bandwidth of each link per second, such as 1gbit, 100mbit or 12.5GB"
    requested.add_argument("--bandwidth", metavar="RATE", required=True, help=bandwidth)
    add_options(
        requested,
        """
        --latency SECONDS         latency of the smallest all-reduce (%(default)s)
        --gpus-per-node --ranks-per-node N
                                  devices per node, which share one link to other nodes; gradients
                                  are then compressed only between nodes
        --inside RATE             bandwidth of each device within its node, in the units of
                                  --bandwidth
        --inside-latency SECONDS  latency of the smallest all-reduce within a node (%(default)s)
        --transport NAME          transport of compressed gradients: collective, in the memory of
                                  devices, or point_to_point, through host memory and gloo; by
                                  default collective for GPUs
        --device NAME             device of the catalog to predict the step for; t4 by default
        --profile FILE            profile written by qsync measure, instead of a model and a device
        """,
        {"latency": float, "gpus_per_node": int, "inside_latency": float},
        latency=5e-5,
        gpus_per_node=1,
        inside_latency=1e-5,
    )
    model_args.add_optimizer(requested)
    add_options(
        requested,
        """
        --codec NAME...  codec to compare, such as qsgd4, or of two levels, such as qsgd4/qsgd8;
                         repeatable; by default all codecs
        --json           print one JSON object
        """,
    )


def _predict(arguments: argparse.Namespace) -> None:
    if arguments.gpus < 2:
        message, where = "gradients are exchanged between at least 2 devices", "--gpus"
        raise OptionError(message, where=where, do="set --gpus to 2 or more")
    bandwidth, inside = _bytes_a_second(arguments.bandwidth, "--bandwidth"), _inside(arguments)

    from qsync_fx.plan.cluster_plan import CODECS, PLAIN, codec_fault, codes_inside
    from qsync_fx.plan.plan import Plan
    from qsync_fx.predictor.cost_mapper.cost_mapper import CostMapper
    from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice, Network, Node
    from qsync_fx.timeline.replay_plans import paying, rates

    for name in arguments.codec:
        if name == PLAIN or codec_fault(name) is not None:
            message = f"there is no prediction for the codec {shown(name)}"
            raise OptionError(message, where="--codec", do=nearest(name, CODECS[1:]))
        if codes_inside({"": name}) and arguments.gpus_per_node == 1:
            message = f"{shown(name)} has a codec inside nodes, but each device is a node"
            do = "describe the nodes with --gpus-per-node and --inside, or remove the second codec"
            raise OptionError(message, where="--codec", do=do)
    transport = _transport(arguments.transport)
    fmt = arguments.precision or "fp32"
    profile = _profile(arguments, fmt)
    on_cpu = profile.graph.device == "cpu"
    if transport is None:
        transport = "point_to_point" if on_cpu else "collective"
    # gloo reduces gradients on the CPU in one ring.
    network = Network(bandwidth, arguments.latency, ring=on_cpu, transport=transport)
    node = Node(arguments.gpus_per_node, inside, arguments.inside_latency)
    fleet = Cluster({_DEVICES: ClusterDevice(arguments.gpus, node=node)}, network)
    mapper = CostMapper(profile.graph, profile.times(), Plan.uniform(fmt))
    schedules = {_DEVICES: mapper.schedule()}
    speeds = rates(fleet, {_DEVICES: profile})
    # 1bit codes columns of parameters, whose shapes a profile lacks; 1bit* is the same rule for
    # consecutive values.
    codecs = arguments.codec or [name for name in CODECS[1:] if name != "1bit"]
    without, result = paying(schedules, fleet, codecs, speeds)
    if arguments.json:
        output.as_json(_as_json(profile, fleet, speeds, without, result))
    else:
        _show(profile, fmt, fleet, speeds, without, result)


def _transport(name: str | None) -> Transport | None:
    from qsync_fx.predictor.replayer.cluster import TRANSPORTS

    if name is None:
        return None
    for item in TRANSPORTS:
        if item == name:
            return item
    do = nearest(name[:40], TRANSPORTS)
    raise OptionError(f"unknown transport {shown(name)}", where="--transport", do=do)


def _profile(arguments: argparse.Namespace, fmt: str) -> Profile:
    from qsync_fx.profiler.analytic_profile import catalog_profile
    from qsync_fx.profiler.profile import Profile

    if arguments.profile is not None:
        if arguments.model is not None or arguments.device is not None:
            raise OptionError(
                "a profile already defines the model and the device",
                where="--profile",
                do="remove the model and --device, or remove --profile",
            )
        return Profile.load(arguments.profile, any_machine=True)
    if arguments.model is None:
        raise OptionError(
            "neither a model nor a profile is given",
            where="MODULE:CALLABLE",
            do="add MODULE:CALLABLE or --profile",
        )
    trained = model_args.read_training(
        argparse.Namespace(**{**vars(arguments), "precision": None, "precisions": None})
    )
    optimizer = model_args.optimizer(arguments.optimizer, trained.module)
    return catalog_profile(
        arguments.device or "t4", trained.module, trained.step, trained.batches[0], [fmt], optimizer
    )


def _inside(arguments: argparse.Namespace) -> float | None:
    """Return the bytes per second of links inside nodes; None without nodes of several devices."""
    size, ranks = arguments.gpus_per_node, arguments.gpus
    if size < 1 or ranks % size or (size > 1 and ranks == size):
        raise OptionError(
            f"{ranks} devices cannot be divided into several nodes of {size}",
            where="--gpus-per-node",
            do="use a number that divides --gpus and is smaller than it",
        )
    if (size > 1) != (arguments.inside is not None):
        raise OptionError(
            "--gpus-per-node and --inside require each other",
            where="--inside",
            do="set both, as in --gpus-per-node 4 --inside 100gbit, or neither",
        )
    if arguments.inside is None:
        return None
    return _bytes_a_second(arguments.inside, "--inside")


def _bytes_a_second(text: str, where: str) -> float:
    result = re.fullmatch(
        r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(bit|b)(?:/s|ps)?\s*", text, flags=re.IGNORECASE
    )
    size = 0.0
    if result is not None:
        number, power, unit = result.groups()
        size = float(number) * _POWERS[power.lower()] * _UNITS[unit.lower()]
    if not size:
        raise OptionError(
            f"{text[:40]!r} is not a bandwidth",
            where=where,
            do="write it as in 1gbit, 100mbit or 12.5GB",
        )
    return size


def _rate(bytes_a_second: float) -> str:
    bits = 8 * bytes_a_second
    power = next((name for name in ("T", "G", "M", "k") if bits >= _POWERS[name.lower()]), "")
    return f"{bits / _POWERS[power.lower()]:.3g} {power}bit/s"


def _show(
    profile: Profile, fmt: str, fleet: Cluster, rates: Rates, without: Paying, result: list[Paying]
) -> None:
    from rich.text import Text

    from qsync_fx.formatting import duration, short
    from qsync_fx.timeline.replay_plans import best

    network = fleet.network
    assert network is not None and network.bandwidth is not None
    bandwidth = network.bandwidth
    model = f"{profile.model.name} of {profile.model.parameters} parameters"
    print(f"{model} in {fmt} on {fleet.ranks} devices: {profile.machine.name}")
    node, several = fleet.devices[_DEVICES].node, ""
    if node.bandwidth:
        several = f" between nodes of {node.ranks}, {_rate(node.bandwidth)} inside"
    print(f"links of {_rate(bandwidth)}{several}; codec speeds are {rates.source}\n")
    cells = [
        {
            "codec": item.codec,
            "sent by a rank": short(item.sent, "B"),
            "sent by a node": short(item.sent, "B"),
            "sent in the node": short(item.inside, "B"),
            "step": duration(item.seconds),
            "speedup": f"{without.seconds / item.seconds:.2f}",
            "coding": duration(item.coding),
            "communication": duration(item.communicating),
            "hidden": f"{item.hidden:.0%}",
            "pays below": _below(item.until),
        }
        for item in (without, *result)
    ]
    cells[0] |= {"speedup": "-", "coding": "-", "pays below": "-"}
    omitted = {"sent by a rank"} if several else {"sent by a node", "sent in the node"}
    columns = [name for name in cells[0] if name not in omitted]
    rows = [[row[name] for name in columns] for row in cells]
    output.show(output.table(columns, rows, right=columns[1:]))
    chosen = best(without, result)
    quickest = min(result, key=lambda item: item.seconds)
    saving = 1 - quickest.seconds / without.seconds
    limit = max((item.until for item in result if item.until is not None), default=0.0)
    hidden = (
        f"Without a codec, computation hides {without.hidden:.0%} of "
        f"{duration(without.communicating)} of communication."
    )
    if chosen is without:
        reason, threshold = "no codec shortens a step", "No codec would pay at any bandwidth."
        if saving > 0:
            gain = f"{quickest.codec} shortens a step by {saving:.1%}"
            reason = f"{gain}, which is within the error of the prediction"
        if limit:
            threshold = f"A codec would pay below {_rate(limit)}."
        summary = f"\nDo not compress: {reason}. {hidden} {threshold}"
    else:
        summary = (
            f"\n{chosen.codec} pays: {duration(chosen.seconds)} per step instead of "
            f"{duration(without.seconds)}, {saving:.0%} less. {hidden} "
            "The effect on the loss is not predicted here: find_plan estimates it, "
            "and a training run shows it."
        )
    if several:
        summary += (
            " Codecs apply to the traffic between nodes, as in compress(..., hierarchical=True);"
            " the second one of qsgd4/qsgd8 applies inside nodes."
        )
    output.show(Text(summary))
    if profile.graph.device != "cpu":
        path = {
            "collective": "collectives exchange them in its memory",
            "point_to_point": "gloo sends them through host memory",
        }[network.transport]
        print(f"On these devices the GPU encodes gradients, and {path}.")


def _below(until: float | None) -> str:
    if until is None:
        return "any"
    return _rate(until) if until else "never"


def _as_json(
    profile: Profile, fleet: Cluster, rates: Rates, without: Paying, result: list[Paying]
) -> dict[str, Any]:
    from qsync_fx.timeline.replay_plans import best

    network, node = fleet.network, fleet.devices[_DEVICES].node
    assert network is not None and network.bandwidth is not None
    return {
        "model": f"{profile.model.name} of {profile.model.parameters} parameters",
        "device": profile.machine.name,
        "ranks": fleet.ranks,
        "ranks_a_node": node.ranks,
        "transport": network.transport,
        "bits_a_second": 8 * network.bandwidth,
        "bits_a_second_inside": node.bandwidth and 8 * node.bandwidth,
        "rates": rates.source,
        "best": best(without, result).codec,
        "codecs": [
            {
                "codec": item.codec,
                "bytes": item.sent,
                "bytes_inside": item.inside,
                "seconds": item.seconds,
                "coding": item.coding,
                "communicating": item.communicating,
                "hidden": item.hidden,
                "pays_below": item.until and 8 * item.until,
            }
            for item in (without, *result)
        ],
    }


_ABOUT = """\
Measures the speed of gradient codecs on this processor.

Runs of each codec are interleaved with a copy of the same memory; a ratio of 1
means as fast as memcpy. GB/s count FP32 values, not encoded bytes. "decode and add"
adds to the output, as the sum over ranks does; "decode" overwrites it."""

_EXAMPLES = """\
examples:
  qsync comm bench                          all codecs on one core
  qsync comm bench --codec qsgd8 --codec '1bit*' --threads 2 --json"""


_WITHOUT_MODEL: Final = {
    "1bit": "1bit encodes the columns of each parameter; here all values form one column.",
    "aqgb": "aqgb chooses its levels during training; here it sends all bits, as aqgb32 does.",
}
"""Notes on codecs that behave differently without a model."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        """
        --codec NAME...        codec to compare; repeatable; by default all codecs
        --megabytes MEGABYTES  size of FP32 gradients in MiB (%(default)s)
        --threads THREADS      threads of torch (%(default)s)
        --repeats REPEATS      interleaved runs; the result is their median (%(default)s)
        --json                 print one JSON list
        """,
        {"megabytes": float, "threads": int, "repeats": int},
        megabytes=26.0,
        threads=1,
        repeats=15,
    )


def _bench(arguments: argparse.Namespace) -> None:
    import dataclasses
    import statistics

    import torch

    from qsync_fx import _C
    from qsync_fx.communication.codec_benchmarks import measured
    from qsync_fx.communication.codecs import NAMES, codec_named
    from qsync_fx.communication.duo.sign_codecs import DUOS
    from qsync_fx.formatting import many

    for name in ("megabytes", "threads", "repeats"):
        if not getattr(arguments, name) > 0:
            message = f"{name} is {getattr(arguments, name)}, but must be positive"
            raise OptionError(message, where=f"--{name}", do="use a number above 0")
    torch.set_num_threads(arguments.threads)
    for name in arguments.codec:
        if name in DUOS:
            message = f"{name} is a DUO optimizer mode, not a codec: it computes lookahead steps"
            do = f"train with compress(ddp, {name!r}, optimizer=optimizer), or measure its codec"
            raise OptionError(message, where="--codec", do=do)
    codecs = [codec_named(name) for name in arguments.codec or NAMES]
    values = max(1, round(arguments.megabytes * 2**18))
    result = []
    with output.progress("codecs", len(codecs)) as advance:
        for codec in codecs:
            result += measured([codec], values, arguments.repeats)
            advance(codec.name)
    if arguments.json:
        output.as_json([dataclasses.asdict(speed) for speed in result])
        return
    rows = []
    for speed in result:
        speeds = (speed.encode, speed.read, speed.decode)
        ratios = (speed.encode_to_copy, speed.read_to_copy, speed.decode_to_copy)
        numbers = [f"{value / 1e9:.1f}" for value in speeds] + [f"{ratio:.2f}" for ratio in ratios]
        rows.append((speed.codec, f"{speed.bits:.3f}", *numbers))
    copy = statistics.median(speed.copy for speed in result) / 1e9
    print(
        f"{values / 2**18:.3g} MiB of FP32 gradients, {many(arguments.threads, 'thread')}, "
        f"{_C.isa()} kernels, medians of {many(arguments.repeats, 'run')}; memcpy {copy:.1f} GB/s\n"
    )
    operations = ("encode", "decode", "decode and add")
    speed_names = (f"{operation} GB/s" for operation in operations)
    ratio_names = (f"{operation} / memcpy" for operation in operations)
    columns = ("codec", "bits per value", *speed_names, *ratio_names)
    output.show(output.table(columns, rows, right=columns[1:]))
    notes = [_WITHOUT_MODEL[speed.codec] for speed in result if speed.codec in _WITHOUT_MODEL]
    if notes:
        print("\n" + "\n".join(notes))


COMMAND = Command(
    "measure and predict gradient compression",
    about="Measures the speed of gradient codecs, and predicts where compression pays.",
    actions={
        "bench": Command(
            "measure codecs relative to memcpy on this processor",
            _bench,
            _arguments,
            _ABOUT,
            _EXAMPLES,
        ),
        "predict": Command(
            "predict which codec pays, and below which bandwidth",
            _predict,
            _add_predict_arguments,
            _PREDICT_ABOUT,
            _PREDICT_EXAMPLES,
        ),
    },
)
