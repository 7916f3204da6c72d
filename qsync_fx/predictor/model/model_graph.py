"""Model graph: operators, values, costs and cascade rules of a model, without torch's FX graph.

Operators are in execution order. Operators and values refer to each other by index. A size is an
integer, or a sympy expression if the model was explained with symbolic shapes. Formats are names in
`FORMATS`, or None for "no floating-point values".
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy

from qsync_fx.errors import ProfileError, nearest
from qsync_fx.formats import FORMATS, Precision, promoted
from qsync_fx.graph.cost_algebra import Cost, Size
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.plan.operator_id import OpId
from qsync_fx.serialization.schema import Path

Name = str | None
"""Name of a format; None for "no format"."""

StateNames = tuple[Name, Name]
"""Names of the precision and of the output format of an operator."""


@dataclass(frozen=True)
class Value:
    """Result of an operator, parameter, buffer, input or constant.

    Attributes:
        name: name of its FX node; saved tensors in costs refer to it.
        tensor: index of the value whose storage it shares; its own index if it is no view.
        operator: index of the operator that determines its format; None if it is always `own`.
        source: "operator", "parameter", "buffer", "input", or "constant" for all others.
        own: format in the model as written.
        numel: number of floating-point elements.
        fixed: bytes of its other contents, such as integers and masks.
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
    """Read of a value by an operator or by the model's caller.

    Attributes:
        role: name of the argument.
        wanted: required format by the reader's precision ("" for none); None accepts any format.
        point: cast point, equal for reads that share one cast per format; None if no plan casts it.
        origin: index of the value that a cast converts: `value`, or the operand of the model's own
            conversions that lead to it.
    """

    value: int
    role: str
    wanted: Mapping[str, Name]
    point: int | None
    origin: int
    gradient: bool


@dataclass(frozen=True)
class Choices:
    """Formats of an adjustable operator as a function of the plan.

    Attributes:
        runs: precision by planned format.
        held: planned format that replaces a plan's default in `keeps`.
        outputs: output format by precision.
        wide: output format of a scaled precision if all `readers` compute in FP32 or wider;
            None if the output is never wide.
        readers: indices of the operators that `wide` depends on.
        pinned: precision assigned by a user's pass, which overrides every plan.
        unpacked: by scaled format, the plain format that saved operands are converted to in the
            backward pass.
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
    """Cascade rule of an operator that is not adjustable.

    Attributes:
        operators: indices of the operators whose outputs determine its precision.
        given: promotion of its other inputs; None if there are none.
        own: precision if no input has a format, or if a scalar argument exceeds the format's range.
        promotes: whether the precision is the promotion of all inputs.
        scalar: largest magnitude of its scalar arguments.
        named: output format that its arguments name, if any.
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
    """Operator of the model.

    Attributes:
        kind: "adjustable", "dependent" or "fixed".
        row: name of its row in the operator table.
        shape: description of its result as explained: "f32[8, 16]", "f32[batch, 16]".
        line: source location of the call: "model.py:42"; "" if unknown.
        graph: index of its graph, if graph breaks split the model.
        repeated: whether activation checkpointing recomputes it.
        converts: whether it is a conversion of the model itself.
        converted: whether it computes in the model's own format and converts its result.
        costs: cost in each reachable state, without casts.
        method: variant of the computation: "tanh" for an approximate gelu, "vectors" for a dropout
            that draws its random numbers in vectors; else "".
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
        """Its id and source location, for error messages."""
        return f"operator {self.id}, {self.line}".removesuffix(", ")


@dataclass(frozen=True)
class ModelParameter:
    """Parameter of the model; `readers` are the indices of the operators that read it."""

    path: str
    numel: int
    dtype_bytes: int
    trained: bool
    readers: tuple[int, ...]


@dataclass(frozen=True)
class ModelGraph:
    """Model as the predictor reads it.

    Attributes:
        device: device that it was explained for: the option "target", else the device type.
        outputs: reads of the model's results by its caller.
        points: number of cast points.
        formats: formats that plans may request.
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
        """Index of each operator by its id."""
        return {operator.id: index for index, operator in enumerate(self.operators)}

    def operator(self, name: str) -> ModelOperator:
        """Return an operator by its id; raise `ProfileError` if it does not exist."""
        return self.operators[self.place(name)]

    def place(self, name: str) -> int:
        """Return the index of an operator; raise `ProfileError` if it does not exist."""
        if name not in self.places:
            raise ProfileError(f"the model has no operator {name!r}", do=nearest(name, self.places))
        return self.places[name]

    def at(self, **sizes: int) -> ModelGraph:
        """Return the model with positive numbers for the named symbolic sizes: `batch=32`."""
        from qsync_fx.predictor.model.symbolic_sizes import sized

        return sized(self, sizes)

    @functools.cached_property
    def symbols(self) -> frozenset[str]:
        """Names of its symbolic sizes."""
        return frozenset(str(symbol) for size in self.symbolic for symbol in size.free_symbols)

    @functools.cached_property
    def symbolic(self) -> tuple[sympy.Basic, ...]:
        """Its distinct sizes that are not numbers."""
        from qsync_fx.predictor.model.symbolic_sizes import sizes_of

        sizes = dict.fromkeys(sizes_of(self))
        return tuple(size for size in sizes if isinstance(size, sympy.Basic))

    @functools.cached_property
    def independent_of_sizes(self) -> dict[str, Any]:
        """Cache of results that do not depend on sizes, shared with graphs of `at`."""
        return {}

    def save(self, path: Path) -> None:
        """Write the model to a JSON file atomically; raise `ProfileError` if that fails."""
        from qsync_fx.predictor.model.model_file import FILE, stored

        FILE.write(path, FILE.encode(stored(self)))

    @classmethod
    def load(cls, path: Path) -> ModelGraph:
        """Read a file of `save` from any source; raise `ProfileError` that locates a defect."""
        from qsync_fx.predictor.model.model_file import FILE, restored

        return restored(FILE.load(path))


