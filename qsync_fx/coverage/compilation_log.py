"""Log of Dynamo's result for each frame and of the operators in its graphs, per set of options.

The option "root" does not distinguish logs: separately compiled blocks are parts of one model.

Invariant: a log has weak references to modules only, and no tensors. It describes Dynamo's current
compiled code, so `torch.compiler.reset` clears it.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import CodeType

import torch._dynamo
from torch import nn

from qsync_fx.formats import Precision
from qsync_fx.module_paths import paths
from qsync_fx.ops import Kind
from qsync_fx.options import Options
from qsync_fx.plan import Plan
from qsync_fx.plan.operator_id import OpId

_TORCH = str(Path(torch._dynamo.__file__).parent)
_counting = itertools.count()


@dataclass(frozen=True)
class Ran:
    """Operator of a compiled graph.

    Attributes:
        id, kind, planned, precision, output, reason: as in its `OperatorInfo`.
        line: line of the user's model, "model.py:42".
    """

    id: OpId
    kind: Kind
    planned: Precision | None
    precision: Precision | None
    output: Precision | None
    reason: str
    line: str = ""


class Outcome(StrEnum):
    COMPILED = "compiled"
    BROKE = "compiled in pieces"
    SKIPPED = "left to Python"


@dataclass
class Frame:
    """Python function that Dynamo processed, called for one module.

    Attributes:
        name, where: the function and its line, "model.py:42".
        module: module of the call.
        shape: hash of the module's tree, equal for modules whose code Dynamo may share.
        root: model at the root of operator ids; the module itself if no graph determines it.
        path: path of the module in the ids of `operators`.
        alone: whether only this module uses the code, not others of its shape.
        outcome: last result of Dynamo.
        texts: Dynamo's messages, if it left code to Python.
        operators: operators in the graphs of the frame.
        held: modules with parameters or operators in these graphs, by path below `module`.
    """

    name: str
    where: str
    module: weakref.ref[nn.Module]
    shape: int
    root: weakref.ref[nn.Module]
    path: str = ""
    alone: bool = False
    outcome: Outcome = Outcome.COMPILED
    texts: tuple[str, ...] = ()
    operators: dict[OpId, Ran] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)


@dataclass
class Log:
    """Log of all compilations with one set of options.

    Attributes:
        options: the options, without "root".
        declared: modules given to torch.compile, with their paths in a larger model, or "".
        told: plan entries that were already reported to match no operator.
        unasked: plans of cached profiles, for models without a plan from the user.
        stale: class names of models whose unusable cached profile was already reported.
        frames: entries by code and module, in processing order.
        settled: models that were already checked.
        reached: modules that a backward pass of this rank reached.
        watched: models with backward passes under observation, for one step.
        last: counter over all logs, which orders them by their latest entry.
    """

    options: Options
    declared: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)
    frames: dict[tuple[CodeType, weakref.ref[nn.Module]], Frame] = field(default_factory=dict)
    settled: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    reached: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    watched: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    told: set[OpId | str] = field(default_factory=set)
    unasked: weakref.WeakKeyDictionary[nn.Module, Plan] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    stale: set[str] = field(default_factory=set)
    last: int = field(default_factory=lambda: next(_counting))

    def declare(self, module: nn.Module, within: str) -> None:
        """Record that torch.compile was given a module."""
        self.last = next(_counting)
        self.declared = [
            (ref, path) for ref, path in self.declared if ref() is not None and ref() is not module
        ]
        self.declared.append((weakref.ref(module), within))
        self.settled.discard(module)
        self.watched.discard(module)

    @property
    def given(self) -> list[nn.Module]:
        """Live modules that were given to torch.compile."""
        return [module for ref, _ in self.declared if (module := ref()) is not None]

    def frame(self, code: CodeType, module: nn.Module) -> Frame:
        """Return the entry for a function and a module; create it if it does not exist."""
        self.last = next(_counting)
        key = (code, weakref.ref(module))
        if key not in self.frames:
            self.frames[key] = Frame(*_named(code, module), key[1], shape_of(module), key[1])
        result = self.frames[key]
        if (touched := getattr(_thread, "touched", None)) is not None:
            touched.append(result)
        return result


class _Logs:
    def __init__(self) -> None:
        self.kept: list[Log] = []

    def of(self, options: Options) -> Log:
        options = replace(options, root=None)
        result = next((log for log in self.kept if log.options == options), None)
        if result is None:
            result = Log(options)
            self.kept.append(result)
        return result


_logs = _Logs()
_thread = threading.local()


def log_of(options: Options) -> Log:
    """Return the log of a set of options."""
    owned: _Logs | None = getattr(_thread, "own", None)
    return (owned or _logs).of(options)


@contextlib.contextmanager
def collecting(options: Options) -> Iterator[Log]:
    """Record the compilations of this thread in a separate log, and yield it."""
    before, _thread.own = getattr(_thread, "own", None), _Logs()
    try:
        yield _thread.own.of(options)
    finally:
        _thread.own = before


def logs() -> list[Log]:
    """Return all logs, the one with the latest entry last."""
    return sorted(_logs.kept, key=lambda log: log.last)


def declared() -> Iterator[nn.Module]:
    """Yield every live module that was given to torch.compile."""
    for log in _logs.kept:
        yield from log.given


def forget() -> None:
    """Clear all logs after Dynamo has discarded its compiled code."""
    for log in _logs.kept:
        log.frames.clear()
        log.told.clear()
        log.unasked.clear()
        log.stale.clear()
    _logs.kept = [log for log in _logs.kept if log.given]


@contextlib.contextmanager
def converting() -> Iterator[list[Frame]]:
    """Yield a list that collects the frame entries touched during one conversion by Dynamo."""
    before = getattr(_thread, "touched", None)
    touched: list[Frame] = []
    _thread.touched = touched
    try:
        yield touched
    finally:
        _thread.touched = before


def note_graph(
    frame: Frame, root: nn.Module, path: str, operators: Iterable[Ran], live: Iterable[str]
) -> None:
    """Add the operators and modules of a graph to the entry of its frame."""
    frame.root, frame.path = weakref.ref(root), path
    for ran in operators:
        frame.operators[ran.id] = ran
    frame.held.update(live)


def _named(code: CodeType, module: nn.Module) -> tuple[str, str]:
    """Return a function's name and line; for a wrapper of torch, of the module's `forward`."""
    if code.co_filename.startswith(_TORCH):
        code = getattr(inspect.unwrap(module.forward), "__code__", code)
    return code.co_qualname, f"{code.co_filename}:{code.co_firstlineno}"


def below(path: str, root: str) -> str | None:
    """Return a path relative to `root`; None if it is not below `root`."""
    if not root:
        return path
    return path.removeprefix(root).removeprefix(".") if f"{path}.".startswith(f"{root}.") else None


def shape_of(module: nn.Module) -> int:
    """Return a hash that is equal for modules with equal classes and trees."""
    return hash(tuple((path, type(part)) for path, part in paths(module)))
