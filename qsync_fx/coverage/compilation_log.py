"""What Dynamo made of each frame, and what the graphs of ours held: one log for each set of options, since equal options share code.

Where a block stands in its model ("root") is no part of that: blocks that are compiled one by one are pieces of one model.

Invariant: a log keeps no module and no tensor alive. It is what Dynamo holds compiled code for: `torch.compiler.reset` empties it.
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
    """One operator of a compiled graph.

    Attributes:
        id, kind, planned, precision, output, reason: as in its note.
        line: of the user's model, "model.py:42".
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
    """One Python function as Dynamo met it, called for one module.

    Attributes:
        name, where: the function, and its line "model.py:42".
        module: whose call it is part of.
        shape: of the module's tree, equal for modules whose code Dynamo may share.
        root: the model that ids start from; the module itself where no graph says.
        path: of the module, in the ids of `operators`.
        alone: whether the code is for this module only, or may be used for others of its shape.
        outcome: what Dynamo made of it last.
        texts: Dynamo's reasons, where it left anything to Python.
        operators: what the graphs of the frame held.
        held: the modules that they held, parameters or operators, by path below `module`.
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
    """What was compiled with one set of options.

    Attributes:
        declared: what torch.compile was given, each with its path in a larger model, "" where the user gives none.
        told: the operators and patterns of the plan that were told to decide on nothing.
        unasked: the plans of models for which none was asked, where a cached profile had one.
        stale: the models of which it was told that a cached profile is not taken.
        frames: by code and module, in the order that Dynamo met them.
        settled: the models that have been checked after a training step.
        reached: the modules that a backward pass of this rank was seen to reach; see `reached`.
        watched: the models of which it is watched for a step what backward passes reach.
        last: grows with each entry of any log, so that the later one of two logs is known.
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
        """Notes that torch.compile was given a module."""
        self.last = next(_counting)
        self.declared = [
            (ref, path) for ref, path in self.declared if ref() is not None and ref() is not module
        ]
        self.declared.append((weakref.ref(module), within))
        self.settled.discard(module)
        self.watched.discard(module)

    @property
    def given(self) -> list[nn.Module]:
        """The modules that torch.compile was given, those that live."""
        return [module for ref, _ in self.declared if (module := ref()) is not None]

    def frame(self, code: CodeType, module: nn.Module) -> Frame:
        """Returns the entry for a function that is called for a module, a new one where there is none."""
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
    """Returns the log of a set of options."""
    owned: _Logs | None = getattr(_thread, "own", None)
    return (owned or _logs).of(options)


@contextlib.contextmanager
def collecting(options: Options) -> Iterator[Log]:
    """Yields a log of its own, which takes what is compiled in this thread meanwhile."""
    before, _thread.own = getattr(_thread, "own", None), _Logs()
    try:
        yield _thread.own.of(options)
    finally:
        _thread.own = before


def logs() -> list[Log]:
    """Returns all logs, the one with the latest entry last."""
    return sorted(_logs.kept, key=lambda log: log.last)


def declared() -> Iterator[nn.Module]:
    """Yields every module that torch.compile was given, as long as it lives."""
    for log in _logs.kept:
        yield from log.given


def forget() -> None:
    """Empties all logs of what was compiled: Dynamo has dropped it."""
    for log in _logs.kept:
        log.frames.clear()
        log.told.clear()
        log.unasked.clear()
        log.stale.clear()
    _logs.kept = [log for log in _logs.kept if log.given]


@contextlib.contextmanager
def converting() -> Iterator[list[Frame]]:
    """Yields the list of the frames that get an entry while Dynamo converts one."""
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
    """Adds what a graph holds to the entry of its frame."""
    frame.root, frame.path = weakref.ref(root), path
    for ran in operators:
        frame.operators[ran.id] = ran
    frame.held.update(live)


def _named(code: CodeType, module: nn.Module) -> tuple[str, str]:
    """The name of a function and its line; that of the module's forward for a function that torch puts around it."""
    if code.co_filename.startswith(_TORCH):
        code = getattr(inspect.unwrap(module.forward), "__code__", code)
    return code.co_qualname, f"{code.co_filename}:{code.co_firstlineno}"


def below(path: str, root: str) -> str | None:
    """Returns a path as seen from `root`; None for one that is not below it."""
    if not root:
        return path
    return path.removeprefix(root).removeprefix(".") if f"{path}.".startswith(f"{root}.") else None


def shape_of(module: nn.Module) -> int:
    """Returns a number that modules of equal classes with equal trees share."""
    return hash(tuple((path, type(part)) for path, part in paths(module)))
