"""Memory of scaled dot-product attention: its buffers without a fused kernel, and scratch space.

A fused kernel saves its result and one sum per row. Without it, as with dropout on a CPU, scores,
weights and the dropout mask are saved at full size. With dropout below FP32 a kernel materializes
the FP32 exponentials; in FP32 the backward pass recomputes the weights from the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from qsync_fx.formats import FORMATS, FP32
from qsync_fx.predictor.memory.buffers import Buffer, Task, Values, attends, draws_alone, whole
from qsync_fx.predictor.model.model_graph import ModelGraph, ModelOperator, Name

QUERY, KEY, VALUE = range(3)
_SUM = 4
"""Bytes of the maximum and of the sum of a row, both FP32."""


def is_fused(graph: ModelGraph, operator: ModelOperator, state: tuple[Name, Name]) -> bool:
    """Return whether an operator is attention with fused forward and backward kernels.

    On GPUs all attention counts as fused.
    """
    if not attends(operator):
        return False
    if graph.device != "cpu" or any(output is None for _, output in operator.costs):
        return True
    saved = operator.costs[state].saved
    name = graph.values[operator.result].name
    return not saved or any(
        key == name and not settings.startswith("extra") for key, settings in saved
    )


def _kept_whole(
    values: Values, operator: ModelOperator, state: tuple[Name, Name], drops: bool
) -> bool:
    """Return whether the value operand is a view of a tensor that autograd saves in full."""
    read = operator.reads[VALUE].value
    root, name = values.root(read), values.graph.values[values.root(read)].name
    # With dropout, the cost in one state may refer to operands that are converted for it.
    costs = operator.costs.values() if drops else [operator.costs[state]]
    full = any(key == name for cost in costs for key, _ in cost.saved)
    return values.is_part(read) and full and values.states.held(root) == (state[0] or state[1])


def _width(operator: ModelOperator) -> int:
    """Return the number of elements per row of the result."""
    return int(operator.shape.rstrip("]").rpartition(",")[2])


_ROWS, _COLUMNS = ((768, 256), (192, 64), (0, 32)), 512
"""Query block sizes of torch's CPU kernel, by minimum number of queries, and its key block size."""


def scratch(
    graph: ModelGraph, operator: ModelOperator, state: tuple[Name, Name]
) -> tuple[int, int]:
    """Return the scratch bytes per thread of torch's fused CPU kernel, forward and backward.

    The forward pass uses a block of FP32 scores, the backward pass another one for their gradients.
    GPU kernels use registers, so the result is 0.
    """
    if graph.device != "cpu":
        return 0, 0
    query, key = (whole(graph.values[read.value].numel) for read in operator.reads[: KEY + 1])
    wide = _width(operator)
    rows = whole(graph.values[operator.result].numel) // wide
    across = query // rows
    keys = whole(operator.costs[state].forward.flops) // (2 * (across + wide) * rows)
    queries = query * keys // key
    high = min(queries, next(size for least, size in _ROWS if queries >= least))
    block = high * min(keys, _COLUMNS)
    size = FP32.dtype.itemsize
    return size * (block + high * (2 + wide)), size * (2 * block + high)


