"""Checkpoint of a sensitivity estimate: complete steps of all methods, in memory and in a file."""

from __future__ import annotations

import hashlib
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    """Values of each step of one method, seconds, and its state between steps by name."""

    trace: list[Values] = field(default_factory=list)
    seconds: float = 0.0
    learned: dict[str, Values] = field(default_factory=dict)


@dataclass(frozen=True)
class Interrupted:
    """Content of the file, for runs with the same model, weights, batch shapes and settings."""

    about: str
    weights: str
    methods: dict[str, MethodProgress]

    @property
    def steps(self) -> int:
        return min((len(item.trace) for item in self.methods.values()), default=0)


INTERRUPTED = Schema(
    Interrupted,
    noun="interrupted sensitivity",
    error=ProfileError,
    remedy="remove it to start again",
    name="qsync-interrupted-sensitivity",
    largest=256 * 2**20,
    smaller="ask for fewer steps",
)


def weights_of(model: nn.Module) -> str:
    """Return a digest of a model's parameters, buffers, names and training modes."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {describe(tensor)} {tensor.requires_grad}".encode())
            values = tensor.detach().cpu().contiguous().flatten()
            digest.update(values.view(torch.uint8).numpy().tobytes())
    training = (name for name, module in model.named_modules() if module.training)
    digest.update(" ".join(training).encode())
    return digest.hexdigest()[:16]


def shapes_of(batch: Any) -> str:
    if isinstance(batch, torch.Tensor):
        return describe(batch)
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if not isinstance(batch, (list, tuple)):
        batch = ()
    return f"({', '.join(map(shapes_of, batch))})"


def by_operator(values: Mapping[Key, float]) -> Values:
    """Return values by operator and precision; infinite values become the largest float."""
    result: Values = defaultdict(dict)
    for (operator, name), value in values.items():
        result[operator][name] = min(value, sys.float_info.max)
    return dict(result)


def by_key(values: Values) -> dict[Key, float]:
    return {(op, name): value for op, by in values.items() for name, value in by.items()}


class SensitivityCheckpoint:
    """Results by method, mirrored to a file; `steps` steps were resumed."""

    def __init__(
        self, path: Path | None, methods: Mapping[str, Method], about: str, model: nn.Module
    ) -> None:
        self._about, self._weights = about, ""
        if path is not None:
            INTERRUPTED.check_writable(path)
            self._weights = weights_of(model)
        self.path, self.methods, self.steps = path, methods, 0
        self.traces: dict[str, list[dict[Key, float]]] = {name: [] for name in methods}
        self.seconds = dict.fromkeys(methods, 0.0)

    def resume(self, batch: Any) -> None:
        if self.path is None:
            return
        self._about = f"{self._about}, batches of {shapes_of(batch)}"
        empty = self._interrupted()

        def differs(result: Interrupted) -> str | None:
            if result.about != empty.about or result.methods.keys() != empty.methods.keys():
                return f"it is of {result.about}; this is {empty.about}"
            if result.weights != empty.weights:
                return "the model had other weights or another mode (train or eval)"
            return None

        result = INTERRUPTED.resumed(self.path, empty, differs)
        self.steps = result.steps
        for name, item in result.methods.items():
            self.traces[name] = [by_key(values) for values in item.trace[: result.steps]]
            self.seconds[name] = item.seconds
            method: Any = self.methods[name]
            if item.learned:
                method.learn(item.learned)

    def add(self, name: str, values: dict[Key, float], seconds: float) -> None:
        Sensitivity(name, "", by_operator(values))  # validate now, not after all steps
        self.traces[name].append(values)
        self.seconds[name] += seconds

    def save(self) -> None:
        if self.path is not None:
            INTERRUPTED.write(self.path, INTERRUPTED.encode(self._interrupted()))

    def seconds_left(self, steps: int, done: int) -> float:
        done = max(done, self.steps)
        return sum(self.seconds.values()) / done * (steps - done)

    def _interrupted(self) -> Interrupted:
        methods = {}
        for name, method in self.methods.items():
            trace = [by_operator(values) for values in self.traces[name]]
            learned = getattr(method, "learned", {})
            methods[name] = MethodProgress(trace, self.seconds[name], learned)
        return Interrupted(self._about, self._weights, methods)
