"""Cached plans: the default plan of a model that is compiled without plan or precision.

`caches()/profiles/STRUCTURE` contains the profiles of models with one structure, each with a file
*.plan.json of the plan that `qsync_fx.cache_plan` found from it. Unreadable files are ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

import torch
from torch import nn

from qsync_fx import environment
from qsync_fx.coverage.compilation_log import log_of
from qsync_fx.devices.machine import Machine, here_for
from qsync_fx.errors import PlanError, PlanWarning, ProfileError
from qsync_fx.graph import PrecisionGraph
from qsync_fx.graph.fx_utils import describe, tensors
from qsync_fx.graph.graph import Operator
from qsync_fx.module_paths import joined, paths
from qsync_fx.options import Options
from qsync_fx.passes.assign import Assign
from qsync_fx.passes.pass_base import Pass, Scope
from qsync_fx.passes.tracing.dynamo_frames import SourcePlace
from qsync_fx.plan.plan import CACHED, Plan
from qsync_fx.serialization.atomic_files import caches
from qsync_fx.serialization.schema import Schema

_LOG = logging.getLogger("qsync_fx")


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a model, for the comparison with cached profiles.

    Attributes:
        structure: digest of the model's class and the names of its parameters and buffers.
        tensors: digest of their dtypes and shapes.
        options: non-default backend options, as text.
        evaluated: paths of the modules in evaluation mode.
        operators: output shapes of each operator, by its id.
    """

    structure: str
    tensors: str
    options: str
    evaluated: list[str]
    operators: dict[str, str]


def fingerprint(root: nn.Module, operators: Iterable[Operator], options: Options) -> Fingerprint:
    """Return the fingerprint of a model with these operators, before precisions are decided."""
    owned = {
        joined(path, name): tensor
        for path, module in paths(root)
        for name, tensor in {**module._parameters, **module._buffers}.items()
        if tensor is not None
    }
    kind = type(root)
    return Fingerprint(
        _digest([f"{kind.__module__}.{kind.__qualname__}", *owned]),
        _digest(map(describe, owned.values())),
        options.non_default_options,
        [path for path, module in paths(root) if not module.training],
        _output_shapes(operators),
    )


def _output_shapes(operators: Iterable[Operator]) -> dict[str, str]:
    """Return output shapes such as "4x16 1" by operator id, symbolic sizes by their hints."""
    result = {}
    for operator in operators:
        outputs = tensors(operator.graph.value(operator.node))
        shapes = ("x".join(map(_size, output.shape)) or "1" for output in outputs)
        result[str(operator.id)] = " ".join(shapes)
    return result


def _size(size: int | torch.SymInt) -> str:
    if isinstance(size, torch.SymInt):
        return str(size.node.hint) if size.node.has_hint() else "?"
    return str(size)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


SUFFIX: Final = ".plan.json"


@dataclass(frozen=True)
class CachedPlan:
    """Plan that was found from a profile.

    Attributes:
        within: format whose uniform plan has a variance that this plan does not exceed.
        seconds: predicted seconds of a step.
        uniform_seconds: seconds of a step with all operators in the format `within`.
    """

    machine: Machine
    model: Fingerprint
    within: str
    seconds: float
    uniform_seconds: float
    operators: dict[str, str]


CACHED_PLAN_FILE: Final = Schema(
    CachedPlan,
    noun="plan of a cached profile",
    error=PlanError,
    remedy="remove the file, and cache the plan again with qsync_fx.cache_plan(profile)",
    name="qsync-cached-plan",
)


def folder(structure: str) -> Path:
    """Return the folder of the profiles of models with a structure; it may not exist."""
    return caches() / "profiles" / structure


def _cached(structure: str) -> Iterator[tuple[Path, CachedPlan]]:
    """Yield the readable cached plans for models with a structure, the latest first."""
    try:
        files = {path: path.stat().st_mtime_ns for path in folder(structure).glob(f"*{SUFFIX}")}
    except OSError:  # another process has removed a file, or the folder is not readable
        return
    for path in sorted(files, key=lambda path: -files[path]):
        with contextlib.suppress(PlanError):
            yield path, CACHED_PLAN_FILE.load(path)


