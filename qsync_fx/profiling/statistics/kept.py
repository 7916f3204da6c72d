"""What has been found so far of a sensitivity, in memory and in a file beside it.

Invariant: the file is written after each step; what is taken up from it are whole steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from qsync_fx.codec import Path
from qsync_fx.predictor.sensitivity.value import Sensitivity
from qsync_fx.profiling.statistics.interrupted import (
    INTERRUPTED,
    Found,
    Interrupted,
    Learning,
    by_key,
    by_operator,
    resumed,
    shapes_of,
    weights_of,
)
from qsync_fx.profiling.statistics.step import Key, Method


class Kept:
    """
    Args:
        path: of the file; None to keep none.
        methods: by name.
        about: what is asked, in words.
        model: of what.

    Attributes:
        steps: how many were found before.
        traces, seconds: of each method, of all steps so far.
    """

    def __init__(self, path: Path | None, methods: Mapping[str, Method], about: str, model: nn.Module) -> None:
        self.path, self.methods, self.steps = path, methods, 0
        self.traces: dict[str, list[dict[Key, float]]] = {name: [] for name in methods}
        self.seconds = dict.fromkeys(methods, 0.0)
        self._about, self._weights = about, "" if path is None else weights_of(model)

    def resume(self, batch: Any) -> None:
        """Takes up what is in the file, where there is one; `batch` is the first. Raises `ProfileError` where it is of something else."""
        if self.path is None:
            return
        self._about = f"{self._about}, batches of {shapes_of(batch)}"
        found = resumed(self.path, self._interrupted())
        self.steps = found.steps
        for name, one in found.methods.items():
            self.traces[name] = [by_key(values) for values in one.trace[: found.steps]]
            self.seconds[name] = one.seconds
            method = self.methods[name]
            if isinstance(method, Learning):
                method.learn(one.learned)

    def add(self, found: Mapping[str, tuple[dict[Key, float], float]]) -> None:
        """Keeps what each method has found in a step, and the seconds that it took."""
        for name, (values, seconds) in found.items():
            Sensitivity(name, "", by_operator(values))  # refuses what is no variance now, and not after all steps
            self.traces[name].append(values)
            self.seconds[name] += seconds
        if self.path is not None:
            INTERRUPTED.write(self.path, INTERRUPTED.encode(self._interrupted()))

    def seconds_left(self, steps: int, done: int) -> float:
        """Returns what the rest of so many steps will take."""
        return sum(self.seconds.values()) / max(done, self.steps) * (steps - max(done, self.steps))

    def _interrupted(self) -> Interrupted:
        methods = {
            name: Found(
                [by_operator(values) for values in self.traces[name]],
                self.seconds[name],
                dict(method.learned) if isinstance(method, Learning) else {},
            )
            for name, method in self.methods.items()
        }
        return Interrupted(self._about, self._weights, methods)
