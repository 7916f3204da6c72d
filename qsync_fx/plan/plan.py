"""The plan: which operator computes in which precision.

A plan is made once, by hand or by a search over profiles, and read by every rank and every graph
into which DDP splits a model, so it refers to operators by `OpId`.

Invariant: a plan is immutable. Plans are equal, and hash equally, if default, patterns and
operators are equal; notes do not count. So equal plans share compiled code.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from qsync_fx.errors import PlanError, PrecisionError, nearest, shown
from qsync_fx.formats import FORMATS, Precision, precision
from qsync_fx.plan.operator_id import OpId, pattern_regex
from qsync_fx.plan.validation import check_plan
from qsync_fx.serialization import Parsed, Path, Schema, kind


@dataclass(frozen=True)
class Fields:
    """Fields of a plan file; `Plan` validates them, as it does values from Python."""

    default: Any = None
    patterns: Any = ()
    operators: Any = field(default_factory=dict)
    notes: Any = field(default_factory=dict)


PLAN = Schema(
    Fields,
    noun="plan",
    error=PlanError,
    remedy="write plans with Plan.save; read plans for a cluster with ClusterPlan.load",
    name="qsync-plan",
    smaller="use patterns instead of single operators",
)


@dataclass(frozen=True)
class ClusterFields:
    """Fields of a cluster plan's file; `ClusterPlan` validates them."""

    classes: Any = field(default_factory=dict)
    devices: Any = field(default_factory=dict)
    ranks: Any = ()
    notes: Any = field(default_factory=dict)
    codecs: Any = field(default_factory=dict)


CLUSTER_PLAN = Schema(
    ClusterFields,
    noun="plan",
    error=PlanError,
    remedy="write plans for clusters with ClusterPlan.save",
    name="qsync-cluster-plan",
    largest=4 * PLAN.largest,
    smaller="use patterns instead of single operators",
)


def block(opening: str, entries: Iterable[str]) -> str:
    """Return a JSON object or list that begins with `opening`, one entry per line."""
    closing = {"{": "}", "[": "]"}[opening[-1]]
    body = ",\n".join(textwrap.indent(entry, "  ") for entry in entries)
    if not body:
        return opening + closing
    return f"{opening}\n{body}\n{closing}"


def texts_field(name: str, texts: Mapping[str, str]) -> list[str]:
    """Return a JSON field with an object of texts, sorted by name; no field without texts."""
    if not texts:
        return []
    entries = (f"{json.dumps(key)}: {json.dumps(text)}" for key, text in sorted(texts.items()))
    return [block(f'"{name}": {{', entries)]


def notes_of(value: object) -> dict[str, str]:
    """Return notes as a dictionary; raise `PlanError` if they are invalid."""
    if not isinstance(value, Mapping):
        message = f"notes must be a mapping, not {kind(value)}"
        raise PlanError(message, where="notes", do='write {"made by": "..."}')
    for name, text in value.items():
        where, do = f"notes[{json.dumps(str(name)[:120])}]", "convert names and values to strings"
        if not isinstance(name, str):
            raise PlanError("the name of a note must be a string", where=where, do=do)
        if not isinstance(text, str):
            message = f"a note must map a string to a string, not to {kind(text)}"
            raise PlanError(message, where=where, do=do)
    return dict(value)


# The key type of Mapping is invariant: a Mapping of the union alone would reject usual
# dictionaries.
_Operators = (
    Mapping[OpId, Precision | str]
    | Mapping[str, Precision | str]
    | Mapping[OpId | str, Precision | str]
)
_MOST_PATTERNS = 2000
DEVICE_CLASS = "device class"
"""Note of a part of a cluster plan: its device class."""
CACHED = "cached profile"
"""Note of a default plan from a cached profile: the message to log."""
_PATTERNS_FORMAT = 'write [["encoder.layer.*.output", "bf16"], ...]; the last matching pattern wins'


@dataclass(frozen=True)
class Choice:
    """Precision that a plan assigns to one operator.

    Attributes:
        precision: the planned precision.
        reason: text for reports: 'plan: pattern "encoder.layer.*.output"'.
        explicit: whether an operator or pattern entry assigns it, not the default.
    """

    precision: Precision
    reason: str
    explicit: bool = True


