"""Liveness of buffers over a step, for solvers that limit memory while they choose a plan.

`live_buffers` is exact for one plan, like `step_memory`. `saved_terms` describes the saved tensors
of all plans as a sum of terms, each present depending on the states of a few operators. The sum is
an upper bound, as compilers recompute some saved tensors; verify a plan with `peak_bytes`.

Invariant: a value that several operators save in one format counts once.
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
"""Name of a value, or "gradient of" its name, and its format in memory."""


@dataclass(frozen=True)
class LiveBuffers:
    """Live buffers at one moment of a step.

    Attributes:
        operator: id of the running operator; "" for none.
        backward: whether it runs in the backward pass.
        bytes: bytes by value and format, without parameters, batch and optimizer state. The key
            ("", None) contains the workspace of running kernels.
    """

    operator: str
    backward: bool
    bytes: Mapping[Held, int]


def live_buffers(states: States, training: TrainingMemory | None = None) -> list[LiveBuffers]:
    """Return the live buffers of both passes of a step over time, for these operator states."""

    def live(buffer: Buffer) -> Held:
        return buffer.name, buffer.format

    working: Held = "", None
    result = lives(step_tasks(states, training), True, live, working)
    return [LiveBuffers(live.operator, live.backward, live.kinds) for live in result]


@dataclass(frozen=True)
class SavingOperator:
    """Operator in a state in which it saves a value.

    Attributes:
        place: index of the operator.
        state: state of the operator.
        until: index of the last operator in whose backward pass the value is live. It is the
            operator itself for a product, otherwise the last product before it: compilers compute
            gradients of elementwise operators at the product that reads them.
    """

    place: int
    state: StateNames
    until: int


@dataclass(frozen=True)
class SavedTerm:
    """Value that operators can save for backward in one format.

    It is live at the end of the forward pass if one of `keepers` is in its state. The backward pass
    visits operators in descending order: at index k only keepers with `until` <= k count.

    Attributes:
        value: name of the value.
        format: its saved format.
        bytes: its size.
        keepers: operators and states that save it.
    """

    value: str
    format: Name
    bytes: int
    keepers: tuple[SavingOperator, ...]


def saved_terms(graph: ModelGraph) -> list[SavedTerm]:
    """Return all values that operators may save for backward, each value and format once.

    Parameters in their own format are not included, as they need no additional memory.

    Raises:
        ProfileError: the model has symbolic sizes.
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
    """Return for each operator the last product among itself and its ancestors; itself if none."""
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
