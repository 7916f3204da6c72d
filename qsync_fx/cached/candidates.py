"""Which plan a model trains under where none is asked for.

Invariant: it is that of a profile of this machine, of this model, its mode and the options, and of a batch of these sizes. A graph of other
sizes goes on under the plan that the model's earlier graphs have got, such as that of the last batch of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch import nn

from qsync_fx import environment
from qsync_fx.cached.fingerprint import Fingerprint, fingerprint
from qsync_fx.cached.kept import KeptPlan, kept
from qsync_fx.devices.machine import here_for
from qsync_fx.errors import ProfileError
from qsync_fx.options import Options
from qsync_fx.plan import Plan
from qsync_fx.plan.plan import CACHED

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
    kept: tuple[tuple[Path, KeptPlan], ...]
    before: Plan | None

    def plan(self, operators: Mapping[str, str], complete: bool) -> Plan | None:
        """Returns the plan for a graph; None where there is none for it.

        Args:
            operators: sizes of the graph's operators, by id.
            complete: whether it is the whole model.
        """
        for path, found in self.kept:
            if next(self._differing(found, operators, complete), None) is None:
                return _plan(path, found)
        return self.before

    def why_not(self, operators: Mapping[str, str], complete: bool) -> str:
        """Returns what the latest of them was measured of that is not at hand, in words; "" where there are none."""
        return next((what for _, found in self.kept for what in self._differing(found, operators, complete)), "")

    def _differing(self, found: KeptPlan, operators: Mapping[str, str], complete: bool) -> Iterator[str]:
        try:
            found.machine.check(here_for(found.machine))
        except ProfileError as error:
            yield error.what
        there, here = found.model, self.model
        if there.tensors != here.tensors:
            yield "it was measured of a model with tensors of other sizes or types"
        if there.options != here.options:
            yield f"it was measured with other options: {there.options or 'none'}, here {here.options or 'none'}"
        if there.evaluated != here.evaluated:
            yield "it was measured with other modules in the mode to evaluate"
        strange = operators.keys() - there.operators.keys() or (complete and there.operators.keys() - operators.keys())
        if strange:
            yield f"it was measured of a model with other operators: {min(strange)}"
        for name, sizes in operators.items():
            if there.operators.get(name, sizes) != sizes:
                yield f"it was measured with a batch of other sizes: {name} gave out {there.operators[name]}, here {sizes}"
                break


def candidates_for(root: nn.Module, options: Options, before: Plan | None) -> Candidates | None:
    """Returns the plans that a model may get; None where it asks for one, where they are switched off, and where there are none."""
    if not environment.switch(SWITCH) or not options.automatic or not options.cached_plan:
        return None
    model = fingerprint(root, (), options)
    found = Candidates(model, tuple(kept(model.structure)), before)
    return found if found.kept or before is not None else None


def _plan(path: Path, found: KeptPlan) -> Plan:
    said = (
        f"no plan was asked for, so it trains under the fastest one within the variance of {found.within}, found from a profile of it: "
        f"{found.seconds * 1e3:.4g} ms a step foreseen, {found.uniform_seconds * 1e3:.4g} ms in {found.within} ({path})"
    )
    return Plan(found.within, operators=found.operators, notes={CACHED: said})
