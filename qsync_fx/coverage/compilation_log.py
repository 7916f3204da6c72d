"""Log of Dynamo's result for each frame, per set of options, and the modules that it applies to.

The option "root" does not distinguish logs: separately compiled blocks are parts of one model.
Modules of one class with equal submodules share compiled code. Dynamo then processes the function
of the first one only, and its result applies to all modules without an entry of their own.

Invariant: a log has weak references to modules only, and no tensors. It describes Dynamo's current
compiled code, so `torch.compiler.reset` clears it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

from qsync_fx.formats import Precision
from qsync_fx.module_paths import joined, own_parameters, paths, unwrapped
from qsync_fx.ops import Kind
from qsync_fx.options import Options, active_plan
from qsync_fx.plan import Plan
from qsync_fx.plan.cluster_plan import this_process
from qsync_fx.plan.operator_id import OpId
from qsync_fx.torch_internals import dynamo_config

_TORCH = str(Path(dynamo_config.__file__).parent)
_counting = itertools.count()


@dataclass(frozen=True)
class Ran:
    """Operator of a compiled graph, as in its `OperatorInfo`, and its line, "model.py:42"."""

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
        shape: hash of the module's tree, equal for modules whose code Dynamo may share.
        root: model at the root of operator ids; the module itself if no graph determines it.
        path: path of the module in the ids of `operators`.
        alone: whether only this module uses the code, not others of its shape.
        texts: Dynamo's messages, if it left code to Python.
        covered: modules with parameters or operators in these graphs, by path below `module`.
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
    covered: set[str] = field(default_factory=set)


@dataclass
class Log:
    """Log of all compilations with one set of options.

    Attributes:
        declared: modules given to torch.compile, with their paths in a larger model, or "".
        reached: modules that a backward pass of this rank reached.
        watched: models with backward passes under observation, for one step.
        reported: plan entries that were already reported to match no operator.
        unasked: plans of cached profiles, for models without a plan from the user.
        stale: class names of models whose unusable cached profile was already reported.
        last: counter over all logs, which orders them by their latest entry.
    """

    options: Options
    declared: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)
    frames: dict[tuple[CodeType, weakref.ref[nn.Module]], Frame] = field(default_factory=dict)
    settled: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    reached: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    watched: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    reported: set[OpId | str] = field(default_factory=set)
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
    def compiled_modules(self) -> list[nn.Module]:
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


_logs: list[Log] = []
_thread = threading.local()


def log_of(options: Options) -> Log:
    """Return the log of a set of options."""
    available: list[Log] = getattr(_thread, "logs", _logs)
    options = replace(options, root=None)
    for log in available:
        if log.options == options:
            return log
    available.append(Log(options))
    return available[-1]


@contextlib.contextmanager
def collecting(options: Options) -> Iterator[Log]:
    """Record the compilations of this thread in a separate log, and yield it."""
    before, _thread.logs = getattr(_thread, "logs", _logs), []
    try:
        yield log_of(options)
    finally:
        _thread.logs = before


def logs() -> list[Log]:
    """Return all logs, the one with the latest entry last."""
    return sorted(_logs, key=lambda log: log.last)


def declared() -> Iterator[nn.Module]:
    """Yield every live module that was given to torch.compile."""
    for log in _logs:
        yield from log.compiled_modules


def forget() -> None:
    """Clear all logs after Dynamo has discarded its compiled code."""
    for log in _logs:
        for entries in (log.frames, log.reported, log.unasked, log.stale):
            entries.clear()
    _logs[:] = [log for log in _logs if log.compiled_modules]


@contextlib.contextmanager
def converting() -> Iterator[list[Frame]]:
    """Yield a list that collects the frame entries touched during one conversion by Dynamo."""
    before, _thread.touched = getattr(_thread, "touched", None), []
    try:
        yield _thread.touched
    finally:
        _thread.touched = before


def _named(code: CodeType, module: nn.Module) -> tuple[str, str]:
    """Return a function's name and line; for a wrapper of torch, of the module's `forward`."""
    if code.co_filename.startswith(_TORCH):
        code = getattr(inspect.unwrap(module.forward), "__code__", code)
    return code.co_qualname, f"{code.co_filename}:{code.co_firstlineno}"


def below(path: str, root: str) -> str | None:
    """Return a path relative to `root`; None if it is not below `root`."""
    if root and not f"{path}.".startswith(f"{root}."):
        return None
    return path.removeprefix(root).removeprefix(".")


def shape_of(module: nn.Module) -> int:
    """Return a hash that is equal for modules with equal classes and trees."""
    return hash(tuple((path, type(part)) for path, part in paths(module)))


class Tree:
    """Modules of one model with the entries of a log.

    Attributes:
        root: the full model, without wrappers.
        compiled: paths of the modules given to torch.compile.
        frames: log entries for the functions of each module, by path.
        covered: paths of the modules in compiled graphs.
        within: path of `root` in operator ids, if the user declares it as part of a larger model.
    """

    def __init__(self, root: nn.Module, log: Log) -> None:
        self.root, self.log = unwrapped(root), log
        self.modules = {path: module for path, module in paths(root) if unwrapped(module) is module}
        inputs = {id(module) for module in log.compiled_modules}
        self.compiled = {path for path, module in self.modules.items() if id(module) in inputs}
        self.frames: dict[str, list[Frame]] = defaultdict(list)
        for path, module in self.modules.items():
            self.frames[path] += _frames_of(module, log, shared=self.concerns(path))
        paths_of_root = [f.path for f in self.frames[""] if f.module() is self.root and f.covered]
        paths_of_root += [path for ref, path in log.declared if ref() is self.root]
        self.within = next(iter(paths_of_root), "")
        self.covered = {
            joined(path, rest)
            for path, frames in self.frames.items()
            for f in frames
            for rest in f.covered
        }

    @property
    def plan(self) -> Plan:
        """Plan of the log's options for the model, else the plan of a cached profile."""
        if self.root in self.log.unasked:
            return self.log.unasked[self.root]
        device = next((p.device for p in self.root.parameters()), torch.device("cpu"))
        return active_plan(self.log.options, device)

    @property
    def intended(self) -> Plan:
        """Plan from the user or from a cached profile; empty without one.

        The default format alone is no plan, except with the option "strict".
        """
        options = self.log.options
        has_plan = not options.is_default or options.strict or self.root in self.log.unasked
        return self.plan if has_plan else Plan()

    @property
    def parameterised(self) -> dict[str, nn.Module]:
        """Modules with parameters of their own."""
        return {path: module for path, module in self.modules.items() if own_parameters(module)}

    @property
    def ran(self) -> bool:
        """Whether Dynamo has processed any function of the model."""
        return any(self.frames.values())

    def operators(self) -> dict[str, list[Ran]]:
        """Return the operators of each module by path, with their ids in this model."""
        result: dict[str, dict[object, Ran]] = {}
        for path, frames in self.frames.items():
            counts: Counter[str] = Counter()
            for frame in frames:
                for ran in _moved(frame, joined(self.within, path), counts):
                    result.setdefault(below(ran.id.module, self.within) or "", {})[ran.id] = ran
        return {path: list(by_id.values()) for path, by_id in result.items()}

    def decided(self) -> Iterator[OpId]:
        """Yield the operators that a plan decides on, in all parts of a larger model."""
        runs = [ran for part in self.operators().values() for ran in part]
        if self.within:
            runs = [ran for f in self.log.frames.values() for ran in f.operators.values()]
        yield from (ran.id for ran in runs if ran.kind is Kind.ADJUSTABLE)

    def concerns(self, path: str) -> bool:
        """Return whether a module or an ancestor was given to torch.compile or met by Dynamo."""
        return any(part in self.compiled or self.frames.get(part) for part in self.above(path))

    def above(self, path: str) -> Iterator[str]:
        """Yield a path and the paths of its ancestors, innermost first."""
        while path:
            yield path
            path = path.rpartition(".")[0]
        yield ""


