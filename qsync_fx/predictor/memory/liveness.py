"""Which buffers a step holds at each moment, for whoever limits memory while choosing a plan.

Of one plan `live_buffers` says it as exactly as `step_memory`. Over all plans what is kept for the backward pass is a sum of terms, each
there or not by the states of a few operators: `saved_terms`. They are what autograd keeps, an upper bound: compilers compute some of it
again. So a plan that was found by them is held against `peak_bytes` before it is believed.

Invariant: a value that several operators keep in one format counts once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from qsync_fx.ops import table
from qsync_fx.predictor.cost_mapper import States
from qsync_fx.predictor.memory.buffers import Buffer, lives, whole
from qsync_fx.predictor.memory.outside_passes import TrainingMemory
from qsync_fx.predictor.memory.peak_memory import step_tasks
from qsync_fx.predictor.model.model_graph import ModelGraph, Name, StateNames

Held = tuple[str, Name]
"""A value, by its name in the graph, and the format it lies in; gradients are called "gradient of" it."""


@dataclass(frozen=True)
class LiveBuffers:
    """
    Attributes:
        operator: the id of the operator that runs; "" for what belongs to none.
        backward: whether that is in the backward pass.
        bytes: by value and format; without parameters, the batch and the optimizer's state. ("", None) is what kernels take while they run.
    """

    operator: str
    backward: bool
    bytes: Mapping[Held, int]


def live_buffers(states: States, training: TrainingMemory | None = None) -> list[LiveBuffers]:
    """Returns what both passes of a step hold at each moment, in order, where operators are in these states."""

    def live(buffer: Buffer) -> Held:
        return buffer.name, buffer.format

    working: Held = "", None
    result = lives(step_tasks(states, training), True, live, working)
    return [LiveBuffers(live.operator, live.backward, live.kinds) for live in result]


@dataclass(frozen=True)
class SavingOperator:
    """An operator in a state, as one that keeps a value.

    Attributes:
        place: of the operator.
        state: what it is in.
        until: the place of the operator whose backward pass is the last during which it is there: its own, or that of the last product
            before it where it is none, since compilers compute the gradients of elementwise operators where a product reads them.
    """

    place: int
    state: StateNames
    until: int


@dataclass(frozen=True)
class SavedTerm:
    """A value that may be kept in a format.

    At the end of the forward pass it is there if one of `keepers` is in its state. The backward pass goes through operators from the last
    to the first: while it is at place k, only keepers with `until` of k and before count.

    Attributes:
        value, format: what is kept.
        bytes: how much that is.
        keepers: what keeps it.
    """

    value: str
    format: Name
    bytes: int
    keepers: tuple[SavingOperator, ...]


def saved_terms(graph: ModelGraph) -> list[SavedTerm]:
    """Returns what operators may keep for the backward pass, each value and format once; parameters as they are take no more.

    Raises:
        ProfileError: the model is known in symbolic sizes only.
    """
    places = {value.name: index for index, value in enumerate(graph.values)}
    until = _until(graph)
    sizes: dict[Held, int] = {}
    keepers: defaultdict[Held, list[SavingOperator]] = defaultdict(list)
    for index, operator in enumerate(graph.operators):
        for state, cost in operator.costs.items():
            for (name, settings), size in cost.saved.items():
                key: Held = (f"{name} {settings}", None)
                if not settings.startswith("extra"):
                    root = graph.values[graph.values[places[name]].tensor]
                    if root.source != "operator" and root.own == (settings or None):
                        continue
                    key = root.name, settings or None
                sizes[key] = max(sizes.get(key, 0), whole(size))
                keepers[key].append(SavingOperator(index, state, until[index]))
    return [
        SavedTerm(name, settings, sizes[name, settings], tuple(item))
        for (name, settings), item in keepers.items()
    ]


def _until(graph: ModelGraph) -> list[int]:
    """The place, for each operator, of itself if it is a product, and else of the last product that it computes from."""
    products = frozenset(row.name for row in table().values() if row.products)
    result: list[int] = []
    before: list[int] = []
    for index, operator in enumerate(graph.operators):
        makers = [graph.values[graph.values[read.value].tensor].operator for read in operator.reads]
        last = max(
            (before[maker] for maker in makers if maker is not None and maker < index), default=-1
        )
        before.append(index if operator.row in products else last)
        result.append(before[index] if before[index] >= 0 else index)
    return result
