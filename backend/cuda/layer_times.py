"""Times of layers in narrow formats, next to those in the 16-bit format, quantization included.

`qsync tune` measures them, and this package contains measurements of an H200. They decide whether a
layer runs in a narrow format by default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from qsync_fx.backend.cuda.problem.problem import GemmProblem, Problem

Part = Literal["forward", "input_gradient", "weight_gradient", "backward"]
"""Part of a layer's training step; "backward" is both gradients, if they were timed together."""

PARTS: Final[tuple[Part, ...]] = get_args(Part)


@dataclass(frozen=True)
class LayerTimes:
    """Times of one layer in a narrow format and in the 16-bit format of its device.

    Attributes:
        problem: the layer's output in the 16-bit format, see `layer_problem`.
        precision: name of the narrow format, such as "int8_grad".
        seconds: seconds by part, with quantization, casts and copies of operands.
        wide_seconds: the same parts in the 16-bit format.
    """

    problem: Problem
    precision: str
    seconds: Mapping[str, float]
    wide_seconds: Mapping[str, float]

    def speed(self, parts: Iterable[str] = PARTS) -> float:
        """Return the speed of some parts together, relative to the 16-bit format.

        Gradients that were timed together count if any of them is requested. Parts without a time
        do not count.
        """
        wanted = set(parts)
        if wanted & {"input_gradient", "weight_gradient"}:
            wanted.add("backward")
        timed = wanted & self.seconds.keys()
        return sum(map(self.wide_seconds.__getitem__, timed)) / sum(
            map(self.seconds.__getitem__, timed)
        )


def layer_problem(problem: Problem, wide: str) -> Problem:
    """Return the key of a layer in tables: its output, without scales and bias, in format `wide`.

    Sizes are rounded to the tuning bucket, so that similar batches share a measurement.
    """
    bare = replace(
        problem, a=wide, b=wide, out=wide, a_scale="none", b_scale="none", bias=False
    ).bucket()
    if isinstance(bare, GemmProblem):
        return replace(bare, a_major="row", b_major="column")
    return bare


def check_layer(times: LayerTimes) -> str | None:
    """Return why a row of a table is invalid; None if it is valid."""
    if times.problem != layer_problem(times.problem, times.problem.a):
        return "its problem is not the key of a layer"
    if not times.seconds or times.seconds.keys() != times.wide_seconds.keys():
        return "the parts of its two formats differ"
    if unknown := times.seconds.keys() - set(PARTS):
        return f"it has an unknown part {min(unknown)[:40]!r}"
    if min(*times.seconds.values(), *times.wide_seconds.values()) <= 0:
        return "timings are not positive"
    return None
