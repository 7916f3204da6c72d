"""Which kernel computes a problem, or that torch does, and why.

Three answers, in this order: what was tuned on this device; what is known without: torch for formats that it is as fast in, kernels where
nothing else has the unit, or the product is large enough for narrow operands to pay; torch where no kernel takes the problem.

Invariant: a function of the problem, the architecture, the candidates and the table. No tensor and no GPU is needed, so a report can
say what a device would do, and the same problem is always computed by the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from qsync_fx.backend.cuda.kernel.config import Arch, KernelConfig
from qsync_fx.backend.cuda.kernel.hardware import wide
from qsync_fx.backend.cuda.problem import Problem, padding
from qsync_fx.backend.cuda.tune.table import Table
from qsync_fx.backend.cuda.tune.tuning import NARROW, Choice, work

ENOUGH_WORK: Final = 2048**3
"""Multiplications from which products in narrow formats are taken to be faster than BF16's where nothing was measured: launch and
conversions cost the same for small ones."""

NARROWEST: Final = 512
"""No size of such a product may be smaller: it would wait for memory, not for the unit."""

Candidates = Callable[[Problem, Arch], Sequence[KernelConfig]]


@dataclass(frozen=True)
class Decision:
    """
    Attributes:
        config: the kernel; None where torch computes.
        taken: the problem as the kernel takes it, filled up or laid out anew; the problem itself where nothing is to be done.
        reason: one clause, for reports.
        integers: where torch computes, whether INT8 stays INT8; else BF16 carries it, in which its values are exact.
    """

    config: KernelConfig | None
    taken: Problem
    reason: str
    integers: bool = True


@dataclass(frozen=True)
class Way:
    """A way to compute a problem by kernels: how they take it, and those that do."""

    taken: Problem
    configs: tuple[KernelConfig, ...]


def decide(problem: Problem, arch: Arch, table: Table | None = None, candidates: Candidates | None = None) -> Decision:
    """Decides for one problem.

    Args:
        arch: of the device.
        table: what was tuned there; None where nothing was.
        candidates: the kernels to choose from; those of `qsync_fx.backend.cuda.choose.candidates` by default.
    """
    found = way(problem, arch, candidates or known)
    if isinstance(found, str):
        return _torch(problem, found)
    choice = table.choice(problem) if table is not None else None
    return _untuned(problem, arch, found) if choice is None else _tuned(problem, arch, found, choice)


def way(problem: Problem, arch: Arch, candidates: Candidates) -> Way | str:
    """Returns how kernels compute a problem, copying as little as possible, or the reason why they do not."""
    dear = False
    for taken in padding.alternatives(problem):
        configs = tuple(candidates(taken, arch))
        if configs and padding.pays(problem, taken):
            return Way(taken, configs)
        dear = dear or bool(configs)
    if dear:
        what = "copying its operands" if padding.filled(problem) == problem else "filling up its sizes"
        return f"{what} for a kernel costs more than it gains"
    formats = problem.a if problem.a == problem.b else f"{problem.a} and {problem.b}"
    return f"{arch} has no kernel for this product of {formats}"


def known(problem: Problem, arch: Arch) -> tuple[KernelConfig, ...]:
    """Returns the candidates that serve a problem."""
    from qsync_fx.backend.cuda.choose.candidates import candidates

    return candidates(problem, arch)


def _torch(problem: Problem, reason: str, integers: bool = True) -> Decision:
    return Decision(None, problem, reason, integers)


def _kernel(problem: Problem, found: Way, config: KernelConfig, reason: str) -> Decision:
    if found.taken != problem:
        reason += ", its operands copied"
    return Decision(config, found.taken, reason)


def _tuned(problem: Problem, arch: Arch, found: Way, choice: Choice) -> Decision:
    if choice.faster_than_bf16 is False:
        return _torch(problem, f"{problem.a} was measured to be no faster than {wide(arch)} here", integers=False)
    if choice.name == "torch":
        return _torch(problem, "torch was measured to be as fast")
    for config in found.configs:
        if config.name == choice.name:
            return _kernel(problem, found, config, "tuned")
    # The one that was chosen is gone, or does not take this very size: the next best of those that are there.
    left = sorted(
        (config for config in found.configs if config.name in choice.seconds), key=lambda c: choice.seconds[c.name]
    )
    torch_takes = choice.seconds.get("torch", float("inf"))
    if left and choice.seconds[left[0].name] < torch_takes:
        return _kernel(problem, found, left[0], "tuned")
    return _torch(problem, "the kernel that was tuned for it does not take this size")


def _untuned(problem: Problem, arch: Arch, found: Way) -> Decision:
    first = found.configs[0]
    narrow = problem.a in NARROW or problem.b in NARROW
    if not narrow and "tf32" not in (problem.a, problem.b):
        return _torch(problem, "torch is taken to be as fast where nothing was tuned")
    if not narrow:
        return _kernel(problem, found, first, "not tuned")
    if arch in ("sm_70", "sm_75"):
        return _kernel(problem, found, first, f"not tuned; {arch} has no unit for bf16")
    m, n, k = work(problem)
    if m * n * k >= ENOUGH_WORK and min(m, n, k) >= NARROWEST:
        return _kernel(problem, found, first, "not tuned")
    return _torch(
        problem, f"{m} x {n} x {k} is too small for {problem.a} to pay where nothing was tuned", integers=False
    )
