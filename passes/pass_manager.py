"""The pass pipeline: the order of passes, the positions of custom passes, and the runner.

Invariant: `run` calls every pass, with instruments around it and the verifier after it. If a pass
of qsync_fx breaks a rule, the graph falls back: it computes the unmodified model.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import ClassVar, TypeGuard

from qsync_fx import environment
from qsync_fx.entry_points import load, package, unfit
from qsync_fx.errors import OptionError, PassError, QSyncError, nearest
from qsync_fx.graph.fx_utils import format_of
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.ops.spec import Kind
from qsync_fx.options import Options
from qsync_fx.passes.annotate_cost import AnnotateCost
from qsync_fx.passes.assign import Assign
from qsync_fx.passes.autocast import Autocast
from qsync_fx.passes.cascade import Cascade
from qsync_fx.passes.classify import Classify
from qsync_fx.passes.custom_passes import (
    GraphSnapshot,
    only_decided,
    refuse_calls,
    refuse_damage,
    take_in,
)
from qsync_fx.passes.insert_casts import InsertCasts
from qsync_fx.passes.lower import Lower
from qsync_fx.passes.lowering_registry import Lowering
from qsync_fx.passes.normalize import Normalize
from qsync_fx.passes.pass_base import GraphPass, Pass, Scope, scope
from qsync_fx.passes.printer import LOG, GraphLog, Instrument
from qsync_fx.passes.stochastic_gradients import StochasticGradients
from qsync_fx.passes.tracing.dynamo_frames import SourcePlace, place
from qsync_fx.passes.tracing.operator_ids import numbering_now
from qsync_fx.passes.tracing.retrace import restored
from qsync_fx.passes.verifier import verify

VERIFY = "QSYNC_VERIFY"
_RUN = (Normalize, Autocast, Classify, Assign)
"""Passes that do not change the model's numerics and identify its operators."""


@dataclass(frozen=True)
class LeftOut:
    """Placeholder for a pass that does not run; it may add a reason to operators of a plan."""

    scope: ClassVar[Scope] = Scope.BODY

    name: str
    because: str = ""

    def __call__(self, graph: PrecisionGraph) -> None:
        if not self.because:
            return
        for operator in graph.own_operators():
            owned, reasons = format_of(graph.value(operator.node)), [operator.reason]
            if operator.kind is not Kind.FIXED:
                reasons.append(self.because)
            reason = "; ".join(filter(None, reasons))
            operator.update(precision=owned, output=owned, reason=reason)


def without_plan(passes: Sequence[Pass], error: PassError) -> tuple[Pass, ...]:
    """Return the passes of a fallback run; none runs if a pass of `_RUN` has failed."""
    run = [step for step in passes if isinstance(step, _RUN)]
    if any(step.name == error.step for step in run):
        return tuple(LeftOut(step.name) for step in passes)
    because = f"the graph fell back to the formats of the model: {error.what}"
    after_last = passes.index(run[-1]) + 1
    result = [step if step in run else LeftOut(step.name) for step in passes]
    result[after_last] = LeftOut(passes[after_last].name, because)
    return tuple(result)


def warn(error: PassError, current: SourcePlace) -> None:
    message = error.what[0].upper() + error.what[1:]
    text = (
        f"{message} ({error.where}). This is a bug in qsync_fx. This graph trains in the formats "
        "of the model, without the plan; the rest of the model follows it. Please report it, "
        f"with the model or with the graph: {VERIFY}=raise turns this warning into an error, "
        "whose attribute `graph` contains the graph as text."
    )
    code = current.code or warn.__code__
    warnings.warn_explicit(text, UserWarning, code.co_filename, code.co_firstlineno)


def pipeline(
    options: Options, lowerings: Mapping[str, Lowering], training: bool = True
) -> tuple[Pass, ...]:
    """Return the passes in order, including the user's passes.

    Without gradients, stochastic rounding becomes rounding to nearest: it only makes gradients
    unbiased, and evaluation should be exact and repeatable.

    Raises:
        OptionError: a pass is not installed, or its `after` or `before` names an unknown pass.
    """
    rounding = options.rounding
    if not training and rounding == "stochastic":
        rounding = "nearest"
    passes: list[Pass] = [
        Normalize(),
        Autocast(),
        Classify(),
        Assign(),
        Cascade(),
        InsertCasts(rounding, options.scaling, lowerings),
        Lower(lowerings, rounding),
        AnnotateCost(),
    ]
    if training and options.gradient_rounding == "stochastic":
        passes.append(StochasticGradients(lowerings))
    for custom in map(_custom, options.passes):
        passes.insert(_place(custom, passes), custom)
    return tuple(passes)


def _custom(value: object) -> Pass:
    if isinstance(value, str):
        return _installed(value)
    if _is_pass(value):
        return value
    do = "decorate the function with @qsync_fx.graph_pass"
    raise OptionError(f"{value!r} is not a pass", where='option "passes"', do=do)


def _is_pass(value: object) -> TypeGuard[Pass]:
    # Calling a pass class, which also satisfies the protocol, would only create a pass.
    return isinstance(value, Pass) and not isinstance(value, type)


@functools.cache
def _installed(name: str) -> Pass:
    entries = entry_points(group="qsync_fx.passes").select(name=name)
    if len(entries) != 1:
        message = f"{len(entries) or 'no'} installed packages offer a pass {name!r}"
        where = ", ".join(map(package, entries)) or 'option "passes"'
        do = "install one package that offers it, or give the pass itself"
        if not entries and (names := entry_points(group="qsync_fx.passes").names):
            do = nearest(name, names)
        raise OptionError(message, where=where, do=do)
    (entry,) = entries
    result = load(entry)
    if not _is_pass(result):
        raise unfit(entry, result, "a function decorated with @qsync_fx.graph_pass")
    return result


