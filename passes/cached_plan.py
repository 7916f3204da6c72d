"""Cached plans: the default plan of a model that is compiled without plan or precision.

`caches()/profiles/STRUCTURE` contains the profiles of models with one structure, by machine, batch
and mode, each with a file *.plan.json of the plan that `qsync_fx.cache_plan` found from it.

Invariant: a cached plan is used only if machine, model, mode, options and batch sizes match;
otherwise the reason is reported. Graphs of other sizes, such as an epoch's last batch, use the plan
of the model's earlier graphs. No code here measures or searches; unreadable files are ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from qsync_fx import environment
from qsync_fx.coverage.compilation_log import log_of
from qsync_fx.devices.machine import Machine, here_for
from qsync_fx.errors import PlanError, PlanWarning, ProfileError
from qsync_fx.graph import PrecisionGraph
from qsync_fx.graph.fx_utils import describe
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
    tensors = dict(_tensors(root))
    kind = type(root)
    return Fingerprint(
        _digest([f"{kind.__module__}.{kind.__qualname__}", *tensors]),
        _digest(describe(tensor) for tensor in tensors.values()),
        options.non_default_options,
        [path for path, module in paths(root) if not module.training],
        sizes_of(operators),
    )


def sizes_of(operators: Iterable[Operator]) -> dict[str, str]:
    """Return the output shapes of operators, by their ids."""
    return {str(operator.id): _sizes(operator.graph.value(operator.node)) for operator in operators}


def _sizes(value: Any) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return " ".join("x".join(map(_number, tensor.shape)) or "1" for tensor in tensors)


def _number(size: int | torch.SymInt) -> str:
    """Return a size, or the hint of a symbolic size: its value in the compiled batch."""
    if isinstance(size, torch.SymInt):
        return str(size.node.hint) if size.node.has_hint() else "?"
    return str(size)


def _tensors(root: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for path, module in paths(root):
        live: Mapping[str, torch.Tensor | None] = {**module._parameters, **module._buffers}
        yield from (
            (joined(path, name), tensor) for name, tensor in live.items() if tensor is not None
        )


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


SUFFIX: Final = ".plan.json"


@dataclass(frozen=True)
class CachedPlan:
    """Plan that was found from a profile.

    Attributes:
        machine, model: machine and model of the profile.
        within: format whose uniform plan has a variance that this plan does not exceed.
        seconds: predicted seconds of a step.
        uniform_seconds: seconds of a step with all operators in the format `within`.
        operators: formats by operator id.
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


def _cached(structure: str) -> list[tuple[Path, CachedPlan]]:
    """Return the cached plans for models with a structure, the latest first."""
    try:
        files = [(path, path.stat()) for path in folder(structure).glob(f"*{SUFFIX}")]
    except OSError:  # another process has removed a file, or the folder is not readable
        return []
    latest = sorted(files, key=lambda file: -file[1].st_mtime_ns)
    read = ((path, _read(path, state.st_mtime_ns, state.st_size)) for path, state in latest)
    return [(path, item) for path, item in read if item is not None]


@functools.lru_cache(maxsize=64)
def _read(path: Path, _written: int, _bytes: int) -> CachedPlan | None:
    try:
        return CACHED_PLAN_FILE.load(path)
    except PlanError:
        return None


