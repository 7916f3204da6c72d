"""Format choices as binary variables, and operator states as linear expressions.

`Formats` builds an indicator expression for each operator and format. With integer choices each is
0 or 1, and the formats equal the result of `plan_states.states`. `StateCosts` gives each state one
time; `NeighbourTerms` bounds times that depend on the states of neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from qsync_fx.allocator.milp.linear_program import (
    CONSTANT,
    ONE,
    Expression,
    LinearProgram,
    constant,
    total,
)
from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.formats import FORMATS
from qsync_fx.graph.cascade_rules import wants_wide
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.ops.spec import Kind
from qsync_fx.predictor.cost_mapper.plan_states import state_names
from qsync_fx.predictor.cost_mapper.times import NEIGHBOURS, Seconds, Times
from qsync_fx.predictor.model.model_graph import (
    Choices,
    Follows,
    ModelOperator,
    Name,
    StateNames,
    followed,
    format_named,
    reachable,
    state_named,
    widest,
)

COLUMNS: Final = 20_000
"""Limit of combinations; above it fewer neighbours have variables."""


@dataclass(frozen=True)
class CostTerm:
    """Seconds charged where an expression is 1; `owner` is the operator with the segment."""

    owner: int
    where: Expression
    forward: float
    backward: float

    @classmethod
    def of(cls, owner: int, where: Expression, used: Seconds) -> CostTerm:
        return cls(owner, where, used.forward, used.backward)


Spread = Mapping[Name, Expression]
"""Indicator expression by format."""


class Indicators(Protocol):
    """Indicators of operator states: of all plans (`Formats`), or of one (`PlanIndicators`)."""

    @property
    def program(self) -> LinearProgram: ...

    @property
    def precisions(self) -> Sequence[Spread]: ...

    @property
    def outputs(self) -> Sequence[Spread]: ...

    @property
    def states(self) -> Sequence[Mapping[StateNames, Expression]]: ...


class PlanIndicators:
    """Constant indicators of the states of one plan; expressions over them are constants."""

    def __init__(self, names: Sequence[StateNames]) -> None:
        self.program = LinearProgram()
        self.states: Sequence[Mapping[StateNames, Expression]] = [{state: ONE} for state in names]
        self.precisions: Sequence[Spread] = [{precision: ONE} for precision, _ in names]
        self.outputs: Sequence[Spread] = [{output: ONE} for _, output in names]


class Formats:
    """Indicator expressions of the formats of all operators.

    An adjustable operator has its choice variables, and an operator that depends on a single one
    shares its indicators. If several operators decide, the format is at most f if all of their
    formats are: one AND per format of the promotion lattice, in which BF16 and FP16 are
    incomparable. A scaled operator has a wide output if all readers compute wide: another AND.

    `choices` has the variable of each requested format by operator id. The other indicators are by
    operator index: of compute formats, of output formats, and of pairs of both (`states`).
    """

    def __init__(
        self, program: LinearProgram, part: DeviceClass, tied: Sequence[Sequence[str]] = ()
    ) -> None:
        self.program, self.part, self.graph = program, part, part.graph
        self.choices: dict[str, dict[str, int]] = {}
        self.precisions: list[Spread] = []
        self._narrow: list[Spread] = []
        self._distinct: dict[object, tuple[Spread, list[Spread]]] = {}
        shared = {operator: group[0] for group in tied for operator in group}
        for operator in self.graph.operators:
            decided = operator.decided
            if isinstance(decided, Choices):
                result: Spread = self._chosen(operator, shared.get(operator.id, operator.id))
                inputs = renamed(result, {name: decided.outputs.get(name or "") for name in result})
            else:
                formats = [{decided.given: ONE}, *(self._narrow[i] for i in decided.operators)]
                promotion = self._promoted(formats)
                result = renamed(promotion, {name: followed(decided, name) for name in promotion})
                inputs = {decided.named: ONE} if decided.named else result
            self.precisions.append(result)
            self._narrow.append(inputs)
        self.outputs: list[Spread] = list(self._narrow)
        self.states: list[Mapping[StateNames, Expression]] = []
        for index, operator in enumerate(self.graph.operators):
            self.states.append(self._states(index, operator))

    def plan_of(self, values: Sequence[float]) -> dict[str, str]:
        """Return the plan for values of the variables."""
        return {
            operator: max(entry, key=lambda fmt: values[entry[fmt]])
            for operator, entry in self.choices.items()
        }

    def _chosen(self, operator: ModelOperator, like: str) -> Spread:
        """Return an operator's choices, shared with the tied one if formats are equal."""
        available = self.part.choices[operator.id]
        if like not in self.choices or set(self.choices[like]) != set(available):
            self.choices[operator.id] = {fmt: self.program.variable(full=True) for fmt in available}
            self.program.row(dict.fromkeys(self.choices[operator.id].values(), 1.0), 1.0, 1.0)
        else:
            self.choices[operator.id] = self.choices[like]
        return {
            self.part.runs(operator.id, fmt): {index: 1.0}
            for fmt, index in self.choices[operator.id].items()
        }

    def _promoted(self, inputs: Iterable[Spread]) -> Spread:
        """Return the promotion of several formats."""
        floor: Name = None
        several: dict[int, Spread] = {}
        for spread in inputs:
            if len(spread) == 1:
                floor = widest(floor, next(iter(spread)))
            else:
                several[id(spread)] = spread
        above = [
            spread
            for spread in several.values()
            if any(widest(name, floor) != floor for name in spread)
        ]
        if not above:
            return {floor: ONE}
        key = floor, tuple(sorted(id(spread) for spread in above))
        if key not in self._distinct:
            raised = [renamed(s, {name: widest(name, floor) for name in s}) for s in above]
            joined = self._joined(raised) if len(raised) > 1 else raised[0]
            # Keys contain id(), so keep the keyed objects alive: a freed id could be reused.
            self._distinct[key] = joined, above
        return self._distinct[key][0]

    def _joined(self, inputs: Sequence[Spread]) -> Spread:
        """Return the promotion of several formats that are not constant."""
        names: set[Name] = set(inputs[0])
        for spread in inputs[1:]:
            names = {widest(first, second) for first in names for second in spread}
        top = next(name for name in names if all(_within(other, name) for other in names))
        result: dict[Name, Expression] = {}
        for name in sorted(names - {top}, key=_rank):
            result[name] = {self.program.variable(): 1.0}
            below = _up_to(name, result)
            each = [_up_to(name, spread) for spread in inputs]
            for item in each:
                self.program.row(total((1.0, below), (-1.0, item)), most=0.0)
            terms = [(-1.0, item) for item in each]
            self.program.row(total((1.0, below), *terms), least=1.0 - len(each))
        result[top] = total((1.0, ONE), *((-1.0, expression) for expression in result.values()))
        return result

    def _states(self, index: int, operator: ModelOperator) -> Mapping[StateNames, Expression]:
        decided, precisions = operator.decided, self.precisions[index]
        if isinstance(decided, Follows):
            return {
                (name, decided.named or name): expression for name, expression in precisions.items()
            }
        result: dict[StateNames, Expression] = {}
        inputs: dict[Name, Expression] = dict(self._narrow[index])
        for name, chosen in precisions.items():
            narrow, wide = decided.outputs.get(name or ""), None
            if name is not None and FORMATS[name].scaled:
                wide = self._wide(index, decided, chosen)
            if wide is None:
                result[name, narrow] = chosen
                continue
            result[name, decided.wide] = wide
            result[name, narrow] = total((1.0, chosen), (-1.0, wide))
            inputs[decided.wide] = total((1.0, inputs.get(decided.wide, {})), (1.0, wide))
            inputs[narrow] = total((1.0, inputs[narrow]), (-1.0, wide))
        if inputs != self._narrow[index]:
            self.outputs[index] = inputs
        return result

    def _wide(self, index: int, decided: Choices, chosen: Expression) -> Expression | None:
        """Return the indicator of a wide output of a scaled operator; None if it is never wide."""
        if decided.wide is None:
            return None
        owned = {
            variable for expression in self.precisions[index].values() for variable in expression
        }
        wants: list[Expression] = []
        for reader in dict.fromkeys(decided.readers):
            kind = Kind(self.graph.operators[reader].kind)
            parts = [
                e
                for name, e in self.precisions[reader].items()
                if wants_wide(kind, format_named(name))
            ]
            want = total(*((1.0, part) for part in parts))
            available = constant(want)
            if available == 0 or (
                available is None and {v for v in want if v != CONSTANT} <= owned - chosen.keys()
            ):
                return None
            if available is None:
                wants.append(want)
        return self.program.all_of([chosen, *wants])


