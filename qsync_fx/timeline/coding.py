"""What a plan's codecs make of the buckets of a cluster, and how fast its devices code, from what is known of them.

Invariant: rates that are reckoned say from what. A plan that compresses nothing leaves buckets to DistributedDataParallel; under any other
all of them go through our exchange, those in FP32 too.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from qsync_fx.communication.codecs import PLAIN
from qsync_fx.communication.speeds.foreseen import by_bucket
from qsync_fx.communication.speeds.rates import COPY, Rates, of_copy, of_gpu, of_speeds, slowed, slowest
from qsync_fx.devices import Device, get, names
from qsync_fx.errors import ProfileError, shown
from qsync_fx.predictor.reckoned.times import DeviceTimes
from qsync_fx.predictor.replay.cluster import Cluster
from qsync_fx.predictor.replay.fleet import Coded
from qsync_fx.predictor.schedule import Schedule
from qsync_fx.timeline.known import Known, graph_of


def compression(
    schedules: Mapping[str, Schedule], fleet: Cluster, codecs: Mapping[str, str], known: Mapping[str, Known]
) -> Sequence[Coded] | None:
    """Returns what is done to each bucket where parameters have codecs; None where nothing is compressed.

    Raises:
        ProfileError: the cluster's file says what is done to gradients, too, or a parameter is none of the model.
    """
    if all(codec == PLAIN.name for codec in codecs.values()):
        return None
    if fleet.compression is not None:
        do = "leave [compression] out of the cluster's file, or codecs out of the plan"
        raise ProfileError("both the cluster and the plan say what is done to gradients", where="compression", do=do)
    parameters = next(iter(schedules.values())).parameters
    paths = {parameter.path for parameter in parameters}
    if (strange := next((path for path in codecs if path not in paths), None)) is not None:
        what = f"the plan has a codec for the gradient of {shown(strange)}, which the model does not train"
        raise ProfileError(what, where="codecs", do="replay the plan with profiles of its model")
    return by_bucket(schedules, fleet, codecs, rates(fleet, known))


def rates(fleet: Cluster, known: Mapping[str, Known]) -> Rates:
    """Returns the rates of the slowest class of devices."""
    return slowest(
        [slowed(_of_class(fleet, name, known[name]), device.slowdown) for name, device in fleet.devices.items()]
    )


def of_catalog(device: Device) -> Rates:
    """Returns what codecs make of the memory of a device, of which a copy reads and writes each byte."""
    copy, host = device.memory.bandwidth * device.memory.fraction / 2, device.memory.host
    if host:
        said = f"its memory copies {copy / 1e9:.3g} GB/s, and {host / 1e9:.3g} GB/s go to its host"
        return of_gpu(copy, host, f"reckoned for {device.title}: {said}")
    return of_copy(copy, f"reckoned for {device.title}: its memory copies {copy / 1e9:.3g} GB/s")


def _of_class(fleet: Cluster, name: str, profile: Known) -> Rates:
    if speeds := getattr(profile, "codecs", ()):
        return of_speeds(speeds, f"measured on {name}")
    called = fleet.devices[name].device
    stem = pathlib.PurePath(graph_of(name, profile).device).stem
    if isinstance(profile, DeviceTimes):
        return of_catalog(profile.device)
    if called is not None or stem in names():
        return of_catalog(get(called or stem))
    return of_copy(COPY, f"reckoned for {name}: a core that copies {COPY / 1e9:.3g} GB/s")
