"""The pipeline: the order of passes, where custom ones go, and the one runner.

Invariant: every pass runs through `run`, with the instruments around it and the verifier between any two passes, so before and after
each. A custom pass that fails or breaks a rule is named in the error.

What the runner of passes hangs on itself: snapshots, timing, the text of graphs, and what becomes of one that a pass of ours broke.

What becomes of a graph in which a pass of ours broke a rule: a bug of ours must stop nobody's training.

Invariant: the graph computes what the model computes as written, its autocast regions included. Nothing is silent: one warning names
rule and operator and asks for a report, and the reason of every operator that the plan decides on says it. QSYNC_VERIFY=raise makes an
error of it, as our tests do.
"""

from __future__ import annotations

import contextlib
import functools
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
from qsync_fx.passes.custom_passes import look, only_decided, refuse_calls, refuse_damage, take_in
from qsync_fx.passes.insert_casts import InsertCasts
from qsync_fx.passes.lower import Lower
from qsync_fx.passes.lowering_registry import Lowering
from qsync_fx.passes.normalize import Normalize
from qsync_fx.passes.pass_base import GraphPass, Pass, Scope, scope
from qsync_fx.passes.printer import Instrument
from qsync_fx.passes.stochastic_gradients import StochasticGradients
from qsync_fx.passes.tracing.dynamo_frames import SourcePlace, place
from qsync_fx.passes.tracing.operator_ids import numbering_now
from qsync_fx.passes.tracing.retrace import restored
from qsync_fx.passes.verifier import verify

VERIFY = "QSYNC_VERIFY"
_CHOICES = ("fall_back", "raise")
_RUN = (Normalize, Autocast, Classify, Assign)
"""What leaves the numbers of the model as they are, and tells which operators there are."""


@dataclass(frozen=True)
class LeftOut:
    """Stands in the place of a pass that does not run.

    Attributes:
        because: noted for every operator that a plan decides on, directly or through its inputs; "" notes nothing.
    """

    scope: ClassVar[Scope] = Scope.BODY

    name: str
    because: str = ""

    def __call__(self, graph: PrecisionGraph) -> None:
        for operator in graph.own_operators() if self.because else ():
            owned = format_of(graph.value(operator.node))
            reason = operator.reason
            if operator.kind is not Kind.FIXED:
                reason = f"{reason}; {self.because}" if reason else self.because
            operator.update(precision=owned, output=owned, reason=reason)


def wanted() -> bool:
    """Whether graphs fall back.

    Raises:
        OptionError: QSYNC_VERIFY has a value that means nothing.
    """
    return environment.choice(VERIFY, _CHOICES) == "fall_back"


def without_plan(passes: Sequence[Pass], error: PassError) -> tuple[Pass, ...]:
    """Returns what is run in place of `passes`, under their names.

    Where one of the passes itself has failed that prepare a graph, none is run: it stays as Dynamo wrote it, and knows no operators.
    """
    run = [isinstance(step, _RUN) for step in passes]
    if any(step.name == error.step and runs for step, runs in zip(passes, run, strict=True)):
        return tuple(LeftOut(step.name) for step in passes)
    because = f"the graph fell back to the formats that the model holds: {error.what}"
    first = next(index for index in range(len(passes)) if not any(run[index:]))
    return tuple(
        step if run[index] else LeftOut(step.name, because if index == first else "")
        for index, step in enumerate(passes)
    )


def warn(error: PassError, current: SourcePlace) -> None:
    message = error.what[0].upper() + error.what[1:]
    text = (
        f"{message} ({error.where}). That is a bug in qsync_fx. This graph trains in the formats that the model holds, without the plan; "
        f"the rest of the model follows it. Please report it, with the model or with the graph: {VERIFY}=raise makes an error of this "
        "warning, and its attribute `graph` has the text."
    )
    if current.code is not None:
        warnings.warn_explicit(
            text, UserWarning, current.code.co_filename, current.code.co_firstlineno
        )
    else:
        warnings.warn(text, UserWarning, stacklevel=2)


def pipeline(
    options: Options, lowerings: Mapping[str, Lowering], training: bool = True
) -> tuple[Pass, ...]:
    """Returns the passes in order, the user's own among them.

    Without gradients formats are rounded to nearest: stochastic rounding is there to keep gradients unbiased, and evaluation should be
    exact and repeatable.

    Raises:
        OptionError: a pass is not installed, or wants a place beside a pass that does not exist.
    """
    rounding = options.rounding if training or options.rounding != "stochastic" else "nearest"
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
    for custom in _customs(options):
        passes.insert(_place(custom, passes), custom)
    return tuple(passes)


def _customs(options: Options) -> Iterator[Pass]:
    for inputs in options.passes:
        if isinstance(inputs, str):
            yield _installed(inputs)
        elif _is_pass(inputs):
            yield inputs
        else:
            raise OptionError(
                f"{inputs!r} is not a pass",
                where='option "passes"',
                do="decorate the function with @qsync_fx.graph_pass",
            )


def _is_pass(value: object) -> TypeGuard[Pass]:
    # A class of passes has all that a pass has, and a call of it makes one: nothing would happen to the graph.
    return isinstance(value, Pass) and not isinstance(value, type)