@dataclass(frozen=True)
class Candidates:
    """Cached plans that a model may use.

    Attributes:
        model: fingerprint of the model, without operators.
        kept: plans of models with the same structure, with their files.
        before: plan of earlier graphs of the model; None without one.
    """

    model: Fingerprint
    kept: tuple[tuple[Path, CachedPlan], ...]
    before: Plan | None

    def plan(self, operators: Mapping[str, str], complete: bool) -> Plan | None:
        """Return the plan for a graph; None if no plan matches.

        Args:
            operators: output shapes of the graph's operators, by id.
            complete: whether the graph is the full model.
        """
        for path, result in self.kept:
            if next(self._differing(result, operators, complete), None) is None:
                return _plan(path, result)
        return self.before

    def why_not(self, operators: Mapping[str, str], complete: bool) -> str:
        """Return the first mismatch of the latest cached plan, as text; "" without cached plans."""
        for _, item in self.kept:
            for mismatch in self._differing(item, operators, complete):
                return mismatch
        return ""

    def _differing(
        self, result: CachedPlan, operators: Mapping[str, str], complete: bool
    ) -> Iterator[str]:
        try:
            result.machine.check(here_for(result.machine))
        except ProfileError as error:
            yield error.what
        existing, current = result.model, self.model
        if existing.tensors != current.tensors:
            yield "its model has tensors of other sizes or dtypes"
        if existing.options != current.options:
            yield (
                f"it was measured with other options: {existing.options or 'none'}, "
                f"here {current.options or 'none'}"
            )
        if existing.evaluated != current.evaluated:
            yield "it was measured with other modules in evaluation mode"
        strange = operators.keys() - existing.operators.keys() or (
            complete and existing.operators.keys() - operators.keys()
        )
        if strange:
            yield f"its model has other operators: {min(strange)}"
        for name, sizes in operators.items():
            if existing.operators.get(name, sizes) != sizes:
                yield (
                    f"it was measured with another batch size: the output of {name} is "
                    f"{existing.operators[name]}, here {sizes}"
                )
                break


_SWITCH: Final = "QSYNC_CACHED_PLAN"
"""Environment variable that disables cached plans if it is 0."""


def candidates(current: SourcePlace, options: Options, device: torch.device) -> Candidates | None:
    """Return the cached plans that a graph may use.

    Returns:
        None if the user gave a plan or precision, also by autocast, if cached plans are disabled,
        or if there are none.
    """
    root = current.root
    if root is None or not options.is_default or not options.cached_plan:
        return None
    if not environment.switch(_SWITCH):
        return None
    before, model = log_of(options).unasked.get(root), fingerprint(root, (), options)
    result = Candidates(model, tuple(_cached(model.structure)), before)
    if not result.kept and before is None:
        return None
    # Unsupported devices, for which torch may lack autocast, are reported elsewhere.
    return None if torch.is_autocast_enabled(device.type) else result


def _plan(path: Path, result: CachedPlan) -> Plan:
    text = (
        "no plan was requested, so the model trains under the fastest plan of its cached profile "
        f"within the variance of {result.within}: {result.seconds * 1e3:.4g} ms per step "
        f"predicted, {result.uniform_seconds * 1e3:.4g} ms in {result.within} ({path})"
    )
    return Plan(result.within, operators=result.operators, notes={CACHED: text})


@dataclass(frozen=True)
class ApplyCachedPlan:
    """Pass that sets the plan of a cached profile in the context of each graph.

    It runs as soon as the operators are known, because they identify the model, and before any
    precision is decided. The graph itself does not change.

    Attributes:
        candidates: plans of cached profiles.
        tell: receives the reason why no candidate was used.
    """

    name: ClassVar[str] = "cached_plan"
    scope: ClassVar[Scope] = Scope.MODEL

    candidates: Candidates
    tell: Callable[[str], None] = field(compare=False)

    def __call__(self, graph: PrecisionGraph) -> None:
        context, plan = graph.context, self.candidates.before
        if context.training:
            operators = sizes_of(graph.operators())
            plan = self.candidates.plan(operators, context.complete)
            if plan is None and (why := self.candidates.why_not(operators, context.complete)):
                self.tell(why)
        if plan is None:
            return
        options = dataclasses.replace(context.options, plan=plan)
        for part in graph.walk():
            part.context = dataclasses.replace(part.context, plan=plan, options=options)


def with_cached_plan(
    passes: Sequence[Pass], result: Candidates | None, tell: Callable[[str], None]
) -> tuple[Pass, ...]:
    """Return the passes, with `ApplyCachedPlan` before `Assign` if there are candidates."""
    if result is None:
        return tuple(passes)
    index = next(index for index, step in enumerate(passes) if isinstance(step, Assign))
    return (*passes[:index], ApplyCachedPlan(result, tell), *passes[index:])


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
