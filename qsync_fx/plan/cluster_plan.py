"""The plan of a cluster: a plan, a local batch size and an activation memory budget per device
class, and a gradient codec per parameter.

All ranks share one file. A rank without a class raises: no rank trains under another's plan. The
parameters of a bucket share a codec, except small ones, which are sent in FP32. If several ranks
share a node, "qsgd4/qsgd8" is the codec between nodes and the codec inside them.
"""

from __future__ import annotations

import hashlib
import os
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import distributed

from qsync_fx import environment
from qsync_fx.errors import PlanError, nearest, shown
from qsync_fx.formats import FORMATS, FP32, Precision
from qsync_fx.html_view import HtmlView
from qsync_fx.plan.plan import (
    CLUSTER_PLAN,
    DEVICE_CLASS,
    PLAN,
    Plan,
    json_text,
    load_plan,
    notes_of,
)
from qsync_fx.serialization.schema import Path
from qsync_fx.serialization.strict_json import Parsed, kind, shown_value, step

PLAIN: Final = FP32.name
"""Gradients without compression."""
CODECS: Final = (
    PLAIN,
    *(row.name for row in FORMATS.values() if row.plain and row.bits == 16),
    "1bit",
    "1bit*",
    *(f"qsgd{bits}" for bits in (2, 4, 8, 16)),
    *(f"qsgd{bits}h" for bits in (2, 4, 8)),
)
"""Names of all codecs."""
INSIDE_CODECS: Final = tuple(name for name in CODECS if not name.startswith("1bit"))
"""Names of the codecs that can be used inside nodes: consecutive values, no error feedback."""
LEVELS: Final = "/"
"""Separator of the codecs of two levels."""
TRANSPORT: Final = "transport of coded gradients"
"""Note of a plan with codecs: the transport whose durations the prediction assumes."""
BETWEEN_NODES: Final = "codecs between nodes of"
"""Note of a plan whose codecs apply only between nodes; its text is the ranks per node."""
_IN_A_ROW: Final = " in a row"


def between_nodes(ranks: int, in_a_row: bool = False) -> dict[str, str]:
    """Return the note for nodes of `ranks` ranks; `in_a_row`: of consecutive ranks."""
    return {BETWEEN_NODES: f"{ranks} ranks{_IN_A_ROW * in_a_row}"}


def nodes_noted(notes: Mapping[str, str]) -> tuple[int, bool] | None:
    """Return the arguments of `between_nodes` for these notes; None without such a note."""
    result = re.fullmatch(rf"([1-9]\d{{0,8}}) ranks({_IN_A_ROW})?", notes.get(BETWEEN_NODES, ""))
    return result and (int(result[1]), result[2] is not None)


def two_levels(between: str, inside: str) -> str:
    """Return the text for a codec between nodes and a codec inside them."""
    return between if PLAIN in (between, inside) else f"{between}{LEVELS}{inside}"


def levels_of(codec: str) -> tuple[str, str]:
    """Return the codec between nodes, or without nodes between ranks, and that inside nodes."""
    between, _, inside = codec.partition(LEVELS)
    return between, inside or PLAIN


def codes_inside(codecs: Mapping[str, str]) -> bool:
    """Return whether any parameter has a codec inside nodes."""
    return any(LEVELS in codec for codec in codecs.values())


def codec_fault(codec: str) -> tuple[str, str] | None:
    """Return the problem of the text of a codec, of one or two levels, and its remedy."""
    between, separator, inside = codec.partition(LEVELS)
    if between not in CODECS:
        problem = f"{shown_value(between)} is not a gradient codec"
        return problem, nearest(between[:40], CODECS)
    if separator and inside not in INSIDE_CODECS:
        problem = f"{shown_value(inside)} is not a gradient codec inside nodes"
        return problem, nearest(inside[:40], INSIDE_CODECS)
    if separator and PLAIN in (between, inside):
        problem = f"{shown_value(codec)} has FP32 on one of two levels"
        return problem, f"write {between!r}"
    return None


