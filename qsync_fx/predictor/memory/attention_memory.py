"""Attention as one operator: which kernels compute it on a CPU, and what these write and keep.

A fused kernel keeps its result and a sum for each row. Where it does not serve, as with dropout, attention is what it stands for: query and
key are laid out anew and multiplied, and what became of the scores multiplies the values. Scores, weights and the mask of what was dropped
are kept whole. In a format below FP32 a kernel takes the exponentials in FP32 beside all these where some are dropped; else they stay in a
row of its own. In FP32 weights are computed again, from scores, in the backward pass. Which attention is products without dropout,
`qsync_fx.graph.saved_tensors` says.

Values that are a part of something larger and need no laying out, as of torch's own MultiheadAttention, are read and kept as that, whole.
Query and key are then kept as copies that a compiler writes last, in the order in which autograd wants them.

Invariant: which of both it is follows from what autograd keeps of the operator: a fused kernel keeps its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from qsync_fx.formats import FORMATS, FP32
from qsync_fx.predictor.memory.buffers import Buffer, Task, Values, attends, draws_alone, whole
from qsync_fx.predictor.model.model_graph import ModelGraph, ModelOperator, Name

QUERY, KEY, VALUE = range(3)
_SUM = 4
"""Bytes of the largest and of the sum of a row, which are FP32."""


def is_fused(graph: ModelGraph, operator: ModelOperator, state: tuple[Name, Name]) -> bool:
    """Whether an operator in a state is attention that one kernel computes, and another one its gradients; on GPUs it is taken to be."""
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
    """Whether its value, in a state, is a part of something that autograd keeps as it is, where it is in that format."""
    read = operator.reads[VALUE].value
    root, name = values.root(read), values.graph.values[values.root(read)].name
    # A cost of an operator is of operands that are converted for it where they are of another format in the model as it is written.
    costs = operator.costs.values() if drops else [operator.costs[state]]
    full = any(key == name for cost in costs for key, _ in cost.saved)
    return values.is_part(read) and full and values.states.held(root) == (state[0] or state[1])


def _width(operator: ModelOperator) -> int:
    """How many elements a row of the result has."""
    return int(operator.shape.rstrip("]").rpartition(",")[2])


_ROWS, _COLUMNS = ((768, 256), (192, 64), (0, 32)), 512
"""How many queries torch's kernel takes at once, by how many there are at least, and how many keys."""


def scratch(
    graph: ModelGraph, operator: ModelOperator, state: tuple[Name, Name]
) -> tuple[int, int]:
    """Returns the bytes that a thread of torch's fused kernel on a CPU takes while it computes the result, and while it computes
    gradients: a block of scores in FP32, and in the backward pass of their gradients; on GPUs they are in registers."""
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
    """What attention without a fused kernel writes.

    Attributes:
        operands: query, key and value, laid out anew; a value that needs none is the whole of which it is a part.
        copies: query and key as they are kept, where that is not as they are multiplied.
        scores, weights: before and after what makes weights of them; what was dropped is zero in these.
        statistics: the largest and the sum of each row, which the backward pass reads.
        mask: which weights were dropped; None where none are.
        passing: what is there while weights are computed, and not behind that.
        numbers: the random ones that the mask is made from, where it is not drawn itself.
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
        """Returns those of the operator at a place, under the states of the values."""
        graph, state = values.graph, values.states.names[index]
        fmt = state[0] or state[1]
        assert fmt is not None, "attention without a format is not taken apart"
        result, size = graph.values[operator.result], FORMATS[fmt].dtype.itemsize
        # Each of its rows gives one of the result's, as wide as a value's.
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
        return cls(
            (query, key, value),
            copies,
            buffer("scores", size * scores, fmt),
            buffer("weights", size * scores, fmt),
            buffer("statistics", (2 * _SUM + 1) * rows),
            buffer("mask", scores) if drops else None,
            (buffer("exponentials", FP32.dtype.itemsize * scores, FP32.name),)
            if drops and size < FP32.dtype.itemsize
            else (),
            buffer("numbers", size * scores, fmt) if drops and not draws_alone(operator) else None,
        )

    @property
    def saved(self) -> frozenset[Buffer]:
        """What the backward pass reads."""
        scores = (
            () if self.mask is None else (self.scores,)
        )  # without dropout the weights are what it needs
        return frozenset((*self.factors, *scores, self.weights, *self.kept))

    @property
    def kept(self) -> tuple[Buffer, ...]:
        """What else the backward pass reads."""
        return (self.statistics,) if self.mask is None else (self.statistics, self.mask)

    @property
    def factors(self) -> tuple[Buffer, Buffer, Buffer]:
        """Query, key and value as they are kept."""
        return self.operands if self.copies is None else (*self.copies, self.operands[VALUE])

    def copied(self, name: str) -> list[Task]:
        """Returns what is written when the pass is about to end."""
        saved = () if self.copies is None else zip(self.operands, self.copies, strict=False)
        return [
            Task(name, False, False, frozenset({item}), (copy,), anew=True, apart=True)
            for item, copy in saved
        ]

    def forward(self, name: str, sources: tuple[Set[Buffer], ...], result: Buffer) -> list[Task]:
        """Returns the tasks that compute the result; `sources` are what query, key, value and a mask are computed from."""
        query, key, value = self.operands
        transposed = frozenset(sources[QUERY] | sources[KEY])
        rest = frozenset[Buffer]().union(*sources[VALUE + 1 :])
        first = self.numbers or self.mask
        drawn = () if first is None else (first,)
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
        """Returns the tasks that compute gradients, by place, from the one that the operator is given."""
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
                # In FP32 weights are computed again from scores, whenever that is best.
                again = Buffer(
                    f"{self.weights.name} again", self.weights.format, self.weights.bytes
                )
                matches.append(
                    Task(name, True, False, frozenset({scores, self.statistics}), (again,))
                )
                scores, saved = again, saved - {self.statistics}
            product(argument, value, changed)
            # It sums over rows first, so that no kernel of elements before it takes it in.
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
