"""Problems in files and in reports: as JSON, and in one line.

Invariant: what `problem_from` returns is a problem that the operators could have asked for; everything else raises, naming the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from qsync_fx.backend.cuda.kernel.hardware import OPERANDS, OUTPUTS
from qsync_fx.backend.cuda.problem import ConvProblem, GemmProblem, Problem
from qsync_fx.backend.cuda.problem.operands import LARGEST_SIZE
from qsync_fx.codec import Check, Malformed, converter, structured
from qsync_fx.errors import QSyncError

FORMATS: Final = tuple(dict.fromkeys(name for pair in OPERANDS for name in pair))
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {"a": FORMATS, "b": FORMATS, "out": OUTPUTS}
_GEMM_SIZES: Final = ("m", "n", "k")
_CONV_SIZES: Final = ("n", "h", "w", "c", "k", "r", "s", "stride", "dilation")


def _gemm(problem: GemmProblem) -> str | None:
    return _common(problem, _GEMM_SIZES)


def _conv(problem: ConvProblem) -> str | None:
    if wrong := _common(problem, _CONV_SIZES):
        return wrong
    if not all(0 <= size <= LARGEST_SIZE for size in problem.padding):
        return _cannot("padding", problem.padding)
    return _cannot("r, s", (problem.r, problem.s)) if min(problem.p, problem.q) < 1 else None


def _common(problem: Problem, sizes: tuple[str, ...]) -> str | None:
    for name, known in _CHOICES.items():
        if (value := getattr(problem, name)) not in known:
            return _cannot(name, value)
    for name in sizes:
        value = getattr(problem, name)
        if not all(1 <= size <= LARGEST_SIZE for size in (value if isinstance(value, tuple) else (value,))):
            return _cannot(name, value)
    return None


def _cannot(name: str, value: object) -> str:
    return f"a problem cannot have {name} = {repr(value)[:60]}"


CHECKS: Final[Mapping[Any, Check]] = {GemmProblem: _gemm, ConvProblem: _conv}
"""What types do not say of problems, for the schemas of files that hold some."""
_PROBLEMS: Final = converter(CHECKS)


def problem_as_json(problem: Problem) -> dict[str, Any]:
    """Returns a problem's fields, and "kind": "gemm" or "conv"."""
    fields: dict[str, Any] = _PROBLEMS.unstructure(problem)
    return fields


def problem_from(data: object, where: str) -> Problem:
    """Returns the problem that JSON describes; raises `QSyncError` naming what is wrong with it."""
    try:
        found: Problem = structured(_PROBLEMS, data, Problem)
    except Malformed as wrong:
        place = ", ".join(filter(None, (where, wrong.where)))
        raise QSyncError(f"this is no problem: {wrong.what.strip()}", where=place, do=wrong.do or None) from None
    return found


def shown(problem: Problem) -> str:
    """Returns a problem in one line, for tables and reasons."""
    formats = problem.a if problem.a == problem.b else f"{problem.a} x {problem.b}"
    if isinstance(problem, GemmProblem):
        layout = {"row": "n", "column": "t"}
        majors = layout[problem.a_major] + layout[problem.b_major]
        return f"gemm {problem.m} x {problem.n} x {problem.k} {majors} {formats} -> {problem.out}"
    p = problem
    window = f"{p.r} x {p.s}" + (f" / {p.stride[0]}" if max(p.stride) > 1 else "")
    return f"{p.operation} {p.n} x {p.h} x {p.w}, {p.c} to {p.k} channels, {window}, {formats} -> {p.out}"
