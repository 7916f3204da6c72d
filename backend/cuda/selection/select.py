"""Kernel decision for a problem, and the kernels to compile ahead of time.

Without a tuning table, torch computes in formats in which it is assumed to be as fast, and a kernel
multiplies operands that are quantized already, which torch would first convert. Whether a layer
should be quantized at all is decided before (`estimate`). A decision needs no tensor and no GPU, so
a report can predict it for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.codegen import QUANTIZER_FORMATS, X_TYPES, TranslationUnit
from qsync_fx.backend.cuda.kernel_config import Arch, KernelConfig, wide
from qsync_fx.backend.cuda.problem import padding
from qsync_fx.backend.cuda.problem.problem import Problem
from qsync_fx.backend.cuda.selection.candidates import all_configs, candidates
from qsync_fx.backend.cuda.tuning import NARROW, TunedChoice, TuningTable

Candidates = Callable[[Problem, Arch], Sequence[KernelConfig]]


@dataclass(frozen=True)
class KernelDecision:
    """Decision for one problem.

    Attributes:
        config: the kernel; None for torch.
        problem: the problem that the kernel runs, padded or re-laid-out; equal to the original if
            that is not necessary.
        reason: one clause, for reports.
        integers: whether torch multiplies INT8 as integers; otherwise in BF16, which represents the
            values exactly.
    """

    config: KernelConfig | None
    problem: Problem
    reason: str
    integers: bool = True


@dataclass(frozen=True)
class DispatchPath:
    """Form of a problem that kernels accept, and the kernels that serve it."""

    problem: Problem
    configs: tuple[KernelConfig, ...]


def decide(
    problem: Problem, arch: Arch, table: TuningTable | None = None, listed: Candidates = candidates
) -> KernelDecision:
    """Decide for one problem, with the tuning table of the device, among the kernels `listed`."""
    path = dispatch_path(problem, arch, listed)
    if isinstance(path, str):
        return KernelDecision(None, problem, path)
    if choice := table and table.choice(problem):
        config, reason = _tuned(problem, arch, path, choice)
        integers = choice.faster_than_bf16 is not False
    else:
        config, reason = _untuned(problem, path)
        integers = problem.a not in NARROW
    if config is None:
        return KernelDecision(None, problem, reason, integers)
    if path.problem != problem:
        reason += ", with copied operands"
    return KernelDecision(config, path.problem, reason)


def dispatch_path(
    problem: Problem, arch: Arch, listed: Candidates = candidates
) -> DispatchPath | str:
    """Return the form of a problem that has kernels, with fewest copies, or why there is none."""
    copies_cost_more = False
    for used in padding.alternatives(problem):
        configs = tuple(listed(used, arch))
        if configs and padding.pays(problem, used):
            return DispatchPath(used, configs)
        copies_cost_more = copies_cost_more or bool(configs)
    if copies_cost_more:
        change = "padding its sizes"
        if padding.filled(problem) == problem:
            change = "copying its operands"
        return f"{change} for a kernel costs more than it gains"
    formats = " and ".join(dict.fromkeys((problem.a, problem.b)))
    return f"{arch} has no kernel for this product of {formats}"


def _tuned(
    problem: Problem, arch: Arch, path: DispatchPath, choice: TunedChoice
) -> tuple[KernelConfig | None, str]:
    if choice.faster_than_bf16 is False:
        return None, f"{problem.a} was measured to be no faster than {wide(arch)} on this device"
    if choice.name == "torch":
        return None, "torch was measured to be at least as fast"
    # The chosen kernel may be gone, or not serve this exact size: the next best candidate runs.
    seconds = {**choice.seconds, choice.name: 0.0}
    left = [config for config in path.configs if config.name in seconds]
    best = min(left, key=lambda config: seconds[config.name], default=None)
    if best is None or seconds[best.name] >= seconds.get("torch", float("inf")):
        return None, "the tuned kernel does not support this size"
    return best, "tuned"


def _untuned(problem: Problem, path: DispatchPath) -> tuple[KernelConfig | None, str]:
    if {problem.a, problem.b}.isdisjoint((*NARROW, "tf32")):
        return None, "without tuning, torch is assumed to be as fast"
    return path.configs[0], "not tuned"


def of_all(arch: Arch) -> list[TranslationUnit]:
    """Return one kernel per operation, formats and layout, and all quantizers and converters."""
    first: dict[tuple[object, ...], KernelConfig] = {}
    for c in all_configs(arch):
        first.setdefault((c.operation, c.a, c.b, c.out, c.a_major, c.b_major), c)
    return [
        *map(codegen.unit_of, first.values()),
        *_quantizers(arch, X_TYPES, QUANTIZER_FORMATS),
        codegen.copier(arch),
        *codegen.converters(arch),
    ]


def of_problems(
    problems: Iterable[Problem], arch: Arch, every_candidate: bool
) -> list[TranslationUnit]:
    """Return the units for these problems: kernels, quantizers of their formats, copy kernels.

    Without `every_candidate`, the kernels are those that run without tuning.
    """
    configs: dict[KernelConfig, None] = {}
    formats: dict[str, None] = {}
    # Weights are FP32; activations and gradients are FP32 or the output format of another product.
    read = {"fp32": None}
    for problem in problems:
        formats |= dict.fromkeys((problem.a, problem.b))
        read[problem.out] = None
        if every_candidate:
            if isinstance(path := dispatch_path(problem, arch), DispatchPath):
                configs |= dict.fromkeys(path.configs)
        elif (config := decide(problem, arch).config) is not None:
            configs[config] = None
    # A copy may depend on pointer alignment, which is not part of a problem.
    copiers = [codegen.copier(arch)] if configs else []
    return [*map(codegen.unit_of, configs), *_quantizers(arch, read, formats), *copiers]


def _quantizers(arch: Arch, read: Iterable[str], formats: Iterable[str]) -> list[TranslationUnit]:
    return [
        codegen.quantizer(arch, x, fmt)
        for fmt in formats
        if fmt in QUANTIZER_FORMATS
        for x in read
        if x in X_TYPES
    ]
