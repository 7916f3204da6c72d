"""Puts the plan in force that a cached profile has for a model, where the user asks for none.

Here it is known which operators there are, by which a model is told from others, and nothing is decided yet. In a pipeline without such a
profile the pass is not there.

Invariant: the graph stays as it is. Either it is from here on as if the user had asked for the plan, or nothing has changed and the reason
was told.
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
    """
    Attributes:
        candidates: plans of profiles.
        tell: is told why none of them is taken.
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