@dataclass(frozen=True, init=False, repr=False)
class Plan:
    """Precisions of operators.

    Attributes:
        default: precision of operators without an entry below; None if every operator needs an
            entry.
        patterns: (pattern of `OpId.matches`, precision); later patterns have priority.
        operators: precisions of single operators, with priority over patterns.
        notes: origin of the plan, free text by name; ignored by comparisons.

    Precisions are names or `Precision`, operators are texts or `OpId`.

    Raises:
        PlanError: a wrong type, an unknown precision, or a malformed pattern or id.
    """

    default: Precision | None
    patterns: tuple[tuple[str, Precision], ...]
    operators: Mapping[OpId, Precision]
    notes: Mapping[str, str] = field(compare=False)

    def __init__(
        self,
        default: Precision | str | None = None,
        patterns: Sequence[tuple[str, Precision | str]] = (),
        operators: _Operators = MappingProxyType({}),
        notes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        set_field = object.__setattr__
        set_field(self, "default", default if default is None else _precision(default, "default"))
        set_field(self, "patterns", _patterns(patterns))
        set_field(self, "operators", MappingProxyType(_operators(operators)))
        set_field(self, "notes", MappingProxyType(notes_of(notes)))

    @classmethod
    def uniform(cls, precision: Precision | str) -> Plan:
        """Return the plan that assigns one precision to every operator."""
        return cls(default=precision)

    def with_precision(self, selected: str | OpId, precision: Precision | str) -> Plan:
        """Return a plan with `precision` for an operator or for the operators of a pattern.

        The latest call has priority: a pattern replaces entries of single operators that it
        selects.
        """
        if isinstance(selected, OpId):
            operators = {**self.operators, selected: precision}
            return Plan(self.default, self.patterns, operators, self.notes)
        pattern_regex(selected)
        patterns = [entry for entry in self.patterns if entry[0] != selected]
        others = {key: fmt for key, fmt in self.operators.items() if not key.matches(selected)}
        return Plan(self.default, (*patterns, (selected, precision)), others, self.notes)

    def without_notes(self) -> Plan:
        """Return an equal plan without notes."""
        return Plan(self.default, self.patterns, self.operators)

    def precision_for(self, op_id: OpId) -> Choice | None:
        """Return the choice by id, else by last pattern, else the default; None without one."""
        if op_id in self.operators:
            return Choice(self.operators[op_id], self._name)
        for pattern, fmt in reversed(self.patterns):
            if op_id.matches(pattern):
                return Choice(fmt, f'{self._name}: pattern "{pattern}"')
        if self.default is None:
            return None
        role = "default" if self.patterns or self.operators else "uniform"
        return Choice(self.default, f"{self._name}: {role} {self.default}", explicit=False)

    @property
    def _name(self) -> str:
        if CACHED in self.notes:
            return "plan of a cached profile"
        if DEVICE_CLASS in self.notes:
            return f"plan of {self.notes[DEVICE_CLASS]}"
        return "plan"

    def check(self, op_ids: Sequence[OpId], complete: bool) -> None:
        """Raise `PlanError` if the plan was made for another model.

        Args:
            op_ids: the operators that a plan decides on, of the model or of a part of it.
            complete: whether `op_ids` are all operators of the model. Only then are unused
                operators and patterns of the plan errors.
        """
        check_plan(self, op_ids, complete)

    def to_json(self) -> str:
        """Return the plan as JSON text, identical for equal plans with equal notes."""
        head = (f'"format": "{PLAN.name}"', f'"version": {PLAN.version}')
        return block("{", (*head, *self.entries())) + "\n"

    def entries(self) -> list[str]:
        """Return the entries of its JSON object, one per field."""
        ids = sorted(self.operators, key=_natural)
        patterns = (json.dumps([pattern, fmt.name]) for pattern, fmt in self.patterns)
        operators = (f'{json.dumps(str(op_id))}: "{self.operators[op_id]}"' for op_id in ids)
        return [
            f'"default": {json.dumps(self.default and self.default.name)}',
            block('"patterns": [', patterns),
            block('"operators": {', operators),
            *texts_field("notes", self.notes),
        ]

    @classmethod
    def from_json(cls, text: str | bytes | Parsed) -> Plan:
        """Read the text of `to_json`; raise `PlanError`, and no other error, for any other text."""
        result = PLAN.decode(text)
        return cls(result.default, result.patterns, result.operators, result.notes)

    def save(self, path: Path) -> None:
        """Write the plan to `path` atomically; raise `PlanError` on failure."""
        PLAN.write(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read an untrusted plan file; raise `PlanError` with the problem and its location."""
        data = PLAN.read(path)
        try:
            return cls.from_json(data)
        except PlanError as error:
            raise PLAN.within(path, error) from None

    def __hash__(self) -> int:
        names = frozenset((op_id, chosen.name) for op_id, chosen in self.operators.items())
        return hash((self.default, self.patterns, names))

    def __reduce__(self) -> tuple[type[Plan], tuple[object, ...]]:
        return (Plan, (self.default, self.patterns, dict(self.operators), dict(self.notes)))

    def __repr__(self) -> str:
        default = self.default and self.default.name
        if self.patterns or self.operators:
            counts = f"patterns={len(self.patterns)} operators={len(self.operators)}"
            return f"<Plan default={default!r} {counts}>"
        return f"Plan.uniform({default!r})" if default else "Plan()"

    def __str__(self) -> str:
        counts = Counter(chosen.name for chosen in self.operators.values())
        rows = [(str(count), name) for name, count in counts.most_common()]
        rows += [(f'pattern "{pattern}"', chosen.name) for pattern, chosen in self.patterns]
        if self.default:
            rows.append(("all others" if rows else "all operators", self.default.name))
        rows += [(f"note {shown(name)}", shown(text)) for name, text in sorted(self.notes.items())]
        width = max((len(left) for left, _ in rows), default=0)
        return "\n".join([repr(self), *(f"  {left:<{width}}  {right}" for left, right in rows)])


def _precision(value: object, where: str) -> Precision:
    if not isinstance(value, str | torch.dtype | Precision):
        message = f"a precision must be a string, not {kind(value)}"
        raise PlanError(message, where=where, do=nearest("", FORMATS))
    try:
        return precision(value)
    except PrecisionError as error:
        message = f"{shown(str(value))} is not a precision"
        raise PlanError(message, where=where, do=error.do) from None


def _patterns(value: object) -> tuple[tuple[str, Precision], ...]:
    if not isinstance(value, list | tuple):
        message = f"patterns must be a list, not {kind(value)}"
        raise PlanError(message, where="patterns", do=_PATTERNS_FORMAT)
    if len(value) > _MOST_PATTERNS:
        message = f"the plan has too many patterns: {len(value)}"
        raise PlanError(message, where="patterns", do=f"use at most {_MOST_PATTERNS} patterns")
    result = []
    for position, entry in enumerate(value):
        where = f"patterns[{position}]"
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            actual = f"a list of {len(entry)}" if isinstance(entry, list | tuple) else kind(entry)
            message = f"an entry must be a pair of pattern and precision, not {actual}"
            raise PlanError(message, where=where, do=_PATTERNS_FORMAT)
        try:
            pattern_regex(entry[0])
        except PlanError as error:
            raise PlanError(error.what, where=where, do=error.do) from None
        result.append((entry[0], _precision(entry[1], where)))
    return tuple(result)


def _operators(argument: object) -> dict[OpId, Precision]:
    if not isinstance(argument, Mapping):
        message = f"operators must be a mapping, not {kind(argument)}"
        raise PlanError(message, where="operators", do='write {"encoder.dense/linear": "int8"}')
    result: dict[OpId, Precision] = {}
    for key, value in argument.items():
        where = f"operators[{json.dumps(str(key)[:120])}]"
        try:
            op_id = key if isinstance(key, OpId) else OpId.parse(key)
        except PlanError as error:
            raise PlanError(error.what, where=where, do=error.do) from None
        if op_id in result:
            raise PlanError("the operator occurs twice", where=where, do="remove one entry")
        result[op_id] = _precision(value, where)
    return result


def _natural(op_id: OpId) -> tuple[object, ...]:
    """Return a sort key that orders layer.2 before layer.10."""

    def segments(path: str) -> list[tuple[int, str]]:
        return [(len(part) if part.isdecimal() else 0, part) for part in path.split(".")]

    return segments(op_id.module), segments(op_id.after), op_id.operator, op_id.index
