"""Which plan a model trains under where none is asked for.

Invariant: it is that of a profile of this machine, of this model, its mode and the options, and of a batch of these sizes. A graph of other
sizes goes on under the plan that the model's earlier graphs have got, such as that of the last batch of an epoch.

The plan that a model trains under where none is asked for: found from a profile that was measured here, and kept beside it.

`fingerprint` tells a model, `kept` is the file of such a plan and where it lies, `candidates` says which of them is this model's.

Invariant: nothing is measured, searched or written here. A plan that is not surely of this model, machine and batch is not taken, and why
not is said.

What tells a model from others: the same when it is measured and when a graph of it is compiled.

Invariant: it follows from the model as written and the inputs of a step. Wrappers around modules, precisions, and whether a size is a
number or a symbol that stands for it, are nothing to it.

The file of a plan that was found from a profile, which lies beside it in the cache.

Invariant: `caches()/profiles/STRUCTURE` holds what was measured of models of one structure: for each machine, batch and mode a profile, and
a file that ends with ".plan.json" with the plan. Reading never fails: a file that is none is none.
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
    """
    Attributes:
        structure: of the model's class, and of the names of its parameters and buffers.
        tensors: of their types and sizes.
        options: those of the backend that are not as by default, in words.
        evaluated: the paths of the modules that are in the mode to evaluate.
        operators: the sizes of what each operator gives out, by its id.
    """

    structure: str
    tensors: str
    options: str
    evaluated: list[str]
    operators: dict[str, str]


def fingerprint(root: nn.Module, operators: Iterable[Operator], options: Options) -> Fingerprint:
    """Returns that of a model of which these operators are known, before precisions are decided."""
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
    """Returns the sizes of what operators give out, by their ids."""
    return {str(operator.id): _sizes(operator.graph.value(operator.node)) for operator in operators}


def _sizes(value: Any) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return " ".join("x".join(map(_number, tensor.shape)) or "1" for tensor in tensors)


def _number(size: int | torch.SymInt) -> str:
    """Returns a size, or what a symbol stands for in the batch that is compiled for."""
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
    """
    Attributes:
        machine, model: where its profile was measured, and of what.
        within: the format whose variance it stays within.
        seconds: of a step, as foreseen.
        uniform_seconds: of a step with all operators in that format.
        operators: formats by the ids of operators.
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
    remedy="remove it, and save the profile again: qsync_fx.cache_plan(profile)",
    name="qsync-cached-plan",
)


def folder(structure: str) -> Path:
    """Returns where profiles of models of a structure are kept; it need not exist."""
    return caches() / "profiles" / structure


def kept(structure: str) -> list[tuple[Path, CachedPlan]]:
    """Returns the plans that are there for models of a structure, the latest first."""
    try:
        files = [(path, path.stat()) for path in folder(structure).glob(f"*{SUFFIX}")]
    except OSError:  # another process has just removed one, or the folder is not ours to read
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
"""The environment variable that switches plans of cached profiles off where it is 0."""


@dataclass(frozen=True)
class Candidates:
    """
    Attributes:
        model: at hand, without its operators.
        kept: the plans that are there for models like it, with their files.
        before: the plan that earlier graphs of the model have got; None where there are none.
    """

    model: Fingerprint
    kept: tuple[tuple[Path, CachedPlan], ...]
    before: Plan | None

    def plan(self, operators: Mapping[str, str], complete: bool) -> Plan | None:
        """Returns the plan for a graph; None where there is none for it.

        Args:
            operators: sizes of the graph's operators, by id.
            complete: whether it is the whole model.
        """
        for path, result in self.kept:
            if next(self._differing(result, operators, complete), None) is None:
                return _plan(path, result)
        return self.before

    def why_not(self, operators: Mapping[str, str], complete: bool) -> str:
        """Returns what the latest of them was measured of that is not at hand, in words; "" where there are none."""
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
            yield "it was measured of a model with tensors of other sizes or types"
        if existing.options != current.options:
            yield f"it was measured with other options: {existing.options or 'none'}, here {current.options or 'none'}"
        if existing.evaluated != current.evaluated:
            yield "it was measured with other modules in the mode to evaluate"
        strange = operators.keys() - existing.operators.keys() or (
            complete and existing.operators.keys() - operators.keys()
        )
        if strange:
            yield f"it was measured of a model with other operators: {min(strange)}"
        for name, sizes in operators.items():
            if existing.operators.get(name, sizes) != sizes:
                yield f"it was measured with a batch of other sizes: {name} gave out {existing.operators[name]}, here {sizes}"
                break


def candidates_for(root: nn.Module, options: Options, before: Plan | None) -> Candidates | None:
    """Returns the plans that a model may get; None where it asks for one, where they are switched off, and where there are none."""
    if not environment.switch(SWITCH) or not options.is_default or not options.cached_plan:
        return None
    model = fingerprint(root, (), options)
    result = Candidates(model, tuple(kept(model.structure)), before)
    return result if result.kept or before is not None else None


def _plan(path: Path, result: CachedPlan) -> Plan:
    text = (
        f"no plan was asked for, so it trains under the fastest one within the variance of {result.within}, found from a profile of it: "
        f"{result.seconds * 1e3:.4g} ms a step foreseen, {result.uniform_seconds * 1e3:.4g} ms in {result.within} ({path})"
    )
    return Plan(result.within, operators=result.operators, notes={CACHED: text})
