"""Modules of a model with Dynamo's compilation results, and whether uncovered modules have run.

Modules of one class with equal submodules share compiled code. Dynamo then processes the function
of the first one only, and its result applies to all modules without an entry of their own.

Invariant: all results refer to the modules of `root` by their paths in it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from qsync_fx.coverage.compilation_log import Frame, Log, Outcome, Ran, below, shape_of
from qsync_fx.module_paths import joined, own_parameters, paths, unwrapped
from qsync_fx.ops.spec import Kind
from qsync_fx.options import active_plan
from qsync_fx.plan.cluster_plan import this_process
from qsync_fx.plan.operator_id import OpId
from qsync_fx.plan.plan import Plan


class Tree:
    """Modules of one model with the entries of a log.

    Attributes:
        root: the full model, without wrappers.
        modules: all modules by path.
        compiled: paths of the modules given to torch.compile.
        held: paths of the modules in compiled graphs.
        within: path of `root` in operator ids, if the user declares it as part of a larger model.
    """

    def __init__(self, root: nn.Module, log: Log) -> None:
        self.root, self.log = unwrapped(root), log
        self.modules = {path: module for path, module in paths(root) if unwrapped(module) is module}
        inputs = {id(module) for module in log.given}
        self.compiled = {path for path, module in self.modules.items() if id(module) in inputs}
        self._frames: dict[str, list[Frame]] = {}
        for path, module in self.modules.items():
            called = path in self.compiled or any(
                part in self.compiled or self.frames(part) for part in self.above(path)
            )
            self._frames[path] = list(_frames_of(module, log, shared=called))
        owned = [
            frame.path for frame in self._frames[""] if frame.module() is self.root and frame.held
        ]
        reported = [path for ref, path in log.declared if ref() is self.root]
        self.within = next(iter((*owned, *reported)), "")
        self.held = {
            joined(path, rest)
            for path, frames in self._frames.items()
            for f in frames
            for rest in f.held
        }

    @property
    def plan(self) -> Plan:
        """Plan of the log's options for the model, else the plan of a cached profile."""
        if (unasked := self.log.unasked.get(self.root)) is not None:
            return unasked
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
    def trained(self) -> bool:
        """Whether the model has gradients."""
        return any(p.grad is not None for p in self.root.parameters())

    @property
    def ran(self) -> bool:
        """Whether Dynamo has processed any function of the model."""
        return any(self._frames.values())

    def frames(self, path: str) -> list[Frame]:
        """Return the log entries for the functions of a module."""
        return self._frames.get(path, [])

    def operators(self) -> dict[str, list[Ran]]:
        """Return the operators of each module by path, with their ids in this model."""
        result: dict[str, dict[object, Ran]] = {}
        for path, frames in self._frames.items():
            counts: Counter[str] = Counter()
            for ran in (
                ran for frame in frames for ran in _moved(frame, joined(self.within, path), counts)
            ):
                result.setdefault(below(ran.id.module, self.within) or "", {})[ran.id] = ran
        return {path: list(by_id.values()) for path, by_id in result.items()}

    def decided(self) -> Iterator[OpId]:
        """Yield the operators that a plan decides on.

        If the model is part of a larger one, the operators of the other parts are included.
        """
        parts = (
            (frame.operators.values() for frame in self.log.frames.values())
            if self.within
            else self.operators().values()
        )
        yield from (ran.id for runs in parts for ran in runs if ran.kind is Kind.ADJUSTABLE)

    def concerns(self, path: str) -> bool:
        """Return whether a module or an ancestor was given to torch.compile or met by Dynamo."""
        return any(part in self.compiled or self.frames(part) for part in self.above(path))

    def above(self, path: str) -> Iterator[str]:
        """Yield a path and the paths of its ancestors, innermost first."""
        while path:
            yield path
            path = path.rpartition(".")[0]
        yield ""


def models(log: Log) -> Iterator[nn.Module]:
    """Yield the models of a log: roots of operator ids, and compiled modules outside of them."""
    roots = {id(root): root for frame in log.frames.values() if (root := frame.root()) is not None}
    inputs = {id(module): module for module in log.given}
    everything = {**inputs, **roots}
    inside = {id(part) for root in everything.values() for path, part in paths(root) if path}
    yield from (model for address, model in everything.items() if address not in inside)


def stale(frame: Frame) -> bool:
    """Return whether Dynamo compiled a function and later left it to Python."""
    return frame.outcome is Outcome.SKIPPED and bool(frame.held)


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
    """Yield the operators of a frame with their ids for a module at `path`.

    `counts` numbers the operators of one name over all frames of the module.
    """
    for ran in frame.operators.values():
        rest = below(ran.id.module, frame.path)
        if rest is None:
            continue
        moved = joined(path, rest)
        if moved and not ran.id.module:
            # Outside modules the index restarts after each module; inside a module it does not.
            name = ran.id.operator
            op_id = OpId(moved, name, counts[name])
            counts[name] += 1
        else:
            op_id = dataclasses.replace(ran.id, module=moved)
        yield dataclasses.replace(ran, id=op_id)


def has_gradients(module: nn.Module) -> bool:
    """Return whether a parameter of the module itself has a gradient."""
    return any(p.grad is not None for p in own_parameters(module))


def has_run(module: nn.Module, log: Log) -> bool:
    """Return whether a module is known to have run on this rank.

    A gradient proves it in a single process. With several ranks the gradient may be an average of
    other ranks: with find_unused_parameters, DistributedDataParallel sets it for parameters that
    this rank did not use. There, an observed accumulation in a backward pass is required (`watch`).
    """
    return has_gradients(module) and (module in log.reached or not _several_ranks())


def watch(modules: Iterable[nn.Module], log: Log) -> None:
    """Record which modules the next backward pass reaches.

    Autograd calls the hooks when it accumulates a gradient; DistributedDataParallel does not.
    """
    for module in modules:
        for parameter in own_parameters(module):
            if parameter.requires_grad:
                _watch(module, parameter, log)


def _watch(module: nn.Module, parameter: nn.Parameter, log: Log) -> None:
    def reached(_: Any) -> None:
        handle.remove()
        log.reached.add(module)

    hooks: Any = parameter
    handle = hooks.register_post_accumulate_grad_hook(reached)


def _several_ranks() -> bool:
    return (this_process().world or 1) > 1
