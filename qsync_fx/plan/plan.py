"""The plan: which operator computes in which precision.

Invariant: plans are immutable, and equal if default, patterns and operators are equal, so they
share compiled code. A plan for another model is an error: it must not be applied in part.
"""

from __future__ import annotations

import difflib
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from qsync_fx.errors import PlanError, PrecisionError, nearest, shown
from qsync_fx.formats import FORMATS, Precision, precision
from qsync_fx.formatting import many
from qsync_fx.html_view import HtmlView
from qsync_fx.module_paths import unwrapped
from qsync_fx.plan.operator_id import OpId, alternatives, escaped, module_regex, pattern_regex
from qsync_fx.serialization import Parsed, Path, Schema, kind

T = TypeVar("T")


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
    largest=32 * 2**20,
    smaller="use patterns instead of single operators",
)


@dataclass(frozen=True)
class ClusterFields:
    """Fields of a cluster plan's file; `ClusterPlan` validates them."""

    classes: dict[str, Fields] = field(default_factory=dict)
    devices: Any = field(default_factory=dict)
    ranks: Any = ()
    notes: Any = field(default_factory=dict)
    codecs: Any = field(default_factory=dict)
    batches: Any = field(default_factory=dict)
    memory_budgets: Any = field(default_factory=dict)


CLUSTER_PLAN = Schema(
    ClusterFields,
    noun="plan",
    error=PlanError,
    remedy="write plans for clusters with ClusterPlan.save",
    name="qsync-cluster-plan",
    largest=PLAN.largest,
    smaller="use patterns instead of single operators",
)


def json_text(value: object) -> str:
    """Return JSON text with one entry of an object, or of a list of lists, per line."""
    match value:
        case {**fields} if fields:
            entries = [f"{json.dumps(key)}: {json_text(part)}" for key, part in fields.items()]
            opening, closing = "{", "}"
        case [list(), *_]:
            entries = [json.dumps(entry) for entry in value]
            opening, closing = "[", "]"
        case _:
            return json.dumps(value)
    body = ",\n".join(textwrap.indent(entry, "  ") for entry in entries)
    return f"{opening}\n{body}\n{closing}"


def load_plan(path: Path, schema: Schema[Any], read: Callable[[bytes], T]) -> T:
    """Return `read` of a file's bytes; raise its `PlanError` with the path."""
    data = schema.read(path)
    try:
        return read(data)
    except PlanError as error:
        raise schema.within(path, error) from None


def notes_of(value: object) -> dict[str, str]:
    """Return notes as a dictionary; raise `PlanError` if they are invalid."""
    if not isinstance(value, Mapping):
        message = f"notes must be a mapping, not {kind(value)}"
        raise PlanError(message, where="notes", do='write {"made by": "..."}')
    for name, text in value.items():
        if not isinstance(name, str) or not isinstance(text, str):
            where = f"notes[{json.dumps(str(name)[:120])}]"
            message = f"a note must map a string to a string, not to {kind(text)}"
            raise PlanError(message, where=where, do="convert names and values to strings")
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
    """Precision that a plan assigns to one operator, and the reason for reports.

    `explicit`: whether an operator or pattern entry assigns it, not the default.
    """

    precision: Precision
    reason: str
    explicit: bool = True


