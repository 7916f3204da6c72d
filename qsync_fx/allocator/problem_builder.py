"""Builder of a `Problem` from device profiles, a cluster and a planning request.

Assumptions, such as formats that are left out, appear as notes of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from qsync_fx.allocator.codec_choice import CodecSearchSpace
from qsync_fx.allocator.feasibility import check_margin
from qsync_fx.allocator.objectives import objective_named
from qsync_fx.allocator.plan_result import PlanNote, PlanNoteKind
from qsync_fx.allocator.problem import DeviceClass, Problem
from qsync_fx.errors import OptionError, PlanError, ProfileError, nearest, shown
from qsync_fx.formats import FORMATS, precision, precisions as named
from qsync_fx.plan.cluster_plan import CODECS, INSIDE_CODECS, PLAIN, two_levels
from qsync_fx.predictor.analytic_times import DeviceTimes
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.predictor.model.model_graph import Choices, ModelGraph, isomorphic_blocks
from qsync_fx.predictor.replayer.cluster import WAYS, Cluster, Memory, memory_size
from qsync_fx.profiler.batch_interpolation import BatchInterpolation
from qsync_fx.profiler.profile import Profile, anchors
from qsync_fx.timeline.device_profiles import (
    DeviceInputs,
    conditions,
    graph_of,
    measured_batches,
    training_of,
)
from qsync_fx.timeline.replay_plans import rates


@dataclass(frozen=True)
class PlanRequest:
    """User's objective, limits and options; see `find_plan`."""

    objective: str = "hybrid"
    budget: str | float | None = None
    memory: Mapping[str, Memory] | Memory | None = None
    target: str | float | None = None
    precisions: Sequence[str] | None = None
    sensitivity: Sensitivity | Mapping[str, Sensitivity] | None = None
    tie_blocks: bool = False
    codecs: Sequence[str] = ()
    margin: float | None = None
    inside_codecs: Sequence[str] = ()

    def check(self) -> None:
        """Check all settings that do not depend on profiles, so that callers can fail early."""
        objective_named(self.objective).check(self.budget, self.target)
        for limit in (self.budget, self.target):
            if isinstance(limit, str):
                precision(limit)
        named(self.precisions or ())
        codecs = codec_names(self.codecs)
        inside = codec_names(self.inside_codecs, INSIDE_CODECS, "inside_codecs")
        if inside and not codecs:
            message = "codecs inside nodes are chosen only with codecs between nodes"
            raise OptionError(message, where="inside_codecs", do='add codecs=("qsgd8", "qsgd4")')
        check_margin(self.margin)
        _check_memory(self.memory)

    def seconds_limit(self, problem: Problem) -> float | None:
        """Return the limit of seconds per step of the objective; None for no limit."""
        return objective_named(self.objective).seconds(problem, self.budget, self.target)


def build_problem(
    fleet: Cluster, available: Mapping[str, DeviceInputs], wishes: PlanRequest
) -> tuple[Problem, list[PlanNote]]:
    """Return the problem, and notes on the assumptions behind it."""
    wishes.check()
    if wishes.precisions is not None:
        check_precisions(available, wishes.precisions)
    notes: list[PlanNote] = []
    limits = _limits(fleet, wishes.memory)
    classes = {
        name: _class(name, available, wishes, limits.get(name), fleet.ranks > 1, notes)
        for name in fleet.devices
    }
    graph = next(iter(classes.values())).graph
    tied = _tied(graph) if wishes.tie_blocks else ()
    coding = _coding(fleet, available, wishes, notes)
    problem = Problem(classes, fleet, tied=tied, coding=coding)
    problem = objective_named(wishes.objective).constrained(problem, wishes.budget, notes)
    return replace(problem, seconds=wishes.seconds_limit(problem)), notes


def with_measured_batches(fleet: Cluster, available: Mapping[str, DeviceInputs]) -> Cluster:
    """Return the cluster, in which profiles determine batches that it does not contain."""
    devices = {
        name: device
        if device.batch is not None
        else replace(device, batch=getattr(available[name], "batch_size", None))
        for name, device in fleet.devices.items()
    }
    return replace(fleet, devices=devices)


def class_at_batch(
    classes: Mapping[str, DeviceClass],
    available: Mapping[str, DeviceInputs],
    resized: Callable[[DeviceClass, int], DeviceClass] | None = None,
) -> Callable[[str, int], DeviceClass]:
    """Return a function from a class name and a batch to the class with this batch.

    Profiles of several batch sizes are interpolated, and classes of others are `resized`.

    Raises:
        OptionError: a profile has one batch size, and `resized` is None.
    """
    measured = {
        name: BatchInterpolation(item) for name, item in available.items() if measured_batches(item)
    }
    if resized is None and (single := [name for name in classes if name not in measured]):
        raise OptionError(
            f"the profile of {shown(single[0])} covers one batch size",
            where="batch",
            do="measure several: qsync_fx.measure(..., batch_sizes=(8, 32)) or qsync measure "
            "MODULE:CALLABLE --batch-sizes 8,32; or scale its times: qsync plan MODULE:CALLABLE",
        )

    def result(name: str, batch: int) -> DeviceClass:
        part = classes[name]
        if name not in measured:
            assert resized is not None
            return resized(part, batch)
        profile = measured[name].at(batch)
        before = getattr(available[name], "batch_size", batch)
        return replace(
            part,
            graph=profile.graph,
            times=profile.times(),
            sensitivity=part.sensitivity.at_batch(before, batch),
            training=part.training and training_of(profile, part.training.buckets),
            anchors=tuple(anchors(profile, planned=True)),
        )

    return result


