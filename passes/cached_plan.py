"""Activation of the plan of a cached profile, if the user requests no plan.

The pass runs as soon as the operators are known, because they identify the model, and before any
precision is decided. A pipeline without a suitable profile omits it.

Invariant: the graph does not change. Either its context has the cached plan as if the user had
passed it, or the context does not change and the reason is logged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from qsync_fx.graph import PrecisionGraph
from qsync_fx.passes.pass_base import Scope
from qsync_fx.plan_cache import Candidates, sizes_of


@dataclass(frozen=True)
class CachedPlan:
    """Pass that sets the plan of a cached profile in the context of each graph.

    Attributes:
        candidates: plans of cached profiles.
        tell: receives the reason why no candidate was used.
    """

    name: ClassVar[str] = "cached_plan"
    scope: ClassVar[Scope] = Scope.MODEL

    candidates: Candidates
    tell: Callable[[str], None] = field(compare=False)

    def __call__(self, graph: PrecisionGraph) -> None:
        context = graph.context
        complete = context.complete and context.training
        operators = sizes_of(graph.operators())
        plan = (
            self.candidates.plan(operators, complete)
            if context.training
            else self.candidates.before
        )
        if plan is None:
            if context.training and (why := self.candidates.why_not(operators, complete)):
                self.tell(why)
            return
        options = dataclasses.replace(context.options, plan=plan)
        for part in graph.walk():
            part.context = dataclasses.replace(part.context, plan=plan, options=options)
