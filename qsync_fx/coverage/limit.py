"""Dynamo's limits of versions of a function: beyond them it runs the function as it was written.

Invariant: a function of which an earlier version, with whatever options, held operators that a plan decides on does not run without the
plan: each call that would is an error. Where no plan was given it is what torch.compile does, and is said once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType

from qsync_fx.coverage.causes import Why, why_of
from qsync_fx.coverage.log import Frame, logs
from qsync_fx.errors import PlanError
from qsync_fx.ops import Kind
from qsync_fx.options import Options
from qsync_fx.plan.opid import OpId

_LIMITS = ("accumulated_recompile_limit", "recompile_limit")


def tell_of_a_limit(code: CodeType, options: Options, texts: Iterable[str], frames: Sequence[Frame] = ()) -> None:
    """Says that Dynamo has left a function to Python since it has made too many versions of it, if that is among its reasons.

    Args:
        frames: the entries of the function for the modules that it is called for, which name what torch puts a function of its own around.

    Raises:
        PlanError: a plan was given, and decides on operators that the function has held.
    """
    said = next((text for text in texts if why_of(text) is Why.LIMIT), None)
    if said is None or not _decides_on_any(options, _held(code)):
        return
    name = f"torch._dynamo.config.{next((name for name in _LIMITS if name in said), _LIMITS[-1])}"
    function, where = next(map(_described, frames), (code.co_qualname, f"{code.co_filename}:{code.co_firstlineno}"))
    what = f"Dynamo has reached {name} for {function} and makes no more versions of it"
    do = f"set {name} higher if so many versions are meant; TORCH_LOGS=recompiles tells why each was made"
    if options.automatic:
        text = f"{what}: another one runs uncompiled, as the model is written. To have it compiled, {do}."
        warnings.warn_explicit(text, UserWarning, code.co_filename, code.co_firstlineno)
        return
    raise PlanError(
        f"{what}: this one would run as the model is written, without the plan",
        where=f"{function}, {where}",
        do=do,
    )


def _described(frame: Frame) -> tuple[str, str]:
    """Returns the name of a function, with the module in its model that it is called for, and its line."""
    module = frame.module()
    of = f" of {frame.path} ({type(module).__name__})" if frame.path else ""
    return f"{frame.name}{of}", frame.where


def _held(code: CodeType) -> Iterator[OpId]:
    """Yields the adjustable operators that versions of a function have held."""
    for log in logs():
        for (held, _), frame in log.frames.items():
            if held is code:
                yield from (ran.id for ran in frame.operators.values() if ran.kind is Kind.ADJUSTABLE)


def _decides_on_any(options: Options, ids: Iterable[OpId]) -> bool:
    return any(options.plan is None or options.plan.precision_for(op_id) is not None for op_id in ids)
