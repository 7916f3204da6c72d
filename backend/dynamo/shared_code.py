"""Code that Dynamo uses for several modules of a model, and that a plan treats differently.

A function that has its module in hand is compiled for that module alone. What follows a graph break may have let go of it, and a helper
never had it: then Dynamo uses the code of one layer for those alike. Invariant: where a plan would have them differ, that is said.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator

from qsync_fx.coverage.log import below, shape_of
from qsync_fx.errors import PlanError, PlanWarning
from qsync_fx.graph import Operator, PrecisionGraph
from qsync_fx.module_tree import joined, paths
from qsync_fx.ops import Kind
from qsync_fx.options import Options
from qsync_fx.passes.tracing.frames import Place
from qsync_fx.plan.opid import OpId


def tell_of_shared_code(graph: PrecisionGraph, here: Place, options: Options) -> None:
    """Warns where a graph decides for operators of other modules too, which the plan decides on otherwise.

    Raises:
        PlanError: that is so, and the option "strict" is set.
    """
    if options.plan is None or here.code is None or not here.nested or here.entered:
        return
    found = [
        (op, other)
        for op in graph.operators(Kind.ADJUSTABLE)
        for other in _alike(op, here)
        if _differs(graph, op, other)
    ]
    if not found:
        return
    operator, other = found[0]
    choice = graph.context.plan.precision_for(other)
    error = PlanError(
        f"code that Dynamo uses for {len(list(_alike(operator, here))) + 1} modules alike runs {operator.id} in "
        f"{operator.note.planned}, and so {other} too, which the plan wants in {choice.precision if choice else 'no precision'}",
        where=f"{here.code.co_qualname}, {here.code.co_filename}:{here.code.co_firstlineno}; {operator.where}",
        do="remove the graph break before it (TORCH_LOGS=graph_breaks shows it), use the module (self) after the break too, so that each "
        "has code of its own, or plan one precision for all",
    )
    if options.strict:
        raise error
    warnings.warn_explicit(str(error), PlanWarning, here.code.co_filename, here.code.co_firstlineno)


def _alike(operator: Operator, here: Place) -> Iterator[OpId]:
    """Yields the ids that an operator has in other modules that may run its code."""
    assert here.root is not None and here.module is not None
    rest, shape = below(operator.id.module, here.path), shape_of(here.module)
    if rest is None:
        return
    for path, module in paths(here.root):
        if module is not here.module and type(module) is type(here.module) and shape_of(module) == shape:
            yield dataclasses.replace(operator.id, module=joined(joined(here.within, path), rest))


def _differs(graph: PrecisionGraph, operator: Operator, other: OpId) -> bool:
    own, wanted = (graph.context.plan.precision_for(op_id) for op_id in (operator.id, other))
    return (own and own.precision) != (wanted and wanted.precision)
