"""The plan of a cluster: one plan for each class of devices, in one value and one file that every rank is given.

A rank has to know which part is its own. In this order: the class that the user names; the class that the plan's table has for the rank,
where the table is for as many ranks as there are; the only class; the class that the name of the device at hand tells.

Invariant: as a plan's. Which part a rank has is said by its part (the notes "device class" and "chosen by"), and where it cannot be told
that is an error: no rank trains under the plan of another.

In what a plan has gradients sent: a codec for each parameter, by name.

DistributedDataParallel makes its buckets anew after the first step, so a plan says it of parameters: those of a bucket have one codec, but
for small ones, which go in FP32. What a plan does not name goes in FP32, too.

Invariant: names alone; what codes and what that costs is the business of qsync_fx/communication, which knows a codec of each name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from qsync_fx.errors import PlanError, nearest, shown
from qsync_fx.formats import FORMATS, FP32
from qsync_fx.plan.plan import DEVICE_CLASS, Plan
from qsync_fx.plan.plan_file import CLUSTER_PLAN, Fields, block, notes_of, texts_block
from qsync_fx.serialization.schema import Path
from qsync_fx.serialization.strict_json import Parsed, kind, step

PLAIN: Final = FP32.name
"""A gradient as it is."""
CODECS: Final = (
    PLAIN,
    *(row.name for row in FORMATS.values() if row.plain and row.bits == 16),
    "1bit",
    "1bit*",
    *(f"qsgd{bits}" for bits in (2, 4, 8, 16)),
)
"""What a plan may name."""
BETWEEN_NODES: Final = "codecs between nodes of"
"""The note of a plan whose codecs were chosen for what goes between nodes alone; says how many ranks these have."""
_IN_A_ROW: Final = " in a row"


def between_nodes(ranks: int, in_a_row: bool = False) -> dict[str, str]:
    """Returns the note that says so, of nodes of so many ranks; `in_a_row` where these are in a row, whatever their hosts are called."""
    return {BETWEEN_NODES: f"{ranks} ranks{_IN_A_ROW * in_a_row}"}


def nodes_noted(notes: Mapping[str, str]) -> tuple[int, bool] | None:
    """Returns what `between_nodes` was given for these notes; None where they say nothing of nodes."""
    result = re.fullmatch(rf"([1-9]\d{{0,8}}) ranks({_IN_A_ROW})?", notes.get(BETWEEN_NODES, ""))
    return None if result is None else (int(result[1]), result[2] is not None)


def checked(value: object) -> dict[str, str]:
    """Returns codecs by parameter; raises `PlanError` where what is given are none."""
    if not isinstance(value, Mapping):
        do = 'write {"fc.weight": "qsgd8"}: the codec of each parameter'
        raise PlanError(f"codecs are a mapping, not {kind(value)}", where="codecs", do=do)
    for name, codec in value.items():
        where = f"codecs{step(str(name))}"
        if not isinstance(name, str) or not name or not name.isprintable():
            do = 'write one such as "fc.weight", as model.named_parameters() has it'
            raise PlanError("a parameter has a name that prints", where=where, do=do)
        if not isinstance(codec, str) or codec not in CODECS:
            message = shown(codec) if isinstance(codec, str) else kind(codec)
            raise PlanError(
                f"{message} is no codec of gradients",
                where=where,
                do=nearest(str(codec)[:40], CODECS),
            )
    return dict(value)


def describe_codecs(codecs: Mapping[str, str]) -> list[str]:
    """Returns lines that say which codec how many parameters have, and which; nothing where there are none."""
    result: dict[str, list[str]] = {}
    for name, codec in codecs.items():
        result.setdefault(codec, []).append(name)
    return [
        f"gradients in {codec}: {names[0]}"
        + (f" and {len(names) - 1} more parameters" if len(names) > 1 else "")
        for codec, names in sorted(result.items())
    ]


CHOSEN_BY = "chosen by"
"""The note of a part that says how a rank came by it."""
CLUSTER = "cluster plan"
"""The note of a part that tells its plan for a cluster from others: a hash of what that says."""


@dataclass(frozen=True)
class LocalPlan:
    """What a process knows of itself.

    Attributes:
        rank, world: its number among how many; None where it is not known to be one of several.
        device: what its device is called.
    """

    rank: int | None
    world: int | None
    device: str


@dataclass(frozen=True, init=False, repr=False)
class ClusterPlan:
    """Plans by class of devices.

    Attributes:
        classes: the plan of each class.
        devices: what a class's devices are called, as `torch.cuda.get_device_name` has it or a part of it, where the name of the class
            does not say it: "Tesla T4" says "t4".
        ranks: the class of each rank of the world that the plan was made for; () where it was made for none.
        notes: where it came from, as a plan's notes.
        codecs: what the gradient of a parameter is sent in, by its name; the same on all ranks. FP32 for those that it does not name.
            `qsync_fx.distributed.compress` applies it.

    Raises `PlanError` for no class, a class that devices or ranks name and the plan does not have, and whatever is no plan.
    """

    classes: Mapping[str, Plan]
    devices: Mapping[str, str]
    ranks: tuple[str, ...]
    notes: Mapping[str, str] = field(compare=False)
    codecs: Mapping[str, str]

    def __init__(
        self,
        classes: Mapping[str, Plan],
        devices: Mapping[str, str] = MappingProxyType({}),
        ranks: Sequence[str] = (),
        notes: Mapping[str, str] = MappingProxyType({}),
        codecs: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        result = _classes(classes)
        set_field = object.__setattr__
        set_field(self, "classes", MappingProxyType(result))
        set_field(self, "devices", MappingProxyType(_devices(devices, result)))
        set_field(self, "ranks", _ranks(ranks, result))
        set_field(self, "notes", MappingProxyType(notes_of(notes)))
        set_field(self, "codecs", MappingProxyType(checked(codecs)))

    def for_class(self, name: str, chosen_by: str = "its name") -> Plan:
        """Returns the plan of a class, which says in its notes that it is the part of a plan for a cluster."""
        if name not in self.classes:
            inputs = shown(name) if isinstance(name, str) else kind(name)
            raise PlanError(
                f"the plan has no class {inputs}", do=nearest(str(name)[:40], self.classes)
            )
        part = self.classes[name]
        plans = {key: plan.without_notes() for key, plan in self.classes.items()}
        text = ClusterPlan(plans, self.devices, self.ranks, codecs=self.codecs)
        digest = hashlib.sha256(text.to_json().encode()).hexdigest()[:16]
        notes = {
            **self.notes,
            **part.notes,
            DEVICE_CLASS: name,
            CHOSEN_BY: chosen_by,
            CLUSTER: digest,
        }
        return Plan(part.default, part.patterns, part.operators, notes)

    def for_process(self, process: LocalPlan) -> Plan:
        """Returns the part of a process; raises `PlanError` where that cannot be told."""
        rank = process.rank
        if rank is not None and process.world == len(self.ranks) and rank < len(self.ranks):
            return self.for_class(self.ranks[rank], f"rank {rank} in the plan's table")
        if len(self.classes) == 1:
            return self.for_class(next(iter(self.classes)), "it is the only one")
        fit = [
            name for name in self.classes if is_called(process.device, self.devices.get(name, name))
        ]
        if len(fit) == 1:
            return self.for_class(fit[0], f"the device is called {process.device!r}")
        who = (
            f"rank {rank} of {process.world}"
            if rank is not None
            else "this process is no rank of several"
        )
        table = (
            f"the plan's table is for {len(self.ranks)} ranks"
            if self.ranks
            else "the plan has no table of ranks"
        )
        several = f"; {' and '.join(fit)} are both called so" if fit else ""
        raise PlanError(
            f"which part of the plan is this rank's cannot be told: it has parts for {', '.join(self.classes)}",
            where=f"{who}; {table}; the device at hand is {process.device!r}{several}",
            do='name it with options={"plan": ..., "device_class": NAME} or the environment variable QSYNC_DEVICE_CLASS, '
            "or give the plan a table, plan.for_ranks([NAME, ...])",
        )

    def for_ranks(self, ranks: Sequence[str]) -> ClusterPlan:
        """Returns the plan with another table: the class of each rank."""
        return ClusterPlan(self.classes, self.devices, ranks, self.notes, self.codecs)

    def to_json(self) -> str:
        """Returns the plan as JSON text, the same text for equal plans with equal notes."""
        classes = (
            block(f"{json.dumps(name)}: {{", plan.entries())
            for name, plan in sorted(self.classes.items())
        )
        entries = [
            f'"format": "{CLUSTER_PLAN.name}"',
            f'"version": {CLUSTER_PLAN.version}',
            block('"classes": {', classes),
        ]
        entries += [texts_block("devices", self.devices)] if self.devices else []
        entries += [f'"ranks": {json.dumps(self.ranks)}'] if self.ranks else []
        entries += [texts_block("codecs", self.codecs)] if self.codecs else []
        entries += [texts_block("notes", self.notes)] if self.notes else []
        return block("{", entries) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes | Parsed) -> ClusterPlan:
        """Reads the text of `to_json`. Raises `PlanError`, and nothing else, for any other text."""
        result = CLUSTER_PLAN.decode(text)
        plans = {
            name: _plan_in_file(name, body)
            for name, body in _mapping("classes", result.classes).items()
        }
        return cls(plans, result.devices, result.ranks, result.notes, result.codecs)

    def save(self, path: Path) -> None:
        """Writes the plan to `path` in one step, as `Plan.save` does."""
        CLUSTER_PLAN.write(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> ClusterPlan:
        """Reads a file, which may come from anywhere; raises `PlanError` saying what is wrong with it, and where."""
        data = CLUSTER_PLAN.read(path)
        try:
            return cls.from_json(data)
        except PlanError as error:
            raise CLUSTER_PLAN.within(path, error) from None

    def __hash__(self) -> int:
        parts = (self.classes, self.devices, self.codecs)
        return hash((*(frozenset(part.items()) for part in parts), self.ranks))

    def __reduce__(self) -> tuple[type[ClusterPlan], tuple[object, ...]]:
        return (
            ClusterPlan,
            (
                dict(self.classes),
                dict(self.devices),
                self.ranks,
                dict(self.notes),
                dict(self.codecs),
            ),
        )

    def __repr__(self) -> str:
        return f"<ClusterPlan classes={', '.join(self.classes)} ranks={len(self.ranks)}>"

    def __str__(self) -> str:
        lines = [repr(self)]
        for name, plan in self.classes.items():
            ranks = [rank for rank, item in enumerate(self.ranks) if item == name]
            who = f", {_spans(ranks)}" if ranks else ""
            called = f", called {self.devices[name]!r}" if name in self.devices else ""
            lines += [f"{name}{called}{who}:", *(f"  {line}" for line in str(plan).splitlines())]
        lines += describe_codecs(self.codecs)
        for name, text in sorted(self.notes.items()):
            several = "\n" in text and all(line.isprintable() for line in text.splitlines())
            reported = (
                ["", *(f"  {line}" for line in text.splitlines())]
                if several
                else [f"  {shown(text)}"]
            )
            lines += [f"note {shown(name)}{reported[0]}", *reported[1:]]
        return "\n".join(lines)


def _classes(value: object) -> dict[str, Plan]:
    result = _mapping("classes", value)
    if not result:
        raise PlanError(
            "a plan for a cluster has no class", where="classes", do='give {"t4": Plan(...), ...}'
        )
    for name, plan in result.items():
        where = f"classes{step(str(name))}"
        if not isinstance(name, str) or not name or not name.isprintable():
            raise PlanError(
                "a class of devices has a name that prints",
                where=where,
                do='write one such as "t4"',
            )
        if not isinstance(plan, Plan):
            raise PlanError(f"a class has a plan, not {kind(plan)}", where=where, do="give a Plan")
    return result


def _devices(value: object, classes: Mapping[str, Plan]) -> dict[str, str]:
    result = _mapping("devices", value)
    for name, called in result.items():
        _known(name, classes, "devices")
        if not isinstance(called, str) or not _words(called):
            message = shown(called) if isinstance(called, str) else kind(called)
            where = f"devices{step(name)}"
            raise PlanError(
                f"the name of a device is text, not {message}",
                where=where,
                do='write one such as "Tesla T4"',
            )
    return result


def _ranks(value: object, classes: Mapping[str, Plan]) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        do = 'write ["v100", "t4"]: the class of rank 0, then of rank 1'
        raise PlanError(f"the table of ranks is a list, not {kind(value)}", where="ranks", do=do)
    for rank, name in enumerate(value):
        _known(name, classes, f"ranks[{rank}]")
    return tuple(value)


def _known(name: object, classes: Mapping[str, Plan], where: str) -> None:
    if not isinstance(name, str) or name not in classes:
        message = shown(name) if isinstance(name, str) else kind(name)
        raise PlanError(
            f"{message} is no class of the plan", where=where, do=nearest(str(name)[:40], classes)
        )


def _plan_in_file(name: str, body: object) -> Plan:
    where = f"classes{step(name)}"
    fields = _mapping(where, body)
    available = Fields.__dataclass_fields__
    if (unknown := next((key for key in fields if key not in available), None)) is not None:
        raise PlanError(
            f"a plan has no field {shown(unknown)}",
            where=where,
            do=nearest(unknown[:40], available),
        )
    try:
        return Plan(**fields)
    except PlanError as error:
        raise PlanError(error.what, where=f"{where}.{error.where}", do=error.do) from None


def _mapping(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise PlanError(
            f"it has {kind(value)} in place of an object", where=where, do=CLUSTER_PLAN.remedy
        )
    return dict(value)


def is_called(device: str, name: str) -> bool:
    """Whether the words of a name stand in a device's: "t4" in "Tesla T4"."""
    return bool(_words(name)) and _words(name) <= _words(device)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))


def _spans(ranks: Sequence[int]) -> str:
    """Returns numbers in order as people write them: "ranks 0 to 3, 6"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join(
        " to ".join(map(str, span)) for span in spans
    )