def checked(value: object) -> dict[str, str]:
    """Return codecs by parameter; raise `PlanError` if they are invalid."""
    do = 'map parameter names to codecs, as in {"fc.weight": "qsgd8"}'
    if not isinstance(value, Mapping):
        raise PlanError(f"codecs must be a mapping, not {kind(value)}", where="codecs", do=do)
    for name, codec in value.items():
        where = f"codecs{step(str(name))}"
        if not isinstance(name, str) or not name or not name.isprintable():
            raise PlanError("a parameter name must be a printable string", where=where, do=do)
        if not isinstance(codec, str):
            message = f"{shown_value(codec)} is not a gradient codec"
            raise PlanError(message, where=where, do=nearest(str(codec)[:40], CODECS))
        if (fault := codec_fault(codec)) is not None:
            message, remedy = fault
            raise PlanError(message, where=where, do=remedy)
    return dict(value)


CHOSEN_BY = "chosen by"
"""Note of a part: how its class was chosen."""
CLUSTER = "cluster plan"
"""Note of a part: a hash of the cluster plan's content."""
LOCAL_BATCH = "local batch"
"""Note of a part: samples per step of each rank of its class."""
MEMORY_BUDGET = "memory budget"
"""Note of a part: activation memory budget of its class, in [0, 1]."""


def local_batch(notes: Mapping[str, str]) -> int | None:
    """Return the samples per step of a rank from the notes of its plan; None if not planned."""
    text = notes.get(LOCAL_BATCH, "")
    return int(text) if re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII) else None


def memory_budget(notes: Mapping[str, str]) -> float | None:
    """Return the activation memory budget from the notes of a plan; None if not planned."""
    try:
        result = float(notes.get(MEMORY_BUDGET, ""))
    except ValueError:
        return None
    return result if 0 <= result <= 1 else None


@dataclass(frozen=True)
class LocalPlan:
    """Rank, number of ranks, if known, and device name of a process, which select its part."""

    rank: int | None
    world: int | None
    device: str