@functools.cache
def _installed(name: str) -> Pass:
    entries = entry_points(group="qsync_fx.passes")
    if name not in entries.names:
        raise OptionError(
            f"no installed package offers a pass {name!r}",
            where='option "passes"',
            do=nearest(name, entries.names)
            if entries
            else "install one that does, or give the pass itself",
        )
    entry, *others = entries.select(name=name)
    if others:
        raise OptionError(
            f"several installed packages offer a pass {name!r}",
            where=", ".join(map(package, (entry, *others))),
            do="uninstall all but one of them, or give the pass itself",
        )
    result = load(entry)
    if not _is_pass(result):
        raise unfit(entry, result, "a function decorated with @qsync_fx.graph_pass")
    return result


def _place(custom: Pass, passes: Sequence[Pass]) -> int:
    after, before = getattr(custom, "after", None), getattr(custom, "before", None)
    names = [step.name for step in passes]
    anchor = after or before or "assign"
    if anchor not in names:
        raise OptionError(
            f"pass {custom.name!r} wants to run {'after' if after else 'before'} {anchor!r}, which is no pass",
            where='option "passes"',
            do=nearest(anchor, names),
        )
    index = names.index(anchor)
    if before and not after:
        return index
    # Custom passes with one anchor run in the order that they are given in.
    index += 1
    while (
        index < len(passes)
        and isinstance(passes[index], GraphPass)
        and getattr(passes[index], "after", None) == anchor
    ):
        index += 1
    return index


def run_or_fall_back(
    make: Callable[[], PrecisionGraph],
    passes: Sequence[Pass],
    instruments: Sequence[Instrument] = (),
) -> PrecisionGraph:
    """Runs the passes on a graph that `make` makes; where a pass of ours fails, leaves another one as the model wrote it, and warns.

    Raises:
        PassError: a user's pass failed, or broke one of the verifier's rules, or may have led a pass of ours to.
    """
    may_fall_back, number_again = wanted(), numbering_now()
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
    """Runs the passes on the graph and on the bodies of its higher-order operators; returns the graph.

    Args:
        after: names of the passes that have run already.

    Raises:
        PassError: a pass failed, or broke one of the verifier's rules.
    """
    with graph.context.there():
        _run(graph, passes, instruments, verified, after)
    return graph


def _run(
    graph: PrecisionGraph,
    passes: Sequence[Pass],
    instruments: Sequence[Instrument],
    verified: bool,
    passed: tuple[str, ...],
) -> None:
    changed: tuple[str, ...] = ()
    for step in passes:
        before = None if _is_ours(step) else look(graph)
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
                    if not only_decided(before, look(graph)):
                        changed = (*changed, step.name)
        except PassError as error:
            _blame(error, step, changed)
            raise
        for instrument in instruments:
            instrument.verified(step.name, graph)


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    """Name the pass after which a graph cannot be read: damage shows as an error of any class."""
    try:
        yield
    except QSyncError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise PassError(
            f"the graph after pass {name!r} cannot be read: {type(error).__name__}: {error}",
            where=f"the graph after pass {name!r}, read by {frame.filename}:{frame.lineno}",
        ) from error


def _blame(error: PassError, step: Pass, changed: Sequence[str]) -> None:
    """Says whose fault an error is: that of the pass, unless it is ours and another one has changed the graph before it."""
    error.step = step.name
    text = (
        "; the error's attribute `graph` has the text of the graph after it" if error.graph else ""
    )
    if not _is_ours(step):
        error.do = f"{error.do or f'correct the pass {step.name!r}'}{text}"
    elif changed:
        names = " and ".join(map(repr, changed))
        error.do = (
            f"look at {names} first, which changed the graph before {step.name!r} ran; if the error is the same without, it is a bug in "
            f"qsync_fx: please report it{text}"
        )
    else:
        error.ours = True
        error.do = f"this is a bug in qsync_fx; please report it{text}"


def _is_ours(step: Pass) -> bool:
    return not isinstance(step, GraphPass) and type(step).__module__.startswith(f"{__package__}.")


def _call(step: Pass, graph: PrecisionGraph) -> None:
    try:
        # Modes that a user's pass leaves on would change the traces of later passes.
        with contextlib.nullcontext() if _is_ours(step) else restored():
            for part in [graph] if scope(step) is Scope.MODEL else graph.walk():
                _apply(step, step.name, part)
    except QSyncError as error:
        error.where = error.where or _line(step, error)
        raise
    except Exception as error:
        raise PassError(
            f"pass {step.name!r} failed: {type(error).__name__}: {error}",
            where=_line(step, error),
        ) from error


def _apply(step: Callable[[PrecisionGraph], object], name: str, graph: PrecisionGraph) -> None:
    result = step(graph)
    if result is not None:
        raise PassError(
            f"pass {name!r} returned {type(result).__name__}, which would be lost: passes change the graph in place",
            where=f"pass {name!r}",
            do="change the nodes of graph.graph, or set graph.module, and return nothing",
        )


def _line(step: Pass, error: Exception) -> str:
    """The line of the pass that an error comes through last."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(step.function, "__code__", None) if isinstance(step, GraphPass) else None
    owned = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    frame = (owned or frames)[-1]
    return f"pass {step.name!r}, {frame.filename}:{frame.lineno}: {frame.line}"
