"""Cost model of gradient codecs: bytes on the wire and seconds of coding for a bucket.

The speed of a codec relative to a memory copy is almost the same on all processors. Invariant:
bytes are the mean over ranks of what `Reducer` and `Hierarchy` send, with headers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from qsync_fx.communication.bucket import gathered, threshold
from qsync_fx.communication.codecs import PLAIN, codec_named
from qsync_fx.communication.codecs.casts import CODECS as CASTS
from qsync_fx.communication.codecs.codec import Codec
from qsync_fx.communication.codecs.qsgd import CODECS as QSGD
from qsync_fx.communication.codecs.truncation import Adaptive
from qsync_fx.communication.message_header import HEADER
from qsync_fx.communication.point_to_point import VALUES
from qsync_fx.devices.device_model import Device
from qsync_fx.errors import ProfileError, nearest, shown
from qsync_fx.plan.cluster_plan import levels_of
from qsync_fx.predictor.cost_mapper.times import Parameter, Schedule
from qsync_fx.predictor.replayer.cluster import Cluster
from qsync_fx.predictor.replayer.cluster_step import CompressedTransfer, buckets_of


@dataclass(frozen=True)
class Rate:
    """Speed of a codec in FP32 bytes/s: encoding, and decoding that adds to existing values."""

    encode: float
    decode: float


@dataclass(frozen=True)
class Rates:
    """Speeds of codecs by name, and the origin of the numbers in words."""

    source: str
    by_codec: Mapping[str, Rate] = field(repr=False)

    def of(self, codec: str) -> Rate:
        """Return the rate of a codec; raise `ProfileError` if it is unknown."""
        if codec in self.by_codec:
            return self.by_codec[codec]
        description = f"the speed of the codec {shown(codec)} is unknown"
        raise ProfileError(description, where=self.source, do=nearest(codec, self.by_codec))


COPY: Final = 12e9
"""memcpy bytes/s of one core: 9 to 27 GB/s measured, 12 on slow memory (docs/communication.md)."""

_TO_COPY: Final = {
    PLAIN.name: (0.96, 1.09),
    "1bit*": (1.06, 1.58),
    "1bit": (0.55, 0.67),  # as 1bit*, with a copy to column order
    "qsgd2": (0.93, 1.50),
    "qsgd4": (1.03, 1.47),
    "qsgd8": (1.12, 1.43),
    "qsgd16": (0.97, 1.28),
    "qsgd2h": (0.63, 0.91),
    "qsgd4h": (0.53, 0.77),
    "qsgd8h": (0.55, 0.73),
    "aqgb12": (1.24, 1.30),
    "aqgb16": (1.16, 1.41),
    "aqgb20": (1.01, 1.15),
    "aqgb24": (1.00, 1.05),
    "aqgb28": (0.88, 0.87),
    "aqgb32": (0.88, 0.96),
    "aqgb": (0.88, 0.96),  # its highest level
    **dict.fromkeys((codec.name for codec in CASTS[1:]), (1.16, 0.50)),  # mean of FP16 and BF16
}
"""Encode and decode speed relative to memcpy: benchmarks/results/gradient_codecs.json, AVX-512."""
_TO_COPY_OF_A_GPU: Final = {
    PLAIN.name: (1.0, 1.0),
    "1bit*": (0.063, 0.31),
    "1bit": (0.026, 0.26),  # operator by operator
    "qsgd2": (0.22, 0.39),
    "qsgd4": (0.21, 0.44),
    "qsgd8": (0.20, 0.53),
    "qsgd16": (0.17, 0.34),
    **dict.fromkeys((codec.name for codec in CASTS[1:]), (1.13, 0.73)),
}
"""The same relative to a copy in GPU memory, fused by Inductor: H200, 100 MB (gpu_codecs.json)."""


def _with_stages(codec: Codec) -> tuple[float, float]:
    """Return a lower bound of the speed of a Hadamard transform's codec relative to a GPU's copy.

    No GPU measured it: each stage of the transform is assumed to read and write all values.
    """
    encode, decode = _TO_COPY_OF_A_GPU[codec.name.removesuffix("h")]
    stages = math.log2(codec.unit)
    return 1 / (1 / encode + stages), 1 / (1 / decode + stages)


_MANY: Final = 2**20


def of_device(
    device: Device | None, name: str, speeds: Iterable[Any] = (), on_device: bool = False
) -> Rates:
    """Return the rates of a device class: measured ones, or else predicted ones.

    Args:
        device: row of the catalog; None predicts for a CPU core with common memory.
        name: name of the device class.
        speeds: values with a codec's name, its encode and decode rate as in `Rate`, and whether
            its bytes stay on the device.
        on_device: whether coded bytes of a GPU stay in its memory, as with the transport
            "collective", so that the rates exclude copies to and from the host.
    """
    if speeds := list(speeds):
        # On a CPU, both are the same, and one is measured.
        same = [item for item in speeds if item.on_device == on_device]
        return of_speeds(same or speeds, f"measured on {name}")
    if device is None:
        return of_copy(COPY, f"predicted for {name}: {COPY / 1e9:.3g} GB/s for copies by one core")
    # A copy reads and writes each byte.
    copy, host = device.memory.bandwidth * device.memory.fraction / 2, device.memory.host
    source = f"predicted for {device.title}: {copy / 1e9:.3g} GB/s for copies in its memory"
    if host and on_device:
        return of_gpu(copy, math.inf, source)
    if host:
        return of_gpu(copy, host, f"{source}, {host / 1e9:.3g} GB/s to the host")
    return of_copy(copy, source)


def of_copy(copy: float, source: str) -> Rates:
    """Return predicted rates for memory that copies `copy` bytes/s."""
    table = _TO_COPY.items()
    return Rates(source, {name: Rate(*(copy * item for item in pair)) for name, pair in table})


def of_gpu(copy: float, host: float, source: str) -> Rates:
    """Return predicted rates, for bytes/s of a copy in GPU memory, and to and from the host.

    `host` is infinity if coded bytes stay in GPU memory.
    """
    rotated = [codec for codec in QSGD if codec.rotated]
    on_gpu = {**_TO_COPY_OF_A_GPU, **{codec.name: _with_stages(codec) for codec in rotated}}
    table = {}
    for name, (encode, decode) in {**_TO_COPY, **on_gpu}.items():
        memory, share = COPY, 1.0  # AQGB codes on the host
        if name in on_gpu:
            memory, share = copy, codec_named(name).fitted((1024, 1024)).theory(_MANY) / (4 * _MANY)
        sending = share / host  # seconds for each FP32 byte
        encoding, decoding = 1 / (memory * encode), 1 / (memory * decode)
        table[name] = Rate(1 / (encoding + sending), 1 / (decoding + sending))
    return Rates(source, table)


def of_speeds(speeds: Iterable[Any], source: str) -> Rates:
    return Rates(source, {item.codec: Rate(item.encode, item.decode) for item in speeds})


def slowed(rates: Rates, times: float) -> Rates:
    """Return the rates divided by a slowdown factor."""
    table = {name: Rate(r.encode / times, r.decode / times) for name, r in rates.by_codec.items()}
    return Rates(rates.source, table)


def slowest(several: Sequence[Rates]) -> Rates:
    """Return the slowest rates over all devices, for the codecs that all of them have."""
    result = {}
    for name in several[0].by_codec:
        rates = [item.by_codec[name] for item in several if name in item.by_codec]
        if len(rates) == len(several):
            result[name] = Rate(min(r.encode for r in rates), min(r.decode for r in rates))
    return Rates("; ".join(dict.fromkeys(item.source for item in several)), result)


_WIDE = 4  # bytes of an FP32 value


def coded(
    parameters: Sequence[Parameter],
    codecs: Mapping[str, str],
    ranks: int,
    rates: Rates,
    name: str = "",
    size: int = 1,
) -> CompressedTransfer:
    """Return the cost of a bucket with these parameters; without a codec, they stay in FP32.

    `name` replaces the codec of most values in the result; the `size` ranks of a node reduce with
    the codec of two levels that is for the inside of nodes, or else in FP32. Raise `ProfileError`
    if a codec depends on shapes or has no rate.
    """
    names = [codecs.get(parameter.path, PLAIN.name) for parameter in parameters]
    levels = [levels_of(codec) for codec in names]
    fitted = [_codec_for(p, level[0]) for p, level in zip(parameters, levels, strict=True)]
    # Between nodes, each rank averages one shard of all values.
    nodes = ranks // size
    methods = gathered(fitted, nodes)
    values: Counter[str] = Counter()
    sent = seconds = 0.0
    for parameter, codec, full, text in zip(parameters, fitted, methods, names, strict=True):
        encoded, decoded = volumes(nodes, full)
        rate, nbytes = rates.of(codec.name), _WIDE * parameter.numel
        sent += _as_all_reduce(codec.nbytes(parameter.numel), nodes, full)
        seconds += nbytes / size * (encoded / rate.encode + decoded / rate.decode)
        values[text] += parameter.numel
    # In each phase, each rank of a node sends one message to every other node.
    headers, phases = 0.0, 0
    for full, phases_of_method, nbytes in ((True, 1, HEADER), (False, 2, HEADER * nodes)):
        if full in methods:
            headers += size * _as_all_reduce(nbytes, nodes, full)
            phases += phases_of_method
    inside = inside_seconds = 0.0
    if size > 1:
        encoded, decoded = volumes(size, full=False)
        for parameter, (_, local) in zip(parameters, levels, strict=True):
            rate, nbytes = rates.of(local), _WIDE * parameter.numel
            inside += codec_named(local).nbytes(parameter.numel)
            inside_seconds += nbytes * (encoded / rate.encode + decoded / rate.decode)
        inside += HEADER * size
    name = name or max(values, key=values.__getitem__, default=PLAIN.name)
    # A message covers the rank's shard of the node; in a reduce-scatter, a shard of this shard.
    shards = size
    if not all(methods):
        shards *= nodes
    chunks = max(math.ceil(values.total() / shards / VALUES), 1)
    return CompressedTransfer(name, sent + headers, seconds, phases, inside, chunks, inside_seconds)


def by_bucket(
    schedules: Mapping[str, Schedule], fleet: Cluster, codecs: Mapping[str, str], rates: Rates
) -> list[CompressedTransfer] | None:
    """Return the cost of each bucket of a cluster; None if no parameter has a codec."""
    if all(codec == PLAIN.name for codec in codecs.values()):
        return None
    parameters, size = next(iter(schedules.values())).parameters, fleet.ranks_per_node
    return [
        coded([parameters[i] for i in bucket], codecs, fleet.ranks, rates, size=size)
        for bucket in buckets_of(schedules, fleet)
    ]


def volumes(ranks: int, full: bool) -> tuple[float, float]:
    """Return how often a rank encodes and decodes the values; `full` for one all-gather."""
    if ranks == 1:
        return 0.0, 0.0
    # Reduce-scatter and all-gather: encode all, decode one shard of all ranks, encode its mean,
    # and decode the means of all shards.
    return (1.0, float(ranks)) if full else (1 + 1 / ranks, 2.0)


def _as_all_reduce(nbytes: float, ranks: int, full: bool) -> float:
    """Return the size of the all-reduce with the same traffic as an exchange of `nbytes`."""
    return nbytes * ranks / 2 if full else nbytes


def small(parameters: Sequence[Parameter]) -> set[str]:
    """Return the parameters below the size threshold of `compress`, which stay in FP32."""
    least = threshold([parameter.numel for parameter in parameters])
    return {parameter.path for parameter in parameters if parameter.numel < least}


def uniform(parameters: Sequence[Parameter], codec: str) -> dict[str, str]:
    """Return the same codec for all parameters that are not small."""
    out = small(parameters)
    return {parameter.path: codec for parameter in parameters if parameter.path not in out}


def _codec_for(parameter: Parameter, name: str) -> Codec:
    codec = codec_named(name)
    if isinstance(codec, Adaptive):
        reason, do = "adapts its bits to the link", "predict one of its levels"
    elif codec.fitted((parameter.numel,)) != codec:
        reason, do = "depends on the shapes of parameters", "use a codec such as 1bit*"
    else:
        return codec
    description = f"the cost of {name} cannot be predicted: it {reason}"
    raise ProfileError(description, where=parameter.path, do=do)
