"""A model's modules with what a log says of each.

Modules of one class with equal parts share compiled code: Dynamo meets the function of the first of them alone, or what torch puts around
it, as around a Sequential. What it made of that holds for the others, unless it met theirs too. Invariant: every answer is about the
modules of `root`, by their paths in it.

Whether a module that is in no graph has run on this rank, as far as its gradients tell.

Where one process trains alone, a gradient says so. Where several ranks do, it may be the mean of what others had: with
find_unused_parameters, DistributedDataParallel gives one to parameters that this rank's pass did not reach. Autograd calls a hook where it
adds a gradient up; where one is put there, nothing does.

Invariant: with several ranks, a module of which nothing but a gradient tells that it ran has run where a backward pass of this rank's was
seen to reach it, in the step after the first one.
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
from qsync_fx.plan.operator_id import OpId
from qsync_fx.plan.plan import Plan
from qsync_fx.plan.plan_loading import this_process


class Tree:
    """
    Attributes:
        root: the whole model, without wrappers.
        modules: every module by its path.
        compiled: the paths of those that torch.compile was given.
        held: the paths of those that are in a graph.
        within: the path of `root` in ids, where the user says that it is a part of a larger model.
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
        """What the log's options plan for the model, or what a cached profile had for it where they say nothing."""
        if (unasked := self.log.unasked.get(self.root)) is not None:
            return unasked
        device = next((p.device for p in self.root.parameters()), torch.device("cpu"))
        return active_plan(self.log.options, device)

    @property
    def intended(self) -> Plan:
        """The plan that someone gave: the user, or a cached profile. Without one it is empty, as the default format is no promise.

        With the option "strict" the default format counts as given.
        """
        options = self.log.options
        has_plan = not options.is_default or options.strict or self.root in self.log.unasked
        return self.plan if has_plan else Plan()

    @property
    def parameterised(self) -> dict[str, nn.Module]:
        """The modules that have parameters of their own."""
        return {path: module for path, module in self.modules.items() if own_parameters(module)}

    @property
    def trained(self) -> bool:
        """Whether the model has gradients."""
        return any(p.grad is not None for p in self.root.parameters())

    @property
    def ran(self) -> bool:
        """Whether Dynamo has met anything of the model."""
        return any(self._frames.values())

    def frames(self, path: str) -> list[Frame]:
        """What Dynamo made of the functions of one module."""
        return self._frames.get(path, [])

    def operators(self) -> dict[str, list[Ran]]:
        """The operators of each module, by its path, with the ids that they have in this model."""
        result: dict[str, dict[object, Ran]] = {}
        for path, frames in self._frames.items():
            counts: Counter[str] = Counter()
            for ran in (
                ran for frame in frames for ran in _moved(frame, joined(self.within, path), counts)
            ):
                result.setdefault(below(ran.id.module, self.within) or "", {})[ran.id] = ran
        return {path: list(by_id.values()) for path, by_id in result.items()}

    def decided(self) -> Iterator[OpId]:
        """Yields the operators that the plan decides on, in this model and, where it is a part of a larger one, in the other parts."""
        parts = (
            (frame.operators.values() for frame in self.log.frames.values())
            if self.within
            else self.operators().values()
        )
        yield from (ran.id for runs in parts for ran in runs if ran.kind is Kind.ADJUSTABLE)

    def concerns(self, path: str) -> bool:
        """Whether what was compiled has to do with a module: torch.compile was given it or one around it, or Dynamo has met one."""
        return any(part in self.compiled or self.frames(part) for part in self.above(path))

    def above(self, path: str) -> Iterator[str]:
        """Yields a path and those of the modules around it, innermost first."""
        while path:
            yield path
            path = path.rpartition(".")[0]
        yield ""


def models(log: Log) -> Iterator[nn.Module]:
    """Yields the models of a log: those that ids start from, and what torch.compile was given and is in none of them."""
    roots = {id(root): root for frame in log.frames.values() if (root := frame.root()) is not None}
    inputs = {id(module): module for module in log.given}
    everything = {**inputs, **roots}
    inside = {id(part) for root in everything.values() for path, part in paths(root) if path}
    yield from (model for address, model in everything.items() if address not in inside)


def stale(frame: Frame) -> bool:
    """Whether code was compiled for a function, and Dynamo has given up on it since."""
    return frame.outcome is Outcome.SKIPPED and bool(frame.held)


def _frames_of(module: nn.Module, log: Log, shared: bool) -> Iterator[Frame]:
    """Yields what Dynamo met of a module and, with `shared`, of others whose code it may run."""
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
    """Yield the operators of a frame with the ids that they have where its module is at `path`.

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
    """Whether a parameter of its own has a gradient."""
    return any(p.grad is not None for p in own_parameters(module))


def has_run(module: nn.Module, log: Log) -> bool:
    """Whether it is known of a module that it has run on this rank."""
    return has_gradients(module) and (module in log.reached or not _several_ranks())


def watch(modules: Iterable[nn.Module], log: Log) -> None:
    """Notes which modules the next backward pass reaches, once each."""
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