def renamed(spread: Spread, names: Mapping[Name, Name]) -> Spread:
    """Return indicators under other format names; formats with equal new names are merged."""
    if all(before == after for before, after in names.items()):
        return spread
    result: dict[Name, Expression] = {}
    for before, after in names.items():
        result[after] = total((1.0, result.get(after, {})), (1.0, spread[before]))
    return {next(iter(result)): ONE} if len(result) == 1 else result


def _up_to(name: Name, spread: Spread) -> Expression:
    """Return the indicator that a format is at most as wide as `name`."""
    return total(*((1.0, where) for other, where in spread.items() if _within(other, name)))


def _within(narrow: Name, wide: Name) -> bool:
    return widest(narrow, wide) == wide


def _rank(name: Name) -> tuple[int, str]:
    """Return a deterministic sort key, narrowest first."""
    return (FORMATS[name].bits, name) if name is not None else (0, "")


class OperatorCosts(Protocol):
    """Operator times as charged by a program; `times` supplies the times of casts."""

    @property
    def times(self) -> Times: ...

    def charges(self, program: LinearProgram, formats: Formats) -> Iterable[CostTerm]:
        """Return the times of operators without their casts; may add variables and rows."""


class StateCosts:
    """One time per operator state, learned from evaluated plans.

    Initially the neighbours are in their states under the uniform plan that puts the operator into
    the state. For the plan learned last, the times equal the evaluator's times.
    `differ`: whether the time of any state can depend on neighbours.
    """

    def __init__(self, part: DeviceClass) -> None:
        self.part = part
        self._references = [state_names(part.graph, part.uniform(fmt)) for fmt in part.formats]
        self.differ = self._told_apart()
        self._learned: dict[tuple[int, StateNames], Seconds] = {}
        self._named: dict[StateNames, OperandState] = {}

    @property
    def times(self) -> Times:
        return self.part.times

    def charges(self, program: LinearProgram, formats: Formats) -> Iterator[CostTerm]:
        """Yield the times of operators in each state, independent of neighbours."""
        for index, spread in enumerate(formats.states):
            for state, where in spread.items():
                yield CostTerm.of(index, where, self.operator(index, state))

    def operator(self, index: int, state: StateNames) -> Seconds:
        """Return the time of an operator in a state."""
        key = index, state
        if key not in self._learned:
            # If no uniform plan has the state, use a plan with the same compute format.
            best = max(
                self._references,
                key=lambda names: (names[index] == state, names[index][0] == state[0]),
            )
            self._learned[key] = self._ask(index, state, best)
        return self._learned[key]

    def learn(self, names: Sequence[StateNames]) -> bool:
        """Learn the times of the states of a plan; return whether any are new."""
        result = {
            (index, state): self._ask(index, state, names) for index, state in enumerate(names)
        }
        new = any(self.operator(*key) != seconds for key, seconds in result.items())
        self._learned |= result
        return new

    def _told_apart(self) -> bool:
        """Return whether the time of any operator depends on its neighbours."""
        graph = self.part.graph
        return any(
            entry is None or len(entry) > 0
            for operator, reached in zip(
                graph.operators, reachable(graph.operators, self.part.formats), strict=True
            )
            for names in reached
            for entry in self.times.told_apart(operator.id, state_named(names))
        )

    def _ask(self, index: int, state: StateNames, names: Sequence[StateNames]) -> Seconds:
        near = (index + by for by in NEIGHBOURS)
        around = [self._state(names[n]) if 0 <= n < len(names) else None for n in near]
        return self.times.operator(self.part.graph.operators[index].id, self._state(state), around)

    def _state(self, names: StateNames) -> OperandState:
        """Return a cached state; thousands of operators share few states."""
        if names not in self._named:
            self._named[names] = state_named(names)
        return self._named[names]