@dataclass(frozen=True, init=False, repr=False)
class Plan(HtmlView):
    """Precisions of operators.

    Attributes:
        default: precision of operators without an entry below; None if every operator needs an
            entry.
        patterns: (pattern of `OpId.matches`, precision); later patterns have priority.
        operators: precisions of single operators, with priority over patterns.
        notes: origin of the plan, free text by name; ignored by comparisons.

    Precisions are names, dtypes or `Precision`, operators are texts or `OpId`, and patterns may be
    a dictionary. `Plan({"default": "int8", "head": "fp32"})` is short for a default and patterns.

    Raises:
        PlanError: a wrong type, an unknown precision, or a malformed pattern or id.
    """

    default: Precision | None
    patterns: tuple[tuple[str, Precision], ...]
    operators: Mapping[OpId, Precision]
    notes: Mapping[str, str] = field(compare=False)

    def __init__(
        self,
        default: Precision | str | torch.dtype | Mapping[str, Any] | None = None,
        patterns: Sequence[tuple[str, Precision | str]] | Mapping[str, Any] = (),
        operators: _Operators = MappingProxyType({}),
        notes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        set_field = object.__setattr__
        if isinstance(patterns, Mapping):
            patterns = list(patterns.items())
        entries: list[tuple[str, Any]] = []
        if isinstance(default, Mapping):
            entries = [entry for entry in default.items() if entry[0] != "default"]
            default = default.get("default")
        if default is not None:
            default = _precision(default, "default")
        set_field(self, "default", default)
        set_field(self, "patterns", (*_patterns(entries), *_patterns(patterns)))
        set_field(self, "operators", MappingProxyType(_operators(operators)))
        set_field(self, "notes", MappingProxyType(notes_of(notes)))

    @classmethod
    def uniform(cls, precision: Precision | str) -> Plan:
        """Return the plan that assigns one precision to every operator."""
        return cls(default=precision)

    def with_precision(self, selected: str | OpId, precision: Precision | str) -> Plan:
        """Return a plan with `precision` for an operator or for the operators of a pattern.

        A later call has priority: a pattern replaces entries of operators that it selects.
        """
        if isinstance(selected, OpId):
            operators = {**self.operators, selected: precision}
            return Plan(self.default, self.patterns, operators, self.notes)
        pattern_regex(selected)
        patterns = [entry for entry in self.patterns if entry[0] != selected]
        others = {key: fmt for key, fmt in self.operators.items() if not key.matches(selected)}
        return Plan(self.default, (*patterns, (selected, precision)), others, self.notes)

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

    def check(self, model: nn.Module | Sequence[OpId], complete: bool = True) -> None:
        """Raise `PlanError`, with the nearest names, if the plan was made for another model.

        Args:
            model: the model, or the ids of its adjustable operators. A model has no ids before it
                is compiled: then entries are errors if they name none of its modules.
            complete: whether the ids are all operators of the model. Only then are unused operators
                and patterns of the plan errors.
        """
        if isinstance(model, nn.Module):
            modules = [name for name, _ in unwrapped(model).named_modules(remove_duplicate=False)]
            check_plan(self, (), complete=False, modules=modules)
        else:
            check_plan(self, model, complete)

    def to_json(self) -> str:
        """Return the plan as JSON text, identical for equal plans with equal notes."""
        return json_text({"format": PLAN.name, "version": PLAN.version, **self.fields()}) + "\n"

    def fields(self) -> dict[str, object]:
        """Return the fields of its JSON object."""
        ids = sorted(self.operators, key=_natural)
        result: dict[str, object] = {
            "default": self.default and self.default.name,
            "patterns": [[pattern, fmt.name] for pattern, fmt in self.patterns],
            "operators": {str(op_id): self.operators[op_id].name for op_id in ids},
        }
        if self.notes:
            result["notes"] = dict(sorted(self.notes.items()))
        return result

    @classmethod
    def from_json(cls, text: str | bytes | Parsed) -> Plan:
        """Read the text of `to_json`; raise `PlanError`, and no other error, for any other text."""
        result = PLAN.decode(text)
        return cls(result.default, result.patterns, result.operators, result.notes)

    def save(self, path: Path, model: nn.Module | None = None) -> None:
        """Write the plan to `path` atomically, after `check` of the model if it is given."""
        if model is not None:
            self.check(model)
        PLAN.write(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read an untrusted plan file; raise `PlanError` with the problem and its location."""
        return load_plan(path, PLAN, cls.from_json)

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
        if default:
            return f"Plan.uniform({default!r})"
        return "Plan()"

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


_SHOWN = 10


@dataclass(frozen=True)
class Misfit:
    """Operators without a precision of the plan, and entries of the plan that select no operator.

    Unused entries have similar names; of braces, only the alternative that selects none is listed.
    """

    missing: tuple[OpId, ...]
    unused: tuple[tuple[OpId | str, Precision, tuple[str, ...]], ...]

    @property
    def operators(self) -> list[OpId]:
        """Return the operators of the plan that the model does not have."""
        return [entry for entry, _, _ in self.unused if isinstance(entry, OpId)]


def misfit(plan: Plan, op_ids: Sequence[OpId], observed: Iterable[OpId] = ()) -> Misfit:
    """Return the differences between a plan and the operators, including `observed` ones."""
    available = dict.fromkeys((*op_ids, *observed))
    texts = [str(op_id) for op_id in available]
    entries: list[tuple[OpId | str, Precision]] = [
        item for item in plan.operators.items() if item[0] not in available
    ]
    entries += [(idle, fmt) for pattern, fmt in plan.patterns for idle in _idle(pattern, texts)]
    unused = [
        (entry, precision, _near(str(entry), texts) if index < _SHOWN else ())
        for index, (entry, precision) in enumerate(entries)
    ]
    missing = tuple(op_id for op_id in op_ids if plan.precision_for(op_id) is None)
    return Misfit(missing, tuple(unused))


def _near(text: str, texts: list[str]) -> tuple[str, ...]:
    """Return up to three operators similar to an entry, or modules if it names a module."""
    if "/" in text:
        return tuple(_close(text, texts))
    modules: dict[str, None] = {}
    for path in (text.partition("/")[0] for text in texts):
        while path and path not in modules:
            modules[path] = None
            path = path.rpartition(".")[0]
    return _near_modules(text, modules)


def _near_modules(path: str, modules: Collection[str]) -> tuple[str, ...]:
    """Return up to three similar paths, or else similar last names, as of `**.query`."""
    last = path.rpartition(".")[2]
    names = dict.fromkeys(module.rpartition(".")[2] for module in modules)
    return tuple(_close(path, modules) or _close(last, names))


def _idle(pattern: str, texts: Sequence[str]) -> list[str]:
    """Return the parts of a pattern that select no operator: itself, or alternatives in braces."""

    def is_idle(pattern: str) -> bool:
        return not any(map(pattern_regex(pattern).match, texts))

    if is_idle(pattern):
        return [pattern]
    return list(filter(is_idle, alternatives(pattern)))


def check_plan(
    plan: Plan,
    op_ids: Sequence[OpId],
    complete: bool,
    observed: Iterable[OpId] = (),
    modules: Collection[str] | None = None,
    as_written: Collection[OpId | str] = (),
) -> None:
    """Raise `PlanError` if `plan` was made for another model; see `Plan.check`.

    `observed` are operators of other graphs of the model, `modules` the paths of all modules, if
    known. Entries outside them are errors, unless they are `as_written`: valid without a graph.
    """
    result = misfit(plan, op_ids, observed)
    unused = tuple(entry for entry in result.unused if entry[0] not in as_written)
    result = replace(result, unused=unused)
    extra = [
        op_id
        for op_id in result.operators
        if complete or (modules is not None and (op_id.module or op_id.after) not in modules)
    ]
    if result.missing or extra:
        raise _another_model(plan, result, extra, op_ids, modules or ())
    idle = {entry: near for entry, _, near in result.unused if isinstance(entry, str)}
    for position, (pattern, _) in enumerate(plan.patterns):
        for part in filter(idle.__contains__, (pattern, *alternatives(pattern))):
            where = f"patterns[{position}] of the plan"
            if part != pattern:
                where += f", {shown(pattern)}"
            if complete:
                message = f"none of the {len(op_ids)} adjustable operators"
                raise _selects_nothing(part, where, message, idle[part])
            if modules is None:
                continue
            for name in alternatives(part) or (part,):
                if not any(map(module_regex(name).match, map(escaped, modules))):
                    near = idle[part] or _near_modules(name.partition("/")[0], modules)
                    message = f"none of the {len(modules)} modules"
                    raise _selects_nothing(name, where, message, near)


def _another_model(
    plan: Plan, result: Misfit, extra: list[OpId], ids: Sequence[OpId], modules: Collection[str]
) -> PlanError:
    subject, where, advice = [], [], "use the plan of this model"
    if result.missing:
        subject.append(f"has no precision for {len(result.missing)} of the {len(ids)} operators")
        where.append(_list("missing from the plan", result.missing))
        advice += ", or set a default precision in the plan"
    if extra:
        subject.append(f"names {many(len(extra), 'operator')} that the model does not have")
        where.append(_list("in the plan, not in this model", extra))
    elif result.operators:
        where.append(_list("in the plan, not in this part of the model", result.operators))
    pairs = (result.missing, plan.operators, "plan"), (result.operators, ids or modules, "model")
    for strangers, available, owner in pairs:
        texts = list(map(str, available))
        near = {text: close for text in map(str, strangers[:3]) if (close := _close(text, texts))}
        if near:
            text, close = next(iter(near.items()))
            advice += f"; nearest to {shown(text)} in the {owner}: {', '.join(close)}"
            break
    return PlanError(f"the plan {' and '.join(subject)}", where="; ".join(where), do=advice)


def _selects_nothing(pattern: str, where: str, description: str, near: Sequence[str]) -> PlanError:
    do = 'remove it, or list operator ids with "qsync inspect"'
    if near:
        do = f"nearest: {', '.join(near)}"
    return PlanError(f"the pattern {shown(pattern)} selects {description}", where=where, do=do)


def _list(title: str, op_ids: Sequence[OpId]) -> str:
    texts = [text if len(text) <= 200 else f"{text[:200]}..." for text in map(str, op_ids[:_SHOWN])]
    if len(op_ids) > _SHOWN:
        texts.append(f"... ({len(op_ids)} in total)")
    return f"{title}: {', '.join(texts)}"


def _close(text: str, available: Iterable[str]) -> list[str]:
    # Time is proportional to both lengths and to the number of names: bound it.
    candidates = islice((name for name in available if len(name) <= 200), 5000)
    return difflib.get_close_matches(text[:200], candidates, n=3, cutoff=0.5)