def format_named(name: Name) -> Precision | None:
    """Return a format by its name."""
    return FORMATS[name] if name is not None else None


def name_of(fmt: Precision | None) -> Name:
    """Return the name of a format."""
    return fmt.name if fmt is not None else None


@functools.cache
def state_named(names: StateNames) -> OperandState:
    """Return a state by the names of its formats."""
    return OperandState(format_named(names[0]), format_named(names[1]))


def reachable(
    operators: Sequence[ModelOperator], formats: Iterable[str]
) -> list[tuple[StateNames, ...]]:
    """Return a superset of the states that each operator can reach under plans with these formats.

    Inputs count as independent, so some returned states may be unreachable.
    """
    wanted = tuple(formats)
    outputs: list[set[Name]] = []
    result: list[tuple[StateNames, ...]] = []
    for operator in operators:
        decided = operator.decided
        if isinstance(decided, Choices):
            states = _chosen(decided, wanted)
        else:
            states = _followed(decided, outputs)
        result.append(tuple(dict.fromkeys(states)))
        outputs.append({output for _, output in states})
    return result


def chosen(choices: Choices, planned: str, explicit: bool) -> str:
    """Return the precision of an adjustable operator for a planned format.

    `explicit`: the plan names the operator or a pattern that matches it, not a default.
    """
    if choices.pinned is not None:
        return choices.pinned
    if not explicit and planned in choices.keeps:
        return choices.runs[choices.held]
    return choices.runs[planned]


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
    """Return the promotion of two formats; a missing format does not widen the other one."""
    if first is None or second is None:
        return first or second
    return promoted(FORMATS[first], FORMATS[second]).name


def followed(follows: Follows, promotion: Name) -> Name:
    """Return the precision of an operator, given the promotion of its inputs' formats."""
    if promotion is None or (follows.promotes and follows.scalar > FORMATS[promotion].max):
        return follows.own
    return promotion


@dataclass(frozen=True)
class Blocks:
    """Isomorphic blocks: each one's module path, and its operator ids in execution order."""

    modules: tuple[str, ...]
    operators: tuple[tuple[str, ...], ...]

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Operators at the same position of each block, one tuple per position."""
        return tuple(zip(*self.operators, strict=True))


def isomorphic_blocks(graph: ModelGraph) -> tuple[Blocks, ...]:
    """Return the largest isomorphic blocks of a model, in descending order of operator count."""
    inside = _operators_of_modules(graph)
    equal: dict[Hashable, list[str]] = {}
    for module, places in inside.items():
        if len(places) > 1:
            equal.setdefault(_structure(graph, places), []).append(module)
    result: list[Blocks] = []
    used: set[int] = set()
    for modules in sorted(equal.values(), key=lambda modules: -len(inside[modules[0]])):
        # A module that only wraps another one is the same block.
        distinct = {tuple(inside[module]): module for module in reversed(modules)}
        free = [module for module in modules if module in distinct.values()]
        free = [module for module in free if used.isdisjoint(inside[module])]
        if len(free) > 1:
            used.update(place for module in free for place in inside[module])
            ids = [tuple(graph.operators[i].id for i in inside[module]) for module in free]
            result.append(Blocks(tuple(free), tuple(ids)))
    return tuple(result)


def _operators_of_modules(graph: ModelGraph) -> Mapping[str, list[int]]:
    result: dict[str, list[int]] = {}
    for place, operator in enumerate(graph.operators):
        parts = OpId.parse(operator.id).module.split(".")
        for end in range(1, len(parts) + 1):
            if parts[0]:
                result.setdefault(".".join(parts[:end]), []).append(place)
    return result


def _structure(graph: ModelGraph, places: list[int]) -> Hashable:
    """Return a key that is equal for isomorphic blocks."""
    numbers = {place: number for number, place in enumerate(places)}
    points: dict[int | None, int] = {None: -1}
    result: list[Hashable] = []
    for place in places:
        operator = graph.operators[place]
        decided = operator.decided
        if isinstance(decided, Choices):
            formats = decided.held, decided.keeps, decided.pinned, decided.wide
            rule: Hashable = (tuple(decided.runs.items()), *formats)
        else:
            rule = (decided.own, decided.promotes, decided.scalar, decided.named)
        result.append((operator.row, operator.kind, operator.repeated, operator.converts, rule))
        for read in operator.reads:
            value = graph.values[read.value]
            source: int | str = value.source
            if value.operator is not None:
                source = numbers.get(value.operator, "outside")
            shared = points.setdefault(read.point, len(points))
            wanted = tuple(read.wanted.items())
            result.append((read.role, source, value.own, read.gradient, shared, wanted))
            result.append((value.numel, value.fixed))
        result += [(state, *cost.sizes) for state, cost in operator.costs.items()]
    return tuple(result)