@dataclass(frozen=True)
class Matrices:
    """Buffers of attention without a fused kernel.

    Attributes:
        operands: query, key and value as contiguous copies. A value that needs no copy is replaced
            by the full base tensor of its view.
        copies: saved copies of query and key if their layout differs from the multiplied ones. This
            is the case for a value without copy, as in nn.MultiheadAttention.
        scores, weights: matrices before and after the softmax; dropped weights are zero.
        statistics: maximum and sum of each row, which the backward pass reads.
        mask: dropout mask; None without dropout.
        passing: buffers that live only during the computation of the weights.
        numbers: random numbers for the mask; None if the mask is drawn directly.
    """

    operands: tuple[Buffer, Buffer, Buffer]
    copies: tuple[Buffer, Buffer] | None
    scores: Buffer
    weights: Buffer
    statistics: Buffer
    mask: Buffer | None
    passing: tuple[Buffer, ...]
    numbers: Buffer | None

    @classmethod
    def of(cls, values: Values, index: int, operator: ModelOperator) -> Matrices:
        """Return the buffers of the operator at `index` under the states of `values`."""
        graph, state = values.graph, values.states.names[index]
        fmt = state[0] or state[1]
        assert fmt is not None, "attention without fused kernels has a format"
        result, size = graph.values[operator.result], FORMATS[fmt].dtype.itemsize
        # Each row of the scores yields one row of the result, as wide as a row of the values.
        width = _width(operator)
        rows = whole(result.numel) // width
        across = whole(graph.values[operator.reads[QUERY].value].numel) // rows
        scores = whole(operator.costs[state].forward.flops) // (2 * (across + width))
        drops = scores in map(whole, operator.costs[state].saved.values())

        def buffer(name: str, bytes_: int, fmt: Name = None) -> Buffer:
            return Buffer(f"{name} of {result.name}", fmt, bytes_)

        query, key, value = (
            Buffer(graph.values[read.value].name, fmt, values.bytes(read.value, fmt))
            for read in operator.reads[:3]
        )
        copies = None
        if _kept_whole(values, operator, state, drops):
            root = values.root(operator.reads[VALUE].value)
            value = Buffer(graph.values[root].name, fmt, values.bytes(root, fmt))
            copies = (
                replace(query, name=f"{query.name} as kept"),
                replace(key, name=f"{key.name} as kept"),
            )
        mask = numbers = None
        passing: tuple[Buffer, ...] = ()
        if drops:
            mask = buffer("mask", scores)
            if not draws_alone(operator):
                numbers = buffer("numbers", size * scores, fmt)
            if size < FP32.dtype.itemsize:
                passing = (buffer("exponentials", FP32.dtype.itemsize * scores, FP32.name),)
        return cls(
            (query, key, value),
            copies,
            buffer("scores", size * scores, fmt),
            buffer("weights", size * scores, fmt),
            buffer("statistics", (2 * _SUM + 1) * rows),
            mask,
            passing,
            numbers,
        )

    @property
    def saved(self) -> frozenset[Buffer]:
        """Tensors saved for backward."""
        result = frozenset((*self.factors, self.weights, *self.kept))
        if self.mask is None:
            return result  # without dropout the backward pass reads the weights only
        return result | {self.scores}

    @property
    def kept(self) -> tuple[Buffer, ...]:
        """Saved tensors in addition to factors, scores and weights."""
        return tuple(item for item in (self.statistics, self.mask) if item is not None)

    @property
    def factors(self) -> tuple[Buffer, Buffer, Buffer]:
        """Query, key and value as saved for backward."""
        if self.copies is None:
            return self.operands
        return *self.copies, self.operands[VALUE]

    def copied(self, name: str) -> list[Task]:
        """Return the tasks at the end of the forward pass that write the saved copies."""
        return [
            Task(name, False, False, frozenset({item}), (copy,), anew=True, apart=True)
            for item, copy in zip(self.operands, self.copies or (), strict=False)
        ]

    def forward(self, name: str, sources: tuple[Set[Buffer], ...], result: Buffer) -> list[Task]:
        """Return the tasks that compute the result.

        Args:
            name: id of the operator.
            sources: buffers that query, key, value and an attention mask are computed from.
            result: buffer of the result.
        """
        query, key, value = self.operands
        transposed = frozenset(sources[QUERY] | sources[KEY])
        rest = frozenset[Buffer]().union(*sources[VALUE + 1 :])
        drawn = tuple(item for item in (self.numbers or self.mask,) if item is not None)
        written = (*(item for item in self.kept if item not in drawn), self.weights, *self.passing)
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

        Args:
            name: id of the operator.
            argument: gradient of the result.
            made: buffers of the operands' gradients, by operand index.
        """
        query, key, value = self.factors
        changed = Buffer(
            f"gradient of {self.weights.name}", self.weights.format, self.weights.bytes
        )
        transposed = Buffer(
            f"gradient of {self.scores.name}", self.scores.format, self.scores.bytes
        )
        matches: list[Task] = []

        def product(item: Buffer, other: Buffer, result: Buffer) -> None:
            matches.append(Task(name, True, True, frozenset({item, other}), (result,)))

        if VALUE in made:
            product(self.weights, argument, made[VALUE])
        if QUERY in made or KEY in made:
            scores, saved = (
                (self.weights if self.mask is None else self.scores),
                frozenset(self.kept),
            )
            if self.mask is not None and not self.passing:
                # In FP32 the weights are recomputed from the scores at any time before their use.
                again = Buffer(
                    f"{self.weights.name} again", self.weights.format, self.weights.bytes
                )
                matches.append(
                    Task(name, True, False, frozenset({scores, self.statistics}), (again,))
                )
                scores, saved = again, saved - {self.statistics}
            product(argument, value, changed)
            # The row sums come first, so the kernel does not fuse with elementwise tasks before it.
            matches.append(
                Task(
                    name,
                    True,
                    False,
                    frozenset({changed, scores}) | saved,
                    (transposed,),
                    sums=True,
                )
            )
        if KEY in made:
            product(query, transposed, made[KEY])
        if QUERY in made:
            product(transposed, key, made[QUERY])
        return matches
