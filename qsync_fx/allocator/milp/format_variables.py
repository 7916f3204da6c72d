"""What operators compute in and give out, as linear expressions of what is chosen.

For each operator and each format that it can have there is an expression that is 1 where it has it and 0 elsewhere. Of an adjustable
operator they are its choices, of one that follows a single operator those of that one. Where several decide, the format is at most f where
all of theirs are: an AND a format of the lattice that promotion makes of formats, BF16 and FP16 side by side included. A scaled operator
gives out what is wide where all of its readers compute wide: another AND.

Invariant: at whole choices these are the formats that `mapper.states` finds.

`Charge`: what something takes, and where.

Invariant: at whole choices the expression is 0 or 1.

What each state of each operator takes, as one number: a linear program has no neighbours.

A time may depend on the states of an operator's neighbours. Taken is that with neighbours as they are under the uniform plan that has the
operator in the state. Of plans that were judged, what their states took there is known better, and counts from then on. What no plan is
below is reckoned with what operators take beside their neighbours: `beside`.

Invariant: at the plan that was learned last, the prices are the judge's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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
from qsync_fx.predictor.times import NEIGHBOURS, Seconds, Times


@dataclass(frozen=True)
class CostTerm:
    """Time that is taken where an expression is 1.

    Attributes:
        owner: the place of the operator in whose stretch of the backward pass it is.
        where: the expression.
        forward, backward: seconds.
    """

    owner: int
    where: Expression
    forward: float
    backward: float

    @classmethod
    def of(cls, owner: int, where: Expression, used: Seconds) -> CostTerm:
        return cls(owner, where, used.forward, used.backward)


Spread = Mapping[Name, Expression]
"""By format, where something has it."""


class Formats:
    """
    Args:
        program: what gets the variables and rows.
        part: the class of devices.
        tied: groups of operators that get one format.

    Attributes:
        choices: by adjustable operator's id, the variable of each format that may be asked for.
        precisions: by operator, what it computes in.
        outputs: by operator, what it gives out.
        states: by operator, both at once.
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
                promotion = self._promoted(
                    [{decided.given: ONE}, *(self._narrow[index] for index in decided.operators)]
                )
                result = renamed(promotion, {name: followed(decided, name) for name in promotion})
                inputs = {decided.named: ONE} if decided.named else result
            self.precisions.append(result)
            self._narrow.append(inputs)
        self.outputs: list[Spread] = list(self._narrow)
        self.states: list[Mapping[StateNames, Expression]] = []
        for index, operator in enumerate(self.graph.operators):
            self.states.append(self._states(index, operator))

    def asked(self, values: Sequence[float]) -> dict[str, str]:
        """Returns the plan that values of the variables make."""
        return {
            operator: max(entry, key=lambda fmt: values[entry[fmt]])
            for operator, entry in self.choices.items()
        }

    def _chosen(self, operator: ModelOperator, like: str) -> Spread:
        """Gives an operator its choices: those of the one that it is tied to, where it can take the same."""
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
        """Returns the promotion of several formats."""
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
        if len(above) == 1:
            return renamed(above[0], {name: widest(name, floor) for name in above[0]})
        key = floor, tuple(sorted(id(spread) for spread in above))
        if key not in self._distinct:
            joined = self._joined(
                [renamed(s, {name: widest(name, floor) for name in s}) for s in above]
            )
            # Held with what it is of: the place of one that were gone would be another's, and so its number.
            self._distinct[key] = joined, above
        return self._distinct[key][0]

    def _joined(self, inputs: Sequence[Spread]) -> Spread:
        """Returns the promotion of several that are free."""
        names: set[Name] = set(inputs[0])
        for spread in inputs[1:]:
            names = {widest(first, second) for first in names for second in spread}
        top = next(name for name in names if all(_within(other, name) for other in names))
        result: dict[Name, Expression] = {}
        for name in sorted(names - {top}, key=_rank):
            result[name] = {self.program.variable(): 1.0}
            below = total(*((1.0, result[other]) for other in result if _within(other, name)))
            each = [
                total(
                    *(
                        (1.0, expression)
                        for other, expression in spread.items()
                        if _within(other, name)
                    )
                )
                for spread in inputs
            ]
            for item in each:
                self.program.row(total((1.0, below), (-1.0, item)), most=0.0)
            self.program.row(
                total((1.0, below), *((-1.0, item) for item in each)), least=1.0 - len(each)
            )
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
            narrow = decided.outputs.get(name or "")
            wide = (
                self._wide(index, decided, chosen)
                if name is not None and FORMATS[name].scaled
                else None
            )
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
        """Returns where a scaled operator gives out what is wide; None for nowhere."""
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
    """Returns a spread under other names, the same where none is another."""
    if all(before == after for before, after in names.items()):
        return spread
    result: dict[Name, Expression] = {}
    for before, after in names.items():
        result[after] = (
            total((1.0, result.get(after, {})), (1.0, spread[before]))
            if after in result
            else spread[before]
        )
    return {next(iter(result)): ONE} if len(result) == 1 else result


def _within(narrow: Name, wide: Name) -> bool:
    return widest(narrow, wide) == wide


def _rank(name: Name) -> tuple[int, str]:
    """Narrow ones first, in an order that is the same in each run."""
    return (FORMATS[name].bits, name) if name is not None else (0, "")


class Priced(Protocol):
    """What a program takes states to take.

    Attributes:
        times: what casts are asked of.
    """

    @property
    def times(self) -> Times: ...

    def charges(self, program: LinearProgram, formats: Formats) -> Iterable[CostTerm]:
        """Returns what operators take, without their casts; may give the program variables and rows."""


class StateCosts:
    """
    Args:
        part: the class of devices.

    Attributes:
        differ: whether a state may take other times beside other neighbours.
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
        """Yields what operators take in each state, whatever their neighbours."""
        for index, spread in enumerate(formats.states):
            for state, where in spread.items():
                yield CostTerm.of(index, where, self.operator(index, state))

    def operator(self, index: int, state: StateNames) -> Seconds:
        """Returns the time of an operator in a state."""
        key = index, state
        if key not in self._learned:
            # A state that no uniform plan has is like those that compute the same.
            best = max(
                self._references,
                key=lambda names: (names[index] == state, names[index][0] == state[0]),
            )
            self._learned[key] = self._ask(index, state, best)
        return self._learned[key]

    def learn(self, names: Sequence[StateNames]) -> bool:
        """Takes from a plan what its states take there; returns whether anything is new."""
        result = {
            (index, state): self._ask(index, state, names) for index, state in enumerate(names)
        }
        new = any(self.operator(*key) != seconds for key, seconds in result.items())
        self._learned |= result
        return new

    def _told_apart(self) -> bool:
        """Whether times of any operator follow its neighbours."""
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
        """Returns a state by its names: there are few, of thousands of operators."""
        if names not in self._named:
            self._named[names] = state_named(names)
        return self._named[names]
