"""Memory of scaled dot-product attention without a fused kernel.

A fused kernel saves its result and one sum per row. Without it, as with dropout on a CPU, scores,
weights and the dropout mask are saved at full size. With dropout below FP32 a kernel materializes
the FP32 exponentials; in FP32 the backward pass recomputes the weights from the scores. On a GPU,
torch computes attention in FP32 where its fused kernels refuse the operands; dropout is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from qsync_fx.formats import FORMATS, FP32
from qsync_fx.predictor.memory.buffers import (
    Buffer,
    Task,
    Values,
    attends,
    draws_alone,
    integer_size,
)
from qsync_fx.predictor.memory.cuda_memory import on_gpu
from qsync_fx.predictor.model.model_graph import ModelGraph, ModelOperator, Name

QUERY, KEY, VALUE = range(3)
_SUM = 4
"""Bytes of the maximum and of the sum of a row, both FP32."""


def is_fused(
    graph: ModelGraph, operator: ModelOperator, state: tuple[Name, Name], on_gpus: bool = True
) -> bool:
    """Return whether an operator is attention with fused kernels; on GPUs if `on_gpus`."""
    if not attends(operator):
        return False
    if on_gpu(graph):
        return on_gpus
    if any(output is None for _, output in operator.costs):
        return True
    saved, result = operator.costs[state].saved, graph.values[operator.result].name
    return not saved or any(name == result and not fmt.startswith("extra") for name, fmt in saved)


def _kept_whole(
    values: Values, operator: ModelOperator, state: tuple[Name, Name], drops: bool
) -> bool:
    """Return whether the value operand is a view of a tensor that autograd saves in full."""
    read = operator.reads[VALUE].value
    root, name = values.root(read), values.graph.values[values.root(read)].name
    # With dropout, the cost in one state may refer to operands that are converted for it.
    costs = operator.costs.values() if drops else [operator.costs[state]]
    full = any(key == name for cost in costs for key, _ in cost.saved)
    return values.is_part(read) and full and values.states.format_of(root) == (state[0] or state[1])


def _width(operator: ModelOperator) -> int:
    """Return the number of elements per row of the result."""
    return int(operator.shape.rstrip("]").rpartition(",")[2])


class Matrices:
    """Buffers of attention without a fused kernel.

    Attributes:
        operands: query, key and value as contiguous copies. A value that needs no copy is replaced
            by the full base tensor of its view.
        copies: saved copies of query and key if their layout differs from the multiplied ones. This
            is the case for a value without copy, as in nn.MultiheadAttention.
        statistics: maximum and sum of each row, which the backward pass reads.
        mask: dropout mask; None without dropout.
        numbers: random numbers for the mask; None if the mask is drawn directly.
        exponentials: FP32 matrix that lives only during the computation of narrow weights.
    """

    def __init__(self, values: Values, index: int, operator: ModelOperator) -> None:
        graph, state = values.graph, values.states.names[index]
        gpu = on_gpu(graph)
        fmt = FP32.name if gpu else state[0] or state[1]
        assert fmt is not None, "attention without fused kernels has a format"
        result, size = graph.values[operator.result], FORMATS[fmt].dtype.itemsize
        # Each row of the scores yields one row of the result, as wide as a row of the values.
        width = _width(operator)
        rows = integer_size(result.numel) // width
        across = integer_size(graph.values[operator.reads[QUERY].value].numel) // rows
        scores = integer_size(operator.costs[state].forward.flops) // (2 * (across + width))
        drops = gpu or scores in map(integer_size, operator.costs[state].saved.values())

        def buffer(name: str, bytes_: int, fmt: Name = None) -> Buffer:
            return Buffer(f"{name} of {result.name}", fmt, bytes_)

        def operand(value: int, suffix: str = "") -> Buffer:
            return Buffer(graph.values[value].name + suffix, fmt, values.bytes(value, fmt))

        query, key, value = (read.value for read in operator.reads[:3])
        self.copies: tuple[Buffer, ...] = ()
        if not gpu and _kept_whole(values, operator, state, drops):
            value = values.root(value)
            self.copies = operand(query, " as kept"), operand(key, " as kept")
        self.operands = operand(query), operand(key), operand(value)
        self.scores, self.weights = (
            buffer(name, size * scores, fmt) for name in ("scores", "weights")
        )
        self.statistics = buffer("statistics", (2 * _SUM + 1) * rows)
        self.mask = self.numbers = self.exponentials = None
        if drops:
            self.mask = buffer("mask", scores)
            if not gpu and not draws_alone(operator):
                self.numbers = buffer("numbers", size * scores, fmt)
            if size < FP32.dtype.itemsize:
                self.exponentials = buffer("exponentials", 4 * scores, FP32.name)

    @property
    def saved(self) -> frozenset[Buffer]:
        """Tensors saved for backward; without dropout it reads the weights and not the scores."""
        result = frozenset((*self.factors, self.weights, *self.other_saved))
        return result | {self.scores} if self.mask is not None else result

    @property
    def other_saved(self) -> tuple[Buffer, ...]:
        """Saved tensors in addition to factors, scores and weights."""
        return tuple(filter(None, (self.statistics, self.mask)))

    @property
    def factors(self) -> tuple[Buffer, ...]:
        """Query, key and value as saved for backward."""
        return *(self.copies or self.operands[:VALUE]), self.operands[VALUE]

    def copied(self, name: str) -> list[Task]:
        """Return the tasks at the end of the forward pass that write the saved copies."""
        pairs = zip(self.operands, self.copies, strict=False)
        return [
            Task(name, False, False, frozenset({item}), (copy,), anew=True, apart=True)
            for item, copy in pairs
        ]

    def forward(self, name: str, sources: tuple[Set[Buffer], ...], result: Buffer) -> list[Task]:
        """Return the tasks that compute the result.

        `sources` are the buffers that query, key, value and an attention mask are computed from.
        """
        query, key, value = self.operands
        transposed = frozenset(sources[QUERY] | sources[KEY])
        rest = frozenset[Buffer]().union(*sources[VALUE + 1 :])
        drawn = tuple(filter(None, (self.numbers or self.mask,)))
        softmax = (*self.other_saved, self.weights, self.exponentials)
        written = tuple(item for item in softmax if item is not None and item not in drawn)
        return [
            Task(name, False, False, transposed, (query, key), anew=True),
            Task(name, False, True, frozenset({query, key}), (self.scores,)),
            *(Task(name, False, True, writes=(item,)) for item in drawn),
            Task(name, False, False, frozenset({self.scores, *drawn}) | rest, written, anew=True),
            Task(name, False, False, frozenset(sources[VALUE]), (value,), anew=True),
            Task(name, False, True, frozenset({self.weights, value}), (result,)),
        ]

    def backward(self, name: str, argument: Buffer, made: Mapping[int, Buffer]) -> list[Task]:
        """Return the tasks that compute the gradients.

        `argument` is the gradient of the result; `made` are the operands' gradients by index.
        """
        query, key, value = self.factors
        of_weights, of_scores = (
            replace(item, name=f"gradient of {item.name}") for item in (self.weights, self.scores)
        )
        result: list[Task] = []

        def task(library: bool, reads: Set[Buffer], written: Buffer, sums: bool = False) -> None:
            result.append(Task(name, True, library, frozenset(reads), (written,), sums=sums))

        if VALUE in made:
            task(True, {self.weights, argument}, made[VALUE])
        if QUERY in made or KEY in made:
            softmax = {self.weights if self.mask is None else self.scores, *self.other_saved}
            if self.mask is not None and self.exponentials is None:
                # In FP32 the weights are recomputed from the scores at any time before their use.
                again = replace(self.weights, name=f"{self.weights.name} again")
                task(False, {self.scores, self.statistics}, again)
                softmax = {again, self.mask}
            task(True, {argument, value}, of_weights)
            # The row sums come first, so the kernel does not fuse with elementwise tasks before it.
            task(False, {of_weights, *softmax}, of_scores, sums=True)
        if KEY in made:
            task(True, {query, of_scores}, made[KEY])
        if QUERY in made:
            task(True, {of_scores, key}, made[QUERY])
        return result