@dataclass(frozen=True)
class _Kind:
    """Equivalent states of a neighbour, with a representative; None if there is no neighbour."""

    state: OperandState | None
    where: Expression


class NeighbourTerms:
    """Lower bounds on operator times that depend on neighbour states.

    Each combination of the states of an operator and its neighbours has a variable. The variables
    with one state of the operator, or of a neighbour, sum to the state's indicator. States that
    times do not distinguish are merged. If there are too many combinations with all neighbours,
    only the nearest two or none have variables, and the time is the minimum over the others.
    """

    def __init__(self, part: DeviceClass) -> None:
        self.part, self.graph = part, part.graph

    @property
    def times(self) -> Times:
        return self.part.times

    def charges(self, program: LinearProgram, formats: Formats) -> Iterator[CostTerm]:
        """Yield the times of all operators, without their casts."""
        around = [self._around(index, formats) for index in range(len(formats.states))]
        for count in (len(NEIGHBOURS), 2, 0):
            sizes = [math.prod(map(len, kinds[:count])) for kinds in around]
            pairs = zip(sizes, formats.states, strict=True)
            if sum(size * len(states) for size, states in pairs) <= COLUMNS:
                break
        for index, states in enumerate(formats.states):
            yield from self._combined(program, index, states, around[index][:count])

    def _around(self, index: int, formats: Formats) -> list[list[_Kind]]:
        """Return the equivalence classes of the states of each neighbour."""
        name = self.graph.operators[index].id
        distinguished = [
            self.times.told_apart(name, state_named(state)) for state in formats.states[index]
        ]
        result: list[list[_Kind]] = []
        for number, by in enumerate(NEIGHBOURS):
            if not 0 <= index + by < len(formats.states):
                result.append([_Kind(None, ONE)])
                continue
            states = formats.states[index + by]
            sets = [entry[number] for entry in distinguished]
            alone = [item for item in states if any(s is None or item in s for s in sets)]
            rest = [item for item in states if item not in alone]
            groups = [[item] for item in alone] + ([rest] if rest else [])
            kinds = []
            for group in groups:
                where = total(*((1.0, states[item]) for item in group))
                kinds.append(_Kind(state_named(group[0]), where))
            result.append(kinds)
        return result

    def _combined(
        self,
        program: LinearProgram,
        index: int,
        states: Mapping[StateNames, Expression],
        kinds: Sequence[Sequence[_Kind]],
    ) -> Iterator[CostTerm]:
        """Yield an operator's times by the states of some neighbours, nearest first."""
        partitions = [dict(enumerate(kind.where for kind in each)) for each in kinds]
        for (state, *picked), where in program.joint(states, *partitions).items():
            chosen = [each[kind].state for each, kind in zip(kinds, picked, strict=True)]
            yield CostTerm.of(index, where, self._seconds(index, state_named(state), chosen))

    def _seconds(
        self, index: int, state: OperandState, around: Sequence[OperandState | None]
    ) -> Seconds:
        """Return the time of an operator, the minimum over the neighbours that are not given."""
        name = self.graph.operators[index].id
        if len(around) == len(NEIGHBOURS):
            return self.times.operator(name, state, around)
        return self.times.least(name, state, dict(zip(NEIGHBOURS, around, strict=False)))
