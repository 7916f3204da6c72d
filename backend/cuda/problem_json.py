"""Problems as JSON, and back from files that others wrote.

Invariant: what `problem_from` returns is a problem that the operators could have asked for; everything else raises, naming the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final, get_args

from qsync_fx.backend.cuda.hardware import OPERANDS
from qsync_fx.backend.cuda.operands import LARGEST_SIZE
from qsync_fx.backend.cuda.problem import Activation, ConvOperation, ConvProblem, GemmProblem, Major, Problem, Scale
from qsync_fx.errors import QSyncError

FORMATS: Final = tuple(dict.fromkeys(name for pair in OPERANDS for name in pair))
_OUT: Final = ("fp32", "fp16", "bf16")
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "a": FORMATS,
    "b": FORMATS,
    "out": _OUT,
    "a_major": get_args(Major),
    "b_major": get_args(Major),
    "a_scale": get_args(Scale),
    "b_scale": get_args(Scale),
    "activation": get_args(Activation),
    "operation": get_args(ConvOperation),
}
_PAIRS: Final[Mapping[str, int]] = {"padding": 0, "stride": 1, "dilation": 1}
"""Fields with a number for height and one for width, and the least that each may be."""


def problem_as_json(problem: Problem) -> dict[str, Any]:
    """Returns a problem's fields, and "kind": "gemm" or "conv"."""
    kind = "gemm" if isinstance(problem, GemmProblem) else "conv"
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(problem).items()}
    return {"kind": kind, **fields}


def problem_from(data: object, where: str) -> Problem:
    """Returns the problem that JSON describes; raises `QSyncError` naming what is wrong with it."""
    if not isinstance(data, dict) or data.get("kind") not in ("gemm", "conv"):
        raise _wrong("kind", data.get("kind") if isinstance(data, dict) else data, where)
    kind: type[GemmProblem] | type[ConvProblem] = GemmProblem if data["kind"] == "gemm" else ConvProblem
    names = set(kind.__dataclass_fields__)
    if unknown := set(data) - names - {"kind"}:
        raise _wrong(sorted(map(str, unknown))[0], "", where)
    found: Problem = kind(**{name: _field(name, data.get(name), where) for name in names})
    if isinstance(found, ConvProblem) and min(found.p, found.q) < 1:
        raise _wrong("r, s", [found.r, found.s], where)
    return found


def _field(name: str, value: object, where: str) -> Any:
    if name in _CHOICES:
        if isinstance(value, str) and value in _CHOICES[name]:
            return value
    elif name == "bias":
        if isinstance(value, bool):
            return value
    elif name in _PAIRS:
        if isinstance(value, list) and len(value) == 2 and all(_size(item, _PAIRS[name]) for item in value):
            return tuple(value)
    elif _size(value, 1):
        return value
    raise _wrong(name, value, where)


def _size(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= LARGEST_SIZE


def _wrong(name: str, value: object, where: str) -> QSyncError:
    return QSyncError(
        f"a problem cannot have {name} = {repr(value)[:60]}", where=where, do="remove the file: tuning writes a new one"
    )


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