def codec_names(
    names: Sequence[str], allowed: Sequence[str] = CODECS, where: str = "codecs"
) -> list[str]:
    """Return distinct names of codecs other than FP32; raise `OptionError` for an unknown codec."""
    codecs = [names] if isinstance(names, str) else list(names)
    for name in codecs:
        if name not in allowed:
            message = f"a plan has no codec {shown(str(name))}"
            if name in CODECS:
                message += " inside nodes, where codecs have no error feedback"
            raise OptionError(message, where=where, do=nearest(str(name), allowed))
    return [name for name in dict.fromkeys(codecs) if name != PLAIN]


def _check_memory(memory: Mapping[str, Memory] | Memory | None) -> None:
    """Raise `PlanError` for a memory that is neither a number of bytes nor a share."""
    sizes = memory if isinstance(memory, Mapping) else {"": memory}
    for name, size in sizes.items():
        if size is not None and memory_size(size) is None:
            where = f"memory {name}".strip()
            raise PlanError(f"{shown(str(size))} is no memory", where=where, do=WAYS)


def _coding(
    fleet: Cluster,
    available: Mapping[str, DeviceInputs],
    wishes: PlanRequest,
    notes: list[PlanNote],
) -> CodecSearchSpace | None:
    codecs = codec_names(wishes.codecs)
    if not codecs:
        return None
    if fleet.compression is not None:
        do = "remove [compression] from the cluster's file, or the codecs"
        message = "the cluster already has a compression of gradients"
        raise ProfileError(message, where="compression", do=do)
    if fleet.ranks == 1:
        notes.append(PlanNote(PlanNoteKind.NOT_SENT))
        return None
    if fleet.nodes == 1:
        notes.append(PlanNote(PlanNoteKind.ONE_NODE))
        return None
    inside = codec_names(wishes.inside_codecs, INSIDE_CODECS)
    if inside and fleet.ranks_per_node == 1:
        notes.append(PlanNote(PlanNoteKind.NOT_INSIDE))
        inside = []
    if fleet.transport == "point_to_point":
        for name, profile in available.items():
            if graph_of(name, profile).device != "cpu":
                notes.append(PlanNote(PlanNoteKind.BY_HOST, name))
    choices = [two_levels(codec, local) for codec in codecs for local in (PLAIN, *inside)]
    return CodecSearchSpace((PLAIN, *choices), rates(fleet, available))


def _class(
    name: str,
    available: Mapping[str, DeviceInputs],
    wishes: PlanRequest,
    memory: float | None,
    sends: bool,
    notes: list[PlanNote],
) -> DeviceClass:
    profile = available[name]
    graph, result = graph_of(name, profile), _sensitivity(name, available, wishes.sensitivity)
    formats, lacking = _formats_of_class(name, profile, graph, wishes.precisions)
    if lacking:
        notes.append(PlanNote(PlanNoteKind.HAS_NOT, name, formats=tuple(lacking)))
    unknown = [fmt for fmt in formats if _unknown(graph, result, fmt)]
    if unknown and (wishes.precisions or len(unknown) == len(formats)):
        operator = shown(_unknown(graph, result, unknown[0]))
        message = f"the sensitivity of {operator} in {shown(unknown[0])} is unknown"
        do = f"measure the sensitivity in {', '.join(formats)}, or plan with other formats"
        raise ProfileError(message, where=f"the sensitivity for {shown(name)}", do=do)
    if unknown:
        notes.append(PlanNote(PlanNoteKind.LEFT_OUT, name, formats=tuple(unknown)))
    return DeviceClass(
        graph,
        profile if isinstance(profile, DeviceTimes) else profile.times(),
        result,
        tuple(fmt for fmt in formats if fmt not in unknown),
        training=training_of(profile, sends),
        memory=memory,
        conditions=conditions(available).get(name, ""),
        anchors=tuple(anchors(profile, planned=True)) if isinstance(profile, Profile) else (),
    )


