"""Cached plans: the plan of a model that is compiled without plan or precision.

`caches()/profiles/STRUCTURE` contains the profiles of models with one structure, by machine, batch
and mode, each with a file *.plan.json of the plan that was found from it. `fingerprint` identifies
a model independently of wrappers, precisions and symbolic sizes. `candidates_for` returns the
cached plans that a model may use.

Invariant: a cached plan is used only if machine, model, mode, options and batch sizes match;
otherwise the reason is reported. Graphs of other sizes, such as an epoch's last batch, use the plan
of the model's earlier graphs. No code here measures, searches or writes, and unreadable files are
ignored.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from qsync_fx import environment
from qsync_fx.devices.machine import Machine, here_for
from qsync_fx.errors import PlanError, ProfileError
from qsync_fx.graph.fx_utils import describe
from qsync_fx.graph.graph import Operator
from qsync_fx.module_paths import joined, paths
from qsync_fx.options import Options
from qsync_fx.plan.plan import CACHED, Plan
from qsync_fx.serialization.atomic_files import caches
from qsync_fx.serialization.schema import Schema


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


KEPT: Final = Schema(
    CachedPlan,
    noun="plan of a cached profile",
    error=PlanError,
    remedy="remove the file, and cache the plan again with qsync_fx.cache_plan(profile)",
    name="qsync-cached-plan",
)


def folder(structure: str) -> Path:
    """Return the folder of the profiles of models with a structure; it may not exist."""
    return caches() / "profiles" / structure


def kept(structure: str) -> list[tuple[Path, CachedPlan]]:
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
        return KEPT.load(path)
    except PlanError:
        return None


SWITCH: Final = "QSYNC_CACHED_PLAN"
"""Environment variable that disables cached plans if it is 0."""


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
        return next(
            (
                subject
                for _, item in self.kept
                for subject in self._differing(item, operators, complete)
            ),
            "",
        )

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


def candidates_for(root: nn.Module, options: Options, before: Plan | None) -> Candidates | None:
    """Return the cached plans for a model.

    Returns:
        None if the user gave a plan or precision, cached plans are disabled, or there are none.
    """
    if not environment.switch(SWITCH) or not options.is_default or not options.cached_plan:
        return None
    model = fingerprint(root, (), options)
    result = Candidates(model, tuple(kept(model.structure)), before)
    return result if result.kept or before is not None else None


def _plan(path: Path, result: CachedPlan) -> Plan:
    text = (
        "no plan was requested, so the model trains under the fastest plan of its cached profile "
        f"within the variance of {result.within}: {result.seconds * 1e3:.4g} ms per step "
        f"predicted, {result.uniform_seconds * 1e3:.4g} ms in {result.within} ({path})"
    )
    return Plan(result.within, operators=result.operators, notes={CACHED: text})
