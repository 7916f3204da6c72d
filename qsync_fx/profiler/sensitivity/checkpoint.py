"""Checkpoint of a sensitivity estimate, in memory and in a file.

The file is replaced atomically after each step. It contains complete steps of all methods and the
state of methods that learn. A run resumes only for the same model, weights, batch shapes and
settings.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from qsync_fx.errors import ProfileError
from qsync_fx.graph.fx_utils import describe
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.profiler.sensitivity.gradient_step import Key, Method
from qsync_fx.serialization.schema import Path, Schema

Values = dict[str, dict[str, float]]
"""Values by operator and precision."""


@dataclass(frozen=True)
class MethodProgress:
    """Results of one method.

    Attributes:
        trace: values of each step.
        seconds: time spent.
        learned: state of the method between steps, by name.
    """

    trace: list[Values] = field(default_factory=list)
    seconds: float = 0.0
    learned: dict[str, Values] = field(default_factory=dict)


@dataclass(frozen=True)
class Interrupted:
    """Content of the file.

    Attributes:
        about: settings and model, in words.
        weights: digest of the model's tensors.
        methods: results of each method.
    """

    about: str
    weights: str
    methods: dict[str, MethodProgress]

    @property
    def steps(self) -> int:
        """Number of steps that all methods have completed."""
        return min((len(item.trace) for item in self.methods.values()), default=0)


def _wrong(result: MethodProgress) -> str | None:
    numbers = [
        v
        for table in (*result.trace, *result.learned.values())
        for by in table.values()
        for v in by.values()
    ]
    if not all(v >= 0 and math.isfinite(v) for v in (*numbers, result.seconds)):
        return " holds a number that is negative"
    return None


INTERRUPTED = Schema(
    Interrupted,
    noun="interrupted sensitivity",
    error=ProfileError,
    remedy="remove it to start anew",
    name="qsync-interrupted-sensitivity",
    largest=256 * 2**20,
    smaller="ask for fewer steps",
    checks={MethodProgress: _wrong},
)


def resumed(path: Path, empty: Interrupted) -> Interrupted:
    """Return the state of an interrupted run at `path`, or `empty` if there is no file.

    Raises:
        ProfileError: the file is invalid, or belongs to something else.
    """

    def differs(result: Interrupted) -> str | None:
        if result.about != empty.about or result.methods.keys() != empty.methods.keys():
            return f"it was asked of {result.about}; this is {empty.about}"
        return (
            None
            if result.weights == empty.weights
            else "the model had other weights or another mode (train or eval)"
        )

    return INTERRUPTED.resumed(path, empty, differs)


@runtime_checkable
class Learning(Protocol):
    """A method whose results depend on earlier steps."""

    @property
    def learned(self) -> dict[str, Values]:
        """State between steps, by name."""

    def learn(self, learned: Mapping[str, Values]) -> None:
        """Restore the state."""


def weights_of(model: nn.Module) -> str:
    """Return a digest of a model's parameters, buffers, names and training modes."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {describe(tensor)} {tensor.requires_grad}".encode())
            digest.update(
                tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
    digest.update(
        " ".join(name for name, module in model.named_modules() if module.training).encode()
    )
    return digest.hexdigest()[:16]


def shapes_of(batch: Any) -> str:
    if isinstance(batch, torch.Tensor):
        return describe(batch)
    items = (
        batch.values()
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, (list, tuple))
        else ()
    )
    return f"({', '.join(map(shapes_of, items))})"


def by_operator(values: Mapping[Key, float]) -> Values:
    """Return values by operator and precision; infinite values become the largest float."""
    result: Values = {}
    for (operator, name), value in values.items():
        result.setdefault(operator, {})[name] = min(value, sys.float_info.max)
    return result


def by_key(values: Values) -> dict[Key, float]:
    return {
        (operator, name): value for operator, by in values.items() for name, value in by.items()
    }


class SensitivityCheckpoint:
    """Results so far, mirrored to a file.

    Args:
        path: the file; None for none.
        methods: methods by name.
        about: settings, in words.
        model: the model.

    Attributes:
        steps: number of steps that were resumed.
        traces: values of all steps so far, by method.
        seconds: time spent so far, by method.
    """

    def __init__(
        self, path: Path | None, methods: Mapping[str, Method], about: str, model: nn.Module
    ) -> None:
        self.path, self.methods, self.steps = path, methods, 0
        self.traces: dict[str, list[dict[Key, float]]] = {name: [] for name in methods}
        self.seconds = dict.fromkeys(methods, 0.0)
        self._about, self._weights = about, "" if path is None else weights_of(model)

    def resume(self, batch: Any) -> None:
        """Load the file if there is one; raise `ProfileError` if it belongs to something else.

        Args:
            batch: the first batch.
        """
        if self.path is None:
            return
        self._about = f"{self._about}, batches of {shapes_of(batch)}"
        result = resumed(self.path, self._interrupted())
        self.steps = result.steps
        for name, item in result.methods.items():
            self.traces[name] = [by_key(values) for values in item.trace[: result.steps]]
            self.seconds[name] = item.seconds
            method = self.methods[name]
            if isinstance(method, Learning):
                method.learn(item.learned)

    def add(self, result: Mapping[str, tuple[dict[Key, float], float]]) -> None:
        """Add the values of each method in a step, with the seconds spent."""
        for name, (values, seconds) in result.items():
            Sensitivity(name, "", by_operator(values))  # validate now, not after all steps
            self.traces[name].append(values)
            self.seconds[name] += seconds
        if self.path is not None:
            INTERRUPTED.write(self.path, INTERRUPTED.encode(self._interrupted()))

    def seconds_left(self, steps: int, done: int) -> float:
        """Return the estimated seconds for the rest of `steps` steps."""
        return sum(self.seconds.values()) / max(done, self.steps) * (steps - max(done, self.steps))

    def _interrupted(self) -> Interrupted:
        methods = {
            name: MethodProgress(
                [by_operator(values) for values in self.traces[name]],
                self.seconds[name],
                dict(method.learned) if isinstance(method, Learning) else {},
            )
            for name, method in self.methods.items()
        }
        return Interrupted(self._about, self._weights, methods)
