"""Whose time it was: from seconds a line to seconds an operator.

A call of a library belongs to the node that it computes. A kernel that Inductor has fused is shared out among its nodes by the bytes that
each reads and writes. What calls no kernel, such as taking memory and giving it back, belongs to the kernel beside it. Quantizers stay
apart: how many there are, and of what, follows from all of a plan and not from an operator's state.

Invariant: what comes out adds up to the seconds of the lines.

What it takes to quantize a tensor of any size, from those that were quantized.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy

from qsync_fx.profiler.run_statistics import MeasuredRun, Quantized
from qsync_fx.profiler.timing.inductor_lines import Files, InductorKernel
from qsync_fx.profiler.timing.step_timers import Seconds


@dataclass(frozen=True)
class Quantizing:
    """`fixed + each * elements` seconds.

    Attributes:
        largest: elements of the largest tensor that was quantized.
    """

    fixed: float
    each: float
    largest: int

    def seconds(self, numel: int) -> float:
        return self.fixed + self.each * numel


def fitted(runs: Iterable[MeasuredRun]) -> Mapping[tuple[str, str], Quantizing]:
    """Returns for each pair of formats, by name, the line through all times of quantizers."""
    times: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for run in runs:
        for call in run.quantized:
            times[call.before, call.after].append((call.numel, call.seconds))
    return {pair: _line(item) for pair, item in times.items()}


def _line(times: Sequence[tuple[int, float]]) -> Quantizing:
    """Fits a line that is nowhere negative, by squares in relation to what it fits: large tensors count as much as small ones."""
    numel, seconds = (numpy.array(column, dtype=float) for column in zip(*times, strict=True))
    weights = 1 / numpy.sqrt(numpy.maximum(seconds, 1e-9))
    ones = numpy.ones_like(numel)
    fixed, each = numpy.linalg.lstsq(
        numpy.stack([ones, numel], axis=1) * weights[:, None], seconds * weights, rcond=None
    )[0]
    if each < 0 or (numel == numel[0]).all():
        fixed, each = seconds.mean(), 0.0
    elif fixed < 0:
        fixed, each = 0.0, (seconds * weights**2 * numel).sum() / (weights**2 * numel**2).sum()
    return Quantizing(float(fixed), float(each), int(numel.max()))


Passes = tuple[float, float]
"""Seconds of the forward and of the backward pass."""


@dataclass(frozen=True)
class Attributed:
    """
    Attributes:
        operators: by id.
        quantized: in the order that they ran.
        nobody: what belongs to no operator.
    """

    operators: Mapping[str, Passes]
    quantized: list[Quantized]
    nobody: Passes


def attribute(seconds: Seconds, files: Files) -> Attributed:
    """Returns whose the seconds of a step's lines were."""
    operators: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    quantized: list[Quantized] = []
    nobody = [0.0, 0.0]
    for (file, backward), lines in _by_file(seconds).items():
        for kernel, used in _with_beside(lines, files[file]):
            owners = _owners(kernel)
            if (result := _quantizer(kernel, backward, used)) is not None:
                quantized.append(result)
            elif not owners:
                nobody[backward] += used
            for owner, share in owners.items() if result is None else ():
                operators[owner][backward] += used * share
    return Attributed(
        {name: (f, b) for name, (f, b) in operators.items()}, quantized, (nobody[0], nobody[1])
    )


def _by_file(seconds: Seconds) -> dict[tuple[str, bool], dict[int, float]]:
    result: dict[tuple[str, bool], dict[int, float]] = defaultdict(dict)
    for (file, line, backward), used in seconds.items():
        result[file, backward][line] = used
    return result


def _with_beside(
    lines: Mapping[int, float], kernels: Mapping[int, InductorKernel]
) -> list[tuple[InductorKernel | None, float]]:
    """Returns each kernel with its seconds and those of the lines after it that call none; those before the first one go with it."""
    result: list[tuple[InductorKernel | None, float]] = []
    before = 0.0
    for line in sorted(lines):
        kernel = kernels.get(line)
        if kernel is not None:
            result.append((kernel, before + lines[line]))
            before = 0.0
        elif result:
            result[-1] = result[-1][0], result[-1][1] + lines[line]
        else:
            before += lines[line]
    return [*result, (None, before)] if before else result


def _quantizer(kernel: InductorKernel | None, backward: bool, used: float) -> Quantized | None:
    for node in kernel.nodes if kernel is not None and kernel.library else ():
        if node.quantizes is not None and node.owner is not None:
            return Quantized(node.owner, *node.quantizes, backward, used)
    return None


def _owners(kernel: InductorKernel | None) -> dict[str, float]:
    """Returns which share of a kernel's time belongs to whom."""
    nodes = [node for node in kernel.nodes if node.owner is not None] if kernel is not None else []
    full = sum(node.bytes for node in nodes)
    shares: dict[str, float] = defaultdict(float)
    for node in nodes:
        assert node.owner is not None
        shares[node.owner] += node.bytes / full if full else 1 / len(nodes)
    return shares