@dataclass(frozen=True, init=False, repr=False)
class ClusterPlan(HtmlView):
    """Plans by device class.

    Attributes:
        devices: device name of a class, `torch.cuda.get_device_name` or a part of it, unless the
            class name is one: "t4" matches "Tesla T4".
        ranks: the class of each rank of the planned world; () for none.
        notes: origin of the plan, as in `Plan`.
        codecs: gradient codec by parameter name, equal on all ranks; FP32 for other parameters.
            "qsgd4/qsgd8" is qsgd4 between nodes and qsgd8 inside them.
            `qsync_fx.distributed.compress` applies it.
        batches: samples per step of each rank, by class; other classes keep their batch size.
            `qsync_fx.distributed.DistributedBatchSampler` applies them.
        memory_budgets: share of the saved activations that stay saved, in [0, 1], by class; other
            classes keep torch's setting. A compilation with the plan applies them unless its option
            "memory_budget" is set.

    Raises:
        PlanError: no class, a class named in `devices` or `ranks` that does not exist, or a
            malformed value.
    """

    classes: Mapping[str, Plan]
    devices: Mapping[str, str]
    ranks: tuple[str, ...]
    notes: Mapping[str, str] = field(compare=False)
    codecs: Mapping[str, str]
    batches: Mapping[str, int]
    memory_budgets: Mapping[str, float]

    def __init__(
        self,
        classes: Mapping[str, Plan],
        devices: Mapping[str, str] = MappingProxyType({}),
        ranks: Sequence[str] = (),
        notes: Mapping[str, str] = MappingProxyType({}),
        codecs: Mapping[str, str] = MappingProxyType({}),
        batches: Mapping[str, int] = MappingProxyType({}),
        memory_budgets: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        result = _classes(classes)
        set_field = object.__setattr__
        set_field(self, "classes", MappingProxyType(result))
        set_field(self, "devices", MappingProxyType(_devices(devices, result)))
        set_field(self, "ranks", _ranks(ranks, result))
        set_field(self, "notes", MappingProxyType(notes_of(notes)))
        set_field(self, "codecs", MappingProxyType(checked(codecs)))
        set_field(self, "batches", MappingProxyType(_batches(batches, result)))
        budgets = _memory_budgets(memory_budgets, result)
        set_field(self, "memory_budgets", MappingProxyType(budgets))

    def for_class(self, name: str, chosen_by: str = "its name") -> Plan:
        """Return the plan of a class; its notes identify it as a part of this cluster plan."""
        _check_class(name, self.classes, None)
        part = self.classes[name]
        plans = {k: Plan(p.default, p.patterns, p.operators) for k, p in self.classes.items()}
        text = self._with(classes=plans, notes={}).to_json()
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        origin = {DEVICE_CLASS: name, CHOSEN_BY: chosen_by, CLUSTER: digest}
        if name in self.batches:
            origin[LOCAL_BATCH] = str(self.batches[name])
        if name in self.memory_budgets:
            origin[MEMORY_BUDGET] = repr(self.memory_budgets[name])
        notes = {**self.notes, **part.notes}
        for stale in (LOCAL_BATCH, MEMORY_BUDGET):
            notes.pop(stale, None)
        return Plan(part.default, part.patterns, part.operators, notes | origin)

    def for_process(self, process: LocalPlan) -> Plan:
        """Return the part of a process; raise `PlanError` if its class is ambiguous or unknown."""
        rank, device = process.rank, process.device
        if rank is not None and process.world == len(self.ranks) and rank < len(self.ranks):
            return self.for_class(self.ranks[rank], f"rank {rank} in the plan's table")
        if len(self.classes) == 1:
            return self.for_class(next(iter(self.classes)), "the plan has one class")
        fit = [name for name in self.classes if is_called(device, self.devices.get(name, name))]
        if len(fit) == 1:
            return self.for_class(fit[0], f"the device name is {device!r}")
        who, table = "this process has no rank", "the plan has no rank table"
        if rank is not None:
            who = f"rank {rank} of {process.world}"
        if self.ranks:
            table = f"the plan's rank table is for {len(self.ranks)} ranks"
        message = "the class of this rank's device in the cluster plan is unknown: "
        message += f"the plan has the classes {', '.join(self.classes)}"
        where = f"{who}; {table}; the device name is {device!r}, "
        where += f"which matches {' and '.join(fit) or 'none of them'}"
        do = 'set the class with options={"plan": ..., "device_class": NAME} or the environment '
        do += "variable QSYNC_DEVICE_CLASS, or add a rank table with plan.for_ranks([NAME, ...])"
        raise PlanError(message, where=where, do=do)

    def for_ranks(self, ranks: Sequence[str]) -> ClusterPlan:
        """Return the plan with another table: the class of each rank."""
        return self._with(ranks=ranks)

    def _with(self, **changes: Any) -> ClusterPlan:
        values = {part.name: getattr(self, part.name) for part in fields(ClusterPlan)}
        return ClusterPlan(**values | changes)

    def to_json(self) -> str:
        """Return the plan as JSON text, identical for equal plans with equal notes."""
        settings = {
            "devices": dict(sorted(self.devices.items())),
            "ranks": list(self.ranks),
            "codecs": dict(sorted(self.codecs.items())),
            "batches": dict(sorted(self.batches.items())),
            "memory_budgets": dict(sorted(self.memory_budgets.items())),
            "notes": dict(sorted(self.notes.items())),
        }
        head = {"format": CLUSTER_PLAN.name, "version": CLUSTER_PLAN.version}
        classes = {name: plan.fields() for name, plan in sorted(self.classes.items())}
        used = {name: value for name, value in settings.items() if value}
        return json_text({**head, "classes": classes, **used}) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes | Parsed) -> ClusterPlan:
        """Read the text of `to_json`; raise `PlanError`, and no other error, for any other text."""
        result = CLUSTER_PLAN.decode(text)
        plans = {}
        for name, part in result.classes.items():
            try:
                plans[name] = Plan(part.default, part.patterns, part.operators, part.notes)
            except PlanError as error:
                where = f"classes{step(name)}.{error.where}"
                raise PlanError(error.what, where=where, do=error.do) from None
        settings = {part.name: getattr(result, part.name) for part in fields(ClusterPlan)}
        return cls(**settings | {"classes": plans})

    def save(self, path: Path) -> None:
        """Write the plan to `path` atomically."""
        CLUSTER_PLAN.write(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> ClusterPlan:
        """Read an untrusted file; raise `PlanError` with the problem and its location."""
        return load_plan(path, CLUSTER_PLAN, cls.from_json)

    def __hash__(self) -> int:
        parts = (self.classes, self.devices, self.codecs, self.batches, self.memory_budgets)
        return hash((*(frozenset(part.items()) for part in parts), self.ranks))

    def __reduce__(self) -> tuple[type[ClusterPlan], tuple[object, ...]]:
        values = (getattr(self, part.name) for part in fields(ClusterPlan))
        return (ClusterPlan, tuple(v if isinstance(v, tuple) else dict(v) for v in values))

    def __repr__(self) -> str:
        return f"<ClusterPlan classes={', '.join(self.classes)} ranks={len(self.ranks)}>"

    def __str__(self) -> str:
        lines = [repr(self)]
        for name, plan in self.classes.items():
            title = name
            if name in self.devices:
                title += f", device name {self.devices[name]!r}"
            if ranks := [str(rank) for rank, item in enumerate(self.ranks) if item == name]:
                title += f", rank {', '.join(ranks)}"
            if name in self.batches:
                title += f", local batch {self.batches[name]}"
            if name in self.memory_budgets:
                title += f", memory budget {self.memory_budgets[name]:g}"
            lines += [f"{title}:", textwrap.indent(str(plan), "  ")]
        for codec, count in sorted(Counter(self.codecs.values()).items()):
            first = next(name for name, used in self.codecs.items() if used == codec)
            between, inside = levels_of(codec)
            text = between if inside == PLAIN else f"{between} between nodes and {inside} inside"
            lines.append(f"gradients in {text}: {count} parameters, such as {first}")
        for name, text in sorted(self.notes.items()):
            if "\n" in text and all(line.isprintable() for line in text.splitlines()):
                lines += [f"note {shown(name)}", *(f"  {line}" for line in text.splitlines())]
            else:
                lines.append(f"note {shown(name)}  {shown(text)}")
        return "\n".join(lines)


def _classes(value: object) -> dict[str, Plan]:
    if not isinstance(value, Mapping) or not value:
        do = 'pass {"t4": Plan(...), ...}'
        raise PlanError("the cluster plan has no classes", where="classes", do=do)
    for name, plan in value.items():
        where = f"classes{step(str(name))}"
        if not isinstance(name, str) or not name or not name.isprintable():
            message = "the name of a device class must be a printable string"
            raise PlanError(message, where=where, do='use a name such as "t4"')
        if not isinstance(plan, Plan):
            message = f"the value of a device class must be a plan, not {kind(plan)}"
            raise PlanError(message, where=where, do="pass a Plan")
    return dict(value)


def _devices(value: object, classes: Mapping[str, Plan]) -> dict[str, str]:
    do = 'map classes to device names, as in {"t4": "Tesla T4"}'
    if not isinstance(value, Mapping):
        raise PlanError(f"devices must be a mapping, not {kind(value)}", where="devices", do=do)
    for name, called in value.items():
        _check_class(name, classes, "devices")
        if not isinstance(called, str) or not _words(called):
            message = f"a device name must be a string with a word in it, not {shown_value(called)}"
            raise PlanError(message, where=f"devices{step(name)}", do=do)
    return dict(value)


def _ranks(value: object, classes: Mapping[str, Plan]) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        do = 'list the class of each rank from rank 0, as in ["v100", "t4"]'
        raise PlanError(f"the rank table must be a list, not {kind(value)}", where="ranks", do=do)
    for rank, name in enumerate(value):
        _check_class(name, classes, f"ranks[{rank}]")
    return tuple(value)


def _batches(value: object, classes: Mapping[str, Plan]) -> dict[str, int]:
    do = 'map classes to samples per step of a rank, as in {"t4": 16}'
    if not isinstance(value, Mapping):
        raise PlanError(f"batches must be a mapping, not {kind(value)}", where="batches", do=do)
    for name, batch in value.items():
        _check_class(name, classes, "batches")
        if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch < 10**9:
            message = f"a local batch must be a positive integer, not {shown_value(batch)}"
            raise PlanError(message, where=f"batches{step(name)}", do=do)
    return dict(value)


def _memory_budgets(value: object, classes: Mapping[str, Plan]) -> dict[str, float]:
    where, do = "memory_budgets", 'map classes to shares of the activations, as in {"t4": 0.5}'
    if not isinstance(value, Mapping):
        message = f"memory budgets must be a mapping, not {kind(value)}"
        raise PlanError(message, where=where, do=do)
    for name, budget in value.items():
        _check_class(name, classes, where)
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1:
            message = f"a memory budget must be a number in [0, 1], not {shown_value(budget)}"
            raise PlanError(message, where=f"{where}{step(name)}", do=do)
    return {name: float(budget) for name, budget in value.items()}


def _check_class(name: object, classes: Mapping[str, Plan], where: str | None) -> None:
    if not isinstance(name, str) or name not in classes:
        message, do = f"the plan has no class {shown_value(name)}", nearest(str(name)[:40], classes)
        raise PlanError(message, where=where, do=do)


def is_called(device: str, name: str) -> bool:
    """Return whether all words of `name` occur in a device's name: "t4" in "Tesla T4"."""
    return bool(_words(name)) and _words(name) <= _words(device)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))