def models(log: Log) -> Iterator[nn.Module]:
    """Yield the models of a log: roots of operator ids, and compiled modules outside of them."""
    roots = {id(root): root for frame in log.frames.values() if (root := frame.root()) is not None}
    inputs = {id(module): module for module in log.compiled_modules}
    everything = {**inputs, **roots}
    inside = {id(part) for root in everything.values() for path, part in paths(root) if path}
    yield from (model for address, model in everything.items() if address not in inside)


def stale(frame: Frame) -> bool:
    """Return whether Dynamo compiled a function and later left it to Python."""
    return frame.outcome is Outcome.SKIPPED and bool(frame.covered)


def _frames_of(module: nn.Module, log: Log, shared: bool) -> Iterator[Frame]:
    """Yield the entries of a module and, with `shared`, of modules whose code it may share."""
    owned = {code for (code, ref) in log.frames if ref() is module}
    shape = shape_of(module) if shared else None
    others: dict[object, Frame] = {}
    for (code, ref), frame in log.frames.items():
        if ref() is module:
            yield frame
        elif (
            code not in owned
            and frame.shape == shape
            and not frame.alone
            and frame.outcome is not Outcome.SKIPPED
        ):
            others[code] = frame
    yield from others.values()


def _moved(frame: Frame, path: str, counts: Counter[str]) -> Iterator[Ran]:
    """Yield the operators of a frame for a module at `path`; `counts` numbers them by name."""
    for ran in frame.operators.values():
        rest = below(ran.id.module, frame.path)
        if rest is None:
            continue
        moved, name = joined(path, rest), ran.id.operator
        if moved and not ran.id.module:
            # Outside modules the index restarts after each module; inside a module it does not.
            op_id = OpId(moved, name, counts[name])
            counts[name] += 1
        else:
            op_id = replace(ran.id, module=moved)
        yield replace(ran, id=op_id)


def has_gradients(module: nn.Module) -> bool:
    """Return whether a parameter of the module itself has a gradient."""
    return any(p.grad is not None for p in own_parameters(module))


def has_run(module: nn.Module, log: Log) -> bool:
    """Return whether a module is known to have run on this rank.

    A gradient proves it in a single process. With several ranks, DistributedDataParallel may set it
    to an average of other ranks, so an accumulation in a backward pass is required (`watch`).
    """
    several_ranks = (this_process().world or 1) > 1
    return has_gradients(module) and (module in log.reached or not several_ranks)


def watch(modules: Iterable[nn.Module], log: Log) -> None:
    """Record which modules the next backward pass reaches.

    Autograd calls the hooks when it accumulates a gradient; DistributedDataParallel does not.
    """
    for module in modules:
        parameters: list[Any] = [p for p in own_parameters(module) if p.requires_grad]
        for parameter in parameters:
            handles: list[Any] = []
            reached = functools.partial(_reached, module, log, handles)
            handles.append(parameter.register_post_accumulate_grad_hook(reached))


def _reached(module: nn.Module, log: Log, handles: list[Any], _: object) -> None:
    log.reached.add(module)
    handles.pop().remove()
