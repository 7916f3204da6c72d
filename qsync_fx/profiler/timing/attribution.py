"""Attribution of line times to operators, and the cost of quantizers.

The time of a library call belongs to its node. The time of a fused kernel is split among its nodes
by the bytes that each reads and writes. Lines without a kernel, such as allocations, count towards
the preceding kernel. Quantizers are reported separately: their number depends on the plan, not on
the state of an operator.

Invariant: the results add up to the seconds of the lines.
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
    """Linear cost of a quantizer: `fixed + each * numel` seconds.

    Attributes:
        largest: number of elements of the largest measured tensor.
    """

    fixed: float
    each: float
    largest: int

    def seconds(self, numel: int) -> float:
        return self.fixed + self.each * numel


def fitted(runs: Iterable[MeasuredRun]) -> Mapping[tuple[str, str], Quantizing]:
    """Return the fitted quantizer cost of each pair of source and target format, by name."""
    times: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for run in runs:
        for call in run.quantized:
            times[call.before, call.after].append((call.numel, call.seconds))
    return {pair: _line(item) for pair, item in times.items()}


def _line(times: Sequence[tuple[int, float]]) -> Quantizing:
    """Fit a non-negative line by least squares, weighted by 1 / seconds.

    The weights balance small and large tensors.
    """
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
"""Seconds of the forward and backward pass."""


@dataclass(frozen=True)
class Attributed:
    """Times by owner.

    Attributes:
        operators: times of each operator, by id.
        quantized: quantizer calls in execution order.
        nobody: times without an operator.
    """

    operators: Mapping[str, Passes]
    quantized: list[Quantized]
    nobody: Passes


def attribute(seconds: Seconds, files: Files) -> Attributed:
    """Return the operator and quantizer times of a step, from its line times."""
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
    """Return each kernel's seconds, plus the seconds of the following lines without a kernel.

    Seconds before the first kernel count towards it.
    """
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
    nodes = [node for node in kernel.nodes if node.owner is not None] if kernel is not None else []
    full = sum(node.bytes for node in nodes)
    shares: dict[str, float] = defaultdict(float)
    for node in nodes:
        assert node.owner is not None
        shares[node.owner] += node.bytes / full if full else 1 / len(nodes)
    return shares