@runtime_checkable
class HoldsPlan(Protocol):
    """Protocol of values that contain a plan, such as an allocator's result."""

    def as_plan(self) -> Plan | ClusterPlan:
        """Return the plan."""


PlanFields = dict[str, str | torch.dtype | Precision]
"""Plan as a dictionary from patterns to formats; "default" is the format of other operators."""
DevicePlan = Plan | HoldsPlan | PlanFields | Path


def given_plan(value: object) -> object:
    """Return the plan of a value that contains one, and any other value unchanged."""
    if isinstance(value, HoldsPlan):
        return value.as_plan()
    return Plan(value) if isinstance(value, dict) else value


def device_plans(value: DevicePlan | Sequence[DevicePlan]) -> list[Plan]:
    """Return one or several plans of a device as a list; raise `PlanError` for any other value."""
    several = value if isinstance(value, list | tuple) else [value]
    return [_device_plan(given_plan(item)) for item in several]


def _device_plan(value: object) -> Plan:
    if isinstance(value, str | os.PathLike):
        value = read_plan(value)
    if isinstance(value, Plan):
        return value
    message = f"a value of type {type(value).__name__} is not a plan for one device"
    do = "pass a Plan, such as one class of a cluster plan: plan.for_class(name)"
    raise PlanError(message, where="plan", do=do)