@dataclass(frozen=True)
class ApplyCachedPlan:
    """Pass that sets the plan of a cached profile in the context of each graph.

    It runs as soon as the operators are known, because they identify the model, and before any
    precision is decided. The graph itself does not change.

    The `model` is a fingerprint without operators, `before` the plan of earlier graphs, if any.
    `stale` receives the mismatch of the latest cached plan if no plan matches.
    """

    name: ClassVar[str] = "cached_plan"
    scope: ClassVar[Scope] = Scope.MODEL

    model: Fingerprint
    cached: tuple[tuple[Path, CachedPlan], ...]
    before: Plan | None
    stale: list[str] = field(default_factory=list, compare=False)

    def __call__(self, graph: PrecisionGraph) -> None:
        plan = self.before
        if graph.context.training:
            plan = self._matching(graph) or plan
        if plan is None:
            return
        options = dataclasses.replace(graph.context.options, plan=plan)
        for part in graph.walk():
            part.context = dataclasses.replace(part.context, plan=plan, options=options)

    def _matching(self, graph: PrecisionGraph) -> Plan | None:
        shapes, mismatches = _output_shapes(graph.operators()), []
        for path, cached in self.cached:
            why = self._mismatch(cached, shapes, graph.context.complete)
            if not why:
                return _plan(path, cached)
            mismatches.append(why)
        if self.before is None:
            self.stale.extend(mismatches[:1])
        return None

    def _mismatch(self, cached: CachedPlan, shapes: Mapping[str, str], complete: bool) -> str:
        """Return why a cached plan is for another model, batch or machine, or ""."""
        try:
            cached.machine.check(here_for(cached.machine))
        except ProfileError as error:
            return error.what
        measured, current = cached.model, self.model
        if measured.tensors != current.tensors:
            return "its model has tensors of other sizes or dtypes"
        if measured.options != current.options:
            options = f"{measured.options or 'none'}, here {current.options or 'none'}"
            return f"it was measured with other options: {options}"
        if measured.evaluated != current.evaluated:
            return "it was measured with other modules in evaluation mode"
        strange = shapes.keys() - measured.operators.keys()
        if complete:
            strange |= measured.operators.keys() - shapes.keys()
        if strange:
            return f"its model has other operators: {min(strange)}"
        for name, shape in shapes.items():
            if measured.operators[name] != shape:
                output = f"the output of {name} is {measured.operators[name]}, here {shape}"
                return f"it was measured with another batch size: {output}"
        return ""


_SWITCH: Final = "QSYNC_CACHED_PLAN"
"""Environment variable that disables cached plans if it is 0."""


def candidates(
    place: SourcePlace, options: Options, device: torch.device
) -> ApplyCachedPlan | None:
    """Return the pass for a model's cached plans; None if the user chose formats."""
    root, enabled = place.root, environment.switch(_SWITCH) and options.cached_plan
    if root is None or not options.is_default or not enabled:
        return None
    before, model = log_of(options).unasked.get(root), fingerprint(root, (), options)
    cached = tuple(_cached(model.structure))
    # Unsupported devices, for which torch may lack autocast, are reported elsewhere.
    if (not cached and before is None) or torch.is_autocast_enabled(device.type):
        return None
    return ApplyCachedPlan(model, cached, before)


def _plan(path: Path, result: CachedPlan) -> Plan:
    text = (
        "no plan was requested, so the model trains under the fastest plan of its cached profile "
        f"within the variance of {result.within}: {result.seconds * 1e3:.4g} ms per step "
        f"predicted, {result.uniform_seconds * 1e3:.4g} ms in {result.within} ({path})"
    )
    return Plan(result.within, operators=result.operators, notes={CACHED: text})


def with_cached_plan(passes: Sequence[Pass], cached: ApplyCachedPlan | None) -> tuple[Pass, ...]:
    """Return the passes, with `cached` before `Assign` unless it is None."""
    if cached is None:
        return tuple(passes)
    index = next(index for index, step in enumerate(passes) if isinstance(step, Assign))
    return (*passes[:index], cached, *passes[index:])


def note_default_plan(graph: PrecisionGraph, current: SourcePlace, options: Options) -> None:
    """Record the default plan of a graph, and log the first one of a model."""
    plan = graph.context.options.plan
    if not options.is_default or plan is None or current.root is None:
        return
    log = log_of(options)
    if log.unasked.get(current.root) != plan:
        log.unasked[current.root] = plan
        _LOG.warning("%s: %s", type(current.root).__name__, plan.notes[CACHED])


def warn_of_stale_profile(why: str, current: SourcePlace, options: Options) -> None:
    """Warn once that a profile exists but is not used."""
    log, name = log_of(options), type(current.root).__name__
    if current.root is None or not current.root.training or name in log.stale:
        return
    log.stale.add(name)
    text = (
        f"a profile of {name} is in the cache, but {why}. The model trains as without a profile. "
        "Measure it again (qsync_fx.cache_plan(qsync_fx.measure(...))), or disable cached plans: "
        f"the option cached_plan=False, or {_SWITCH}=0"
    )
    warnings.warn(text, PlanWarning, stacklevel=2)
