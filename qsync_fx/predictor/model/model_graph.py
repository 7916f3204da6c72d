"""A model as the predictor knows it: what the states, casts, costs and memory of any plan follow from, without torch's graph.

Invariant: frozen and whole. Operators stand in the order in which they run, those of later graphs behind those of earlier ones; values and
operators refer to one another by their place. Sizes are whole numbers, or expressions of sympy where the model was explained with
symbolic shapes. Formats are the names of FORMATS; None is what has no floating-point values.

Formats and states by the names that model graphs know them by, and back.

Invariant: None is the name of no format.

Which states operators can take, over all plans that ask for certain formats.

Invariant: every state that a plan leads to is among them. Some that none leads to may be, as inputs are taken to be independent.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from qsync_fx.errors import ProfileError, nearest
from qsync_fx.formats import FORMATS, Precision, promoted
from qsync_fx.graph.cost_algebra import Cost, Size
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.serialization.schema import Path

Name = str | None
"""The name of a format; None for what has none."""

StateNames = tuple[Name, Name]
"""The formats that an operator computes in and gives out."""


@dataclass(frozen=True)
class Value:
    """What an operator makes, or what the model or its caller holds.

    Attributes:
        name: its node's; costs name what is kept by it.
        tensor: the place of the value whose memory it lies in: its own where that is no other's.
        operator: the place of the operator whose format it has; None where it is `own` whatever the plan.
        source: what makes it: "operator", "parameter", "buffer", "input", or "constant" for all else.
        own: its format as the model was written.
        numel: its floating-point elements.
        fixed: bytes of what else it holds: integers, masks.
        differentiated: whether a gradient flows back to it.
    """

    name: str
    tensor: int
    operator: int | None
    source: str
    own: Name
    numel: Size
    fixed: Size
    differentiated: bool


@dataclass(frozen=True)
class ModelRead:
    """A reading of a value.

    Attributes:
        value: what is read.
        role: the argument's name.
        wanted: by what the operator computes in, "" for nothing, the format that it is read in; None for whichever it has.
        point: what it has in common with readings that share one cast a format; None where it is never converted.
        origin: what a cast for it would convert; `value` but behind the model's own conversions.
        gradient: whether a gradient flows back.
    """

    value: int
    role: str
    wanted: Mapping[str, Name]
    point: int | None
    origin: int
    gradient: bool


@dataclass(frozen=True)
class Choices:
    """What a plan can make of an adjustable operator.

    Attributes:
        runs: by what a plan asks for, the format that it computes in.
        held: the format that it stays in where a default gives way.
        keeps: what gives way there, asked for by a default.
        outputs: by what it computes in, the format of its result.
        wide: what a scaled format gives out where all `readers` compute in FP32 at least; None where it never does.
        readers: the places of the operators that this depends on.
        pinned: the format that a pass of the user's gave it, against every plan.
        unpacked: by scaled format, the plain one that operands kept in it are converted to in the backward pass.
    """

    kind: ClassVar[str] = "chosen"

    runs: Mapping[str, str]
    held: str
    keeps: tuple[str, ...]
    outputs: Mapping[str, str]
    wide: Name
    readers: tuple[int, ...]
    pinned: Name
    unpacked: Mapping[str, str]


@dataclass(frozen=True)
class Follows:
    """How the format of an operator follows that no plan chooses.

    Attributes:
        operators: the places of those whose outputs decide.
        given: the promotion of its other inputs; None where there are none.
        own: its format where no input has one, and where a scalar does not fit.
        promotes: whether it is the promotion of all inputs.
        scalar: the magnitude of the largest of its scalar arguments.
        named: the format of its result where its arguments name one.
    """

    kind: ClassVar[str] = "followed"

    operators: tuple[int, ...]
    given: Name
    own: Name
    promotes: bool = False
    scalar: float = 0.0
    named: Name = None


@dataclass(frozen=True)
class ModelOperator:
    """An operator of the model.

    Attributes:
        id: its identity, as plans and profiles name it.
        kind: "adjustable", "dependent" or "fixed".
        row: its name in the table of operators.
        shape: of its result as it was explained, as text: "f32[8, 16]", "f32[batch, 16]".
        line: where the model calls it: "model.py:42"; "" where that is not known.
        graph: the place of the graph that it is in, of several.
        repeated: whether activation checkpointing computes it again.
        result: the place of what it makes.
        reads: what it reads, in the order of its arguments.
        decided: what its formats are decided by.
        converts: whether it is a conversion that the model itself asks for.
        converted: whether it computes in the model's own format and converts its result.
        costs: what it costs in each state that it can take, without casts.
        method: how it computes, of several ways: "tanh" of a gelu that approximates by it, "vectors" of a dropout that is drawn in these;
            else "".
    """

    id: str
    kind: str
    row: str
    shape: str
    line: str
    graph: int
    repeated: bool
    result: int
    reads: tuple[ModelRead, ...]
    decided: Choices | Follows
    converts: bool
    converted: bool
    costs: Mapping[StateNames, Cost]
    method: str = ""

    @property
    def where(self) -> str:
        """Its id and line, for error messages."""
        return f"operator {self.id}" + (f", {self.line}" if self.line else "")


@dataclass(frozen=True)
class ModelParameter:
    """A parameter.

    Attributes:
        path: its name in the model.
        numel: number of elements.
        dtype_bytes: bytes of an element.
        trained: whether it gets a gradient.
        readers: the places of the operators that read it.
    """

    path: str
    numel: int
    dtype_bytes: int
    trained: bool
    readers: tuple[int, ...]


@dataclass(frozen=True)
class ModelGraph:
    """
    Attributes:
        device: what it was explained for: the option "target", else the type of device.
        operators: in the order in which they run.
        values: what they make and read.
        outputs: what the model returns.
        parameters: in the order in which the model registers them.
        points: how many places there are at which a cast may stand.
        formats: what plans may ask for.
    """

    device: str
    operators: tuple[ModelOperator, ...]
    values: tuple[Value, ...]
    outputs: tuple[ModelRead, ...]
    parameters: tuple[ModelParameter, ...]
    points: int
    formats: tuple[str, ...]

    @functools.cached_property
    def places(self) -> Mapping[str, int]:
        """The place of each operator, by its id."""
        return {operator.id: index for index, operator in enumerate(self.operators)}

    def operator(self, name: str) -> ModelOperator:
        """Returns an operator by its id; raises `ProfileError` where there is none."""
        return self.operators[self.place(name)]

    def place(self, name: str) -> int:
        """Returns the place of an operator; raises `ProfileError` where there is none."""
        if name not in self.places:
            raise ProfileError(f"the model has no operator {name!r}", do=nearest(name, self.places))
        return self.places[name]

    def at(self, **sizes: int) -> ModelGraph:
        """Returns the model with numbers for symbolic sizes, such as `batch=32`; those that are not named stay symbolic.

        Raises:
            ProfileError: the model has no such size, or a number is none.
        """
        from qsync_fx.predictor.model.symbolic_sizes import sized

        return sized(self, sizes)

    @property
    def symbols(self) -> frozenset[str]:
        """The names of its symbolic sizes."""
        from qsync_fx.predictor.model.symbolic_sizes import symbols

        return symbols(self)

    def save(self, path: Path) -> None:
        """Writes the model to a file of JSON in one step; raises `ProfileError` if it cannot."""
        from qsync_fx.predictor.model.model_file import FILE, stored

        FILE.write(path, FILE.encode(stored(self)))

    @classmethod
    def load(cls, path: Path) -> ModelGraph:
        """Reads a file of `save`, which may come from anywhere; raises `ProfileError` saying what is wrong with it, and where."""
        from qsync_fx.predictor.model.model_file import FILE, restored

        return restored(FILE.load(path))


def format_named(name: Name) -> Precision | None:
    """Returns a format by its name."""
    return FORMATS[name] if name is not None else None


def name_of(fmt: Precision | None) -> Name:
    """Returns the name of a format."""
    return fmt.name if fmt is not None else None


@functools.cache
def state_named(names: StateNames) -> OperandState:
    """Returns a state by the names of its formats."""
    return OperandState(format_named(names[0]), format_named(names[1]))


def reachable(
    operators: Sequence[ModelOperator], formats: Iterable[str]
) -> list[tuple[StateNames, ...]]:
    """Returns the states that each operator can take."""
    wanted = tuple(formats)
    outputs: list[set[Name]] = []
    result: list[tuple[StateNames, ...]] = []
    for operator in operators:
        decided = operator.decided
        states = (
            _chosen(decided, wanted)
            if isinstance(decided, Choices)
            else _followed(decided, outputs)
        )
        result.append(tuple(dict.fromkeys(states)))
        outputs.append({output for _, output in states})
    return result


def chosen(choices: Choices, planned: str, explicit: bool) -> str:
    """Returns the format that an operator computes in where a plan asks for one, for it or for all."""
    if choices.pinned is not None:
        return choices.pinned
    return choices.runs[choices.held if not explicit and planned in choices.keeps else planned]


def _chosen(choices: Choices, formats: Sequence[str]) -> list[StateNames]:
    runs = dict.fromkeys(
        chosen(choices, fmt, explicit) for fmt in formats for explicit in (True, False)
    )
    result: list[StateNames] = []
    for run in runs:
        result.append((run, choices.outputs.get(run)))
        if choices.wide is not None and FORMATS[run].scaled:
            result.append((run, choices.wide))
    return result


def _followed(follows: Follows, outputs: Sequence[set[Name]]) -> list[StateNames]:
    available: set[Name] = {follows.given}
    for index in follows.operators:
        available = {widest(a, b) for a in available for b in outputs[index]}
    result = [followed(follows, fmt) for fmt in sorted(available, key=str)]
    return [(fmt, follows.named or fmt) for fmt in result]


@functools.cache
def widest(first: Name, second: Name) -> Name:
    """Returns the promotion of two formats, of which either may be missing."""
    if first is None or second is None:
        return first or second
    return promoted(FORMATS[first], FORMATS[second]).name


def followed(follows: Follows, promotion: Name) -> Name:
    """Returns the format that an operator computes in, given the promotion of its inputs' formats."""
    if promotion is None or (follows.promotes and follows.scalar > FORMATS[promotion].max):
        return follows.own
    return promotion
