"""Replay of the passes on an explained graph under another plan, without another trace.

Replay starts from the graph as the model wrote it, before precisions are decided. A decision needs
milliseconds, as it only replaces the metadata of the same nodes. The graphs after later passes are
computed lazily.

Invariant: states, reasons, costs and graphs equal a new explanation with that plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

from torch import fx

from qsync_fx.graph import Context, Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.graph import copied
from qsync_fx.graph.node_metadata import OperatorInfo
from qsync_fx.graph.operator_costs import Costing
from qsync_fx.passes.annotate_cost import costed
from qsync_fx.passes.pass_base import GraphPass, Pass
from qsync_fx.passes.pass_manager import pipeline, run
from qsync_fx.passes.printer import Snapshots, Timing
from qsync_fx.plan import Plan

WRITTEN, DECIDED = "classify", "insert_casts"
"""Pass after which a graph is as written, and the pass before which all states are decided."""


class ReplayedPlan:
    """One graph under another plan.

    Attributes:
        operators: operators with their metadata under this plan.
        written: the graph as the model wrote it.
        timing: seconds of the passes that have run.
        costing: costs of operators in each of their states.
    """

    def __init__(self, explained: Snapshots, costing: Costing, plan: Plan) -> None:
        from qsync_fx.backend import operators

        self.costing = costing
        self.written = explained.graphs[WRITTEN]
        self._plan = plan
        self._options = dataclasses.replace(self.written.context.options, plan=plan, precision=None)
        self.context = self._under(self.written.context)
        self.timing, self._kept = Timing(), Snapshots()
        passes = pipeline(self._options, operators.lowerings(), self.context.training)
        names = [step.name for step in passes]
        start, end = names.index(WRITTEN) + 1, names.index(DECIDED)
        for name in names[:start]:
            self._kept.texts[name], self._kept.graphs[name] = (
                explained.texts[name],
                explained.graphs[name],
            )
        self._passes, self._before = passes[start:], tuple(names[:start])
        later = any(isinstance(step, GraphPass) for step in passes[end:])
        self.operators = (
            self.graph.operators() if later else self._decided(self._passes[: end - start])
        )

    def _under(self, context: Context) -> Context:
        return dataclasses.replace(context, plan=self._plan, options=self._options)

    def _decided(self, passes: Sequence[Pass]) -> list[Operator]:
        if any(isinstance(step, GraphPass) for step in passes):
            # A user's pass may change more than metadata.
            return self._costed(run(self._copy(), passes, (self.timing,), after=self._before))
        with _borrowed(self.written, self._under) as graph:
            # Without rewrites, the verifier's rules cannot be broken.
            return self._costed(
                run(graph, passes, (self.timing,), verified=False, after=self._before)
            )

    def _costed(self, graph: PrecisionGraph) -> list[Operator]:
        result = costed(graph, self.costing)
        return [
            Operator(op.graph, op.node, dataclasses.replace(op.note, cost=cost))
            for op, cost in result
        ]

    def _copy(self) -> PrecisionGraph:
        graph = copied(self.written)
        graph.written = self.written
        for part in graph.walk():
            part.context = self._under(part.context)
        return graph

    @functools.cached_property
    def graph(self) -> PrecisionGraph:
        """The graph after the last pass."""
        return run(self._copy(), self._passes, (self.timing, self._kept), after=self._before)

    @property
    def snapshots(self) -> Snapshots:
        """The graph after every pass, as text and as a copy."""
        assert self.graph is not None
        return self._kept


@contextlib.contextmanager
def _borrowed(
    graph: PrecisionGraph, under: Callable[[Context], Context]
) -> Iterator[PrecisionGraph]:
    """Lend a graph to passes that only write metadata, under other contexts; restore it on exit."""
    contexts = [(part, part.context) for part in graph.walk()]
    notes: list[tuple[fx.Node, OperatorInfo]] = [(op.node, op.note) for op in graph.operators()]
    for part, context in contexts:
        part.context = under(context)
    try:
        yield graph
    finally:
        for part, context in contexts:
            part.context = context
        for node, note in notes:
            node_metadata.NOTE[node] = note