def _place(custom: Pass, passes: Sequence[Pass]) -> int:
    after, before = getattr(custom, "after", None), getattr(custom, "before", None)
    names = [step.name for step in passes]
    anchor = after or before or "assign"
    if anchor not in names:
        message = f"pass {custom.name!r} wants to run next to {anchor!r}, which is no pass"
        raise OptionError(message, where='option "passes"', do=nearest(anchor, names))
    index = names.index(anchor)
    if before and not after:
        return index
    # Custom passes with the same anchor run in the order of the option.
    following = itertools.takewhile(
        lambda step: isinstance(step, GraphPass) and step.after == anchor, passes[index + 1 :]
    )
    return index + 1 + len(list(following))


def run_or_fall_back(
    make: Callable[[], PrecisionGraph],
    passes: Sequence[Pass],
    instruments: Sequence[Instrument] = (),
) -> PrecisionGraph:
    """Run the passes on the graph from `make`; on a bug in qsync_fx, warn and fall back.

    The fallback runs on a second graph from `make`, without the plan.

    Raises:
        PassError: a user's pass failed, broke a rule of the verifier, or may have caused the
            failure of a later pass.
        OptionError: QSYNC_VERIFY has an unknown value.
    """
    may_fall_back = environment.choice(VERIFY, ("fall_back", "raise")) == "fall_back"
    number_again = numbering_now()
    if LOG.isEnabledFor(logging.INFO):
        instruments = (*instruments, GraphLog())
    graph = make()
    try:
        return run(graph, passes, instruments)
    except PassError as error:
        if not (may_fall_back and error.ours):
            raise
        warn(error, place(graph.context.options))
        number_again()
        return run(make(), without_plan(passes, error), instruments, verified=False)


def run(
    graph: PrecisionGraph,
    passes: Sequence[Pass],
    instruments: Sequence[Instrument] = (),
    verified: bool = True,
    after: tuple[str, ...] = (),
) -> PrecisionGraph:
    """Run the passes on the graph and on the bodies of its higher-order operators; return it.

    Raises:
        PassError: a pass failed, or broke a rule of the verifier.
    """
    passed, changed = after, tuple[str, ...]()
    with graph.context.on_target():
        for step in passes:
            before = None if _is_ours(step) else GraphSnapshot.of(graph)
            for instrument in instruments:
                instrument.before(step.name, graph)
            try:
                _call(step, graph)
                with _readable(step.name):
                    if before is not None:
                        refuse_damage(graph, before, step.name)
                        take_in(graph, before, step.name, passed)
                    for instrument in instruments:
                        instrument.after(step.name, graph)
                    passed = (*passed, step.name)
                    if verified:
                        verify(graph, passed)
                    if before is not None:
                        refuse_calls(graph, before, step.name)
                        if not only_decided(before, GraphSnapshot.of(graph)):
                            changed = (*changed, step.name)
            except PassError as error:
                _blame(error, step, changed)
                raise
            for instrument in instruments:
                instrument.verified(step.name, graph)
    return graph


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    """Name the pass after which a graph cannot be read: damage causes errors of any class."""
    try:
        yield
    except QSyncError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = f"the graph after pass {name!r} cannot be read: {type(error).__name__}: {error}"
        where = f"the graph after pass {name!r}, read by {frame.filename}:{frame.lineno}"
        raise PassError(message, where=where) from error


def _blame(error: PassError, step: Pass, changed: Sequence[str]) -> None:
    """Attribute an error to its pass, or to custom passes that changed the graph before it."""
    error.step = step.name
    error.ours = _is_ours(step) and not changed
    if error.ours:
        error.do = "this is a bug in qsync_fx; please report it"
    elif _is_ours(step):
        names = " and ".join(map(repr, changed))
        error.do = (
            f"look at {names} first, which changed the graph before {step.name!r} ran; if the "
            "error is the same without, it is a bug in qsync_fx: please report it"
        )
    error.do = error.do or f"correct the pass {step.name!r}"
    if error.graph:
        error.do += "; the error's attribute `graph` has the text of the graph after it"


def _is_ours(step: Pass) -> bool:
    return not isinstance(step, GraphPass) and type(step).__module__.startswith(f"{__package__}.")


def _call(step: Pass, graph: PrecisionGraph) -> None:
    # Modes that a user's pass leaves enabled would change the traces of later passes.
    modes = contextlib.nullcontext() if _is_ours(step) else restored()
    try:
        with modes:
            for part in [graph] if scope(step) is Scope.MODEL else graph.walk():
                result: object = step(part)  # type: ignore[func-returns-value]
                if result is not None:
                    message = f"pass {step.name!r} returned {type(result).__name__}, not None"
                    do = "change graph.graph in place, or set graph.module, and return nothing"
                    raise PassError(message, where=f"pass {step.name!r}", do=do)
    except QSyncError as error:
        error.where = error.where or _line(step, error)
        raise
    except Exception as error:
        message = f"pass {step.name!r} failed: {type(error).__name__}: {error}"
        raise PassError(message, where=_line(step, error)) from error


def _line(step: Pass, error: Exception) -> str:
    """Return the innermost line of the pass in an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(getattr(step, "function", None), "__code__", None)
    owned = [frame for frame in frames if frame.filename == getattr(code, "co_filename", None)]
    frame = (owned or frames)[-1]
    return f"pass {step.name!r}, {frame.filename}:{frame.lineno}: {frame.line}"