def _sensitivity(
    name: str,
    available: Mapping[str, DeviceInputs],
    value: Sensitivity | Mapping[str, Sensitivity] | None,
) -> Sensitivity:
    """Return the given sensitivity of a class, else that in its or another class's profile.

    A sensitivity from another profile is scaled to the batch of the class's profile.
    """
    if isinstance(value, Sensitivity):
        return value
    if value is not None:
        if name not in value:
            message = f"there is no sensitivity for the devices {shown(name)}"
            do = "give one for each class, or one for all"
            raise ProfileError(message, where="sensitivity", do=do)
        return value[name]
    for profile in (available[name], *available.values()):
        result = getattr(profile, "sensitivity", None)
        if isinstance(result, Sensitivity):
            before = getattr(profile, "batch_size", None)
            after = getattr(available[name], "batch_size", None)
            return result.at_batch(before, after) if before and after else result
    message = "no profile contains how much an operator in a narrow format disturbs gradients"
    do = "measure with sensitivity, or give one: sensitivity=qsync_fx.sensitivity(...)"
    raise ProfileError(message, where="sensitivity", do=do)


def _formats_of_class(
    name: str, profile: DeviceInputs, graph: ModelGraph, precisions: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """Return the formats that plans of a class may use, and the requested ones that it lacks."""
    owned = _formats(profile, graph)
    if precisions is None:
        return owned, []
    requested = [fmt.name for fmt in named(precisions)]
    # A profile's graph can support more formats than were measured.
    available = owned
    if not isinstance(profile, DeviceTimes):
        available = list(graph.formats)
    if not (result := [fmt for fmt in requested if fmt in available]):
        message = f"{shown(name)} has none of the allowed formats: {', '.join(requested) or 'none'}"
        do = f"allow one of {', '.join(owned)}, or measure in others"
        raise PlanError(message, where="precisions", do=do)
    return result, [fmt for fmt in requested if fmt not in available]


def check_precisions(available: Mapping[str, DeviceInputs], precisions: Sequence[str]) -> None:
    """Raise `PlanError` if a class lacks all formats, or all classes lack one of them."""
    lacking = [
        set(_formats_of_class(name, profile, graph_of(name, profile), precisions)[1])
        for name, profile in available.items()
    ]
    for fmt in (item.name for item in named(precisions)):
        if all(fmt in item for item in lacking):
            owned = [_formats(item, graph_of(name, item)) for name, item in available.items()]
            have = dict.fromkeys(name for formats in owned for name in formats)
            message = f"{shown(fmt)} is not supported by {', '.join(available)}, or not measured"
            do = f"allow some of {', '.join(have)}, or measure in others"
            raise PlanError(message, where="precisions", do=do)


def _formats(profile: DeviceInputs, graph: ModelGraph) -> list[str]:
    measured = getattr(profile, "precisions", None)
    if measured is None and isinstance(profile, DeviceTimes):
        measured = [fmt for fmt in graph.formats if fmt in profile.device.units]
    result = [fmt for fmt in measured or graph.formats if FORMATS[fmt].bits <= 32]
    return result or list(graph.formats)


def _unknown(graph: ModelGraph, available: Sensitivity, fmt: str) -> str:
    """Return the first operator with unknown sensitivity in a uniform plan of a format, or ""."""
    for operator in graph.operators:
        if isinstance(operator.decided, Choices):
            runs = operator.decided.pinned
            if runs is None:
                runs = operator.decided.runs[fmt]
            if FORMATS[runs].bits < 32 and runs not in available.variance.get(operator.id, {}):
                return operator.id
    return ""


def _tied(graph: ModelGraph) -> tuple[tuple[str, ...], ...]:
    adjustable = {
        operator.id for operator in graph.operators if isinstance(operator.decided, Choices)
    }
    groups = (group for blocks in isomorphic_blocks(graph) for group in blocks.tied)
    return tuple(group for group in groups if adjustable.issuperset(group))


def _limits(fleet: Cluster, value: Mapping[str, Memory] | Memory | None) -> dict[str, float]:
    """Return the memory limit in bytes of each limited class; user limits have precedence."""
    named = {
        name: device.memory for name, device in fleet.devices.items() if device.memory is not None
    }
    requested: Mapping[str, Memory | None]
    if isinstance(value, Mapping):
        requested = value
    else:
        requested = dict.fromkeys(fleet.devices, value)
    for name, size in requested.items():
        if name not in fleet.devices:
            message = f"there are no devices {shown(name)}"
            raise PlanError(message, where="memory", do=nearest(name, fleet.devices))
        if size is not None:
            named[name] = size
    return {name: _bytes(fleet, name, size) for name, size in named.items()}


def _bytes(fleet: Cluster, name: str, memory: Memory) -> float:
    if (result := fleet.bytes_of(name, memory)) is not None:
        return result
    if memory_size(memory) is None:
        where = f"memory of {shown(name)}"
        raise PlanError(f"{shown(str(memory))} is no memory", where=where, do=WAYS)
    message = f"the memory of {shown(name)} is unknown, so that {memory} of it is not known"
    do = "give bytes, or add the memory of the device to the cluster's file"
    raise PlanError(message, where="memory", do=do)
