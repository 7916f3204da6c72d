"""Synthetic model graphs of any number of operators, for tests and benchmarks of solve time.

A graph repeats one block: two linear layers, a GELU and a residual connection. A block is the
result of `build_model_graph` for a real module; only its connections change. Its operators take the
catalog's times on an A100 times a random factor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.devices import get
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.predictor.analytic_times import DeviceTimes
from qsync_fx.predictor.cost_mapper.times import ANYBODY, TOLD_BY_NONE, Beside, Seconds
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.predictor.model.model_graph import (
    Follows,
    ModelOperator,
    ModelParameter,
    ModelRead,
    StateNames,
    Value,
)
from qsync_fx.profiler.model_graph_builder import build_model_graph

DEVICE = "a100"
FORMATS = ("fp32", "tf32", "bf16", "int8", "int8_grad")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return result


class Repeated:
    """Times of a repeated block: catalog times with a lognormal factor per operator."""

    def __init__(self, block: ModelGraph, seed: int) -> None:
        self._block, self._times, self._seed = block, DeviceTimes(get(DEVICE), block), seed
        self._factors: dict[str, float] = {}

    def operator(
        self, operator: str, state: OperandState, around: Sequence[OperandState | None]
    ) -> Seconds:
        block_operator = operator.partition("|")[2]
        costs = self._block.operator(block_operator).costs
        block_state, share = state, 1.0
        if state.names not in costs:
            block_state = OperandState(*(precision_named(name) for name in next(iter(costs))))
            if state.output is not None:
                share = state.output.bits / 32
        seconds = self._times.operator(block_operator, block_state)
        factor = self._factor(operator) * share
        return Seconds(seconds.forward * factor, seconds.backward * factor)

    def least(self, operator: str, state: OperandState, concurrent: Beside = ANYBODY) -> Seconds:
        return self.operator(operator, state, ())

    def told_apart(
        self, operator: str, state: OperandState
    ) -> Sequence[Collection[StateNames] | None]:
        return TOLD_BY_NONE

    def cast(
        self, operator: str, before: str, after: str, numel: int, differentiated: bool
    ) -> Seconds:
        return self._times.cast(operator, before, after, numel, differentiated)

    def outside(self) -> Seconds:
        return Seconds(0.0, 0.0)

    def optimizer(self) -> float:
        return 0.0

    def _factor(self, operator: str) -> float:
        if operator not in self._factors:
            self._factors[operator] = random.Random(f"{self._seed} {operator}").lognormvariate(
                0, 0.4
            )
        return self._factors[operator]


def precision_named(name: str | None) -> qsync_fx.Precision | None:
    return None if name is None else qsync_fx.FORMATS[name]


def block_graph(width: int = 1024, rows: int = 2048) -> ModelGraph:
    """Return the graph of one block."""
    torch._dynamo.reset()
    batch = torch.randn(rows, width, requires_grad=True)
    return build_model_graph(
        qsync_fx.explain(Block(width).train(), batch, options={"target": DEVICE}), FORMATS
    )


def repeated(block: ModelGraph, count: int) -> ModelGraph:
    """Return the graph of `count` blocks in sequence."""
    source = next(index for index, value in enumerate(block.values) if value.source == "input")
    last = block.outputs[0].value
    operators: list[ModelOperator] = []
    values: list[Value] = []
    parameters: list[ModelParameter] = []
    for number in range(count):
        ahead, before, points = (
            len(block.operators) * number,
            len(block.values) * number,
            block.points * number,
        )

        def place(value: int, before: int = before, number: int = number) -> int:
            if value == source and number > 0:
                return last + before - len(block.values)
            return value + before

        def read(
            operand: ModelRead, points: int = points, place: Callable[[int], int] = place
        ) -> ModelRead:
            point = None if operand.point is None else operand.point + points
            return replace(
                operand, value=place(operand.value), origin=place(operand.origin), point=point
            )

        for value in block.values:
            maker = None if value.operator is None else value.operator + ahead
            name = f"{value.name}_{number}"
            values.append(replace(value, name=name, tensor=value.tensor + before, operator=maker))
        for operator in block.operators:
            decided = operator.decided
            if isinstance(decided, Follows):
                inputs = tuple(index + ahead for index in decided.operators)
                # The FP32 input of the first block would force all of its residuals to FP32. Later
                # blocks depend on
                # the last operator of the previous block instead.
                more = (ahead - 1,) if decided.given is not None and number else ()
                decided = replace(decided, operators=(*more, *inputs), given=None)
            else:
                decided = replace(
                    decided, readers=tuple(index + ahead for index in decided.readers)
                )
            costs = {state: replace(cost, saved={}) for state, cost in operator.costs.items()}
            name, reads = f"{number}|{operator.id}", tuple(map(read, operator.reads))
            operators.append(
                replace(
                    operator,
                    id=name,
                    result=place(operator.result),
                    reads=reads,
                    decided=decided,
                    costs=costs,
                )
            )
        for parameter in block.parameters:
            readers = tuple(index + ahead for index in parameter.readers)
            parameters.append(
                replace(parameter, path=f"{number}.{parameter.path}", readers=readers)
            )
    end = len(values) - len(block.values) + last
    outputs = tuple(
        replace(operator, value=end, origin=end, point=block.points * count - 1)
        for operator in block.outputs
    )
    return replace(
        block,
        operators=tuple(operators),
        values=tuple(values),
        parameters=tuple(parameters),
        outputs=outputs,
        points=block.points * count,
    )