def read_plan(path: Path) -> Plan | ClusterPlan:
    """Read an untrusted plan file; raise `PlanError` with the problem and its location."""

    def read(data: bytes) -> Plan | ClusterPlan:
        text = PLAN.parsed(data)
        if CLUSTER_PLAN.is_named_in(text):
            return ClusterPlan.from_json(text)
        return Plan.from_json(text)

    return load_plan(path, PLAN, read)


CLASS_VARIABLE: Final = "QSYNC_DEVICE_CLASS"
"""Environment variable with the class of this process's device."""


def this_process() -> LocalPlan:
    """Return rank, world size and device name of this process."""
    device = "cpu"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    if distributed.is_available() and distributed.is_initialized():
        return LocalPlan(distributed.get_rank(), distributed.get_world_size(), device)
    rank, world = environment.launcher_number("RANK"), environment.launcher_number("WORLD_SIZE")
    if rank is None or world is None:
        rank = world = None
    return LocalPlan(rank, world, device)


def named_class() -> str | None:
    """Return the device class that the environment names, or None."""
    return environment.text(CLASS_VARIABLE) or None


def part_of_this_process(plan: Plan | ClusterPlan, device_class: str | None = None) -> Plan:
    """Return the plan for this process: of a cluster plan, its class; raise `PlanError` if none."""
    if isinstance(plan, Plan):
        if device_class is None:
            return plan
        message = f"the plan has no class {device_class!r}: it is not a plan for a cluster"
        do = "remove the option, or use a plan for a cluster"
        raise PlanError(message, where='option "device_class"', do=do)
    if device_class is not None:
        return plan.for_class(device_class, 'the option "device_class"')
    if named := named_class():
        return plan.for_class(named, f"the environment variable {CLASS_VARIABLE}")
    return plan.for_process(this_process())
