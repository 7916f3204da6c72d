"""Explanation of the backend's decisions for a model, as a value.

Invariant: all queries are computed from the graphs in the explanation, and change nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from qsync_fx.coverage.findings import Uncovered, findings
from qsync_fx.devices.format_support import support
from qsync_fx.diagnostics.replay_passes import WRITTEN, ReplayedPlan
from qsync_fx.errors import OptionError, nearest
from qsync_fx.formats import Precision
from qsync_fx.graph.fx_utils import source_of
from qsync_fx.graph.graph import Context, Operator, PrecisionGraph
from qsync_fx.graph.node_metadata import Rewritten
from qsync_fx.graph.operator_costs import Costing
from qsync_fx.ops.spec import Kind
from qsync_fx.passes.printer import Snapshots, Timing
from qsync_fx.plan.operator_id import OpId
from qsync_fx.plan.plan import Plan, check_plan
from qsync_fx.serialization.atomic_files import write_text


@dataclass(frozen=True)
class Explained:
    """One graph of the model; graph breaks make several."""

    graph: PrecisionGraph
    snapshots: Snapshots
    timing: Timing

    @property
    def operators(self) -> list[Operator]:
        return self.graph.operators()

    @property
    def context(self) -> Context:
        return self.graph.context

    @property
    def costing(self) -> Costing:
        return self.graph.costing


@dataclass(frozen=True)
class Registered:
    """A parameter as the model registers it.

    Attributes:
        path: its first name in the model, without wrappers.
        numel: number of elements.
        dtype_bytes: bytes per element.
        trained: whether it requires a gradient.
    """

    path: str
    numel: int
    dtype_bytes: int
    trained: bool


@dataclass(frozen=True)
class Explanation:
    """Decisions of the backend for a model.

    Attributes:
        graphs: the model's graphs in execution order.
        breaks: reasons and positions of Dynamo's graph breaks.
        uncovered: modules with parameters that are in no graph and run as written, with reasons.
        parameters: the model's parameters in registration order.
    """

    graphs: tuple[Explained | ReplayedPlan, ...]
    breaks: tuple[str, ...] = ()
    uncovered: tuple[Uncovered, ...] = ()
    parameters: tuple[Registered, ...] = ()
    _plan: Plan | None = field(default=None, repr=False)

    @property
    def lowered_graphs(self) -> list[PrecisionGraph]:
        """Graphs after the last pass, in execution order."""
        return [part.graph for part in self.graphs]

    @property
    def operators(self) -> list[Operator]:
        """All operators of the model, in execution order."""
        return [operator for part in self.graphs for operator in part.operators]

    @property
    def passes(self) -> list[str]:
        """Names of the passes in execution order."""
        return list(self.graphs[0].snapshots.texts) if self.graphs else []

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each pass, over all graphs."""
        return {
            name: sum(part.timing.seconds.get(name, 0.0) for part in self.graphs)
            for name in self.passes
        }

    @property
    def unknown(self) -> dict[str, int]:
        """Operators missing in the operator table, with the number of occurrences."""
        result: dict[str, int] = {}
        for part in self.graphs:
            for graph in part.graph.walk():
                for name, count in graph.unknown.items():
                    result[name] = result.get(name, 0) + count
        return result

    @property
    def rewritten(self) -> dict[str, Rewritten]:
        """Result of each rewrite by name: the places that it changed, and those that it skipped."""
        result: dict[str, Rewritten] = {}
        for part in self.graphs:
            for name, done in part.graph.rewritten.items():
                result[name] = result.get(name, Rewritten()) + done
        return result

    def graph(self, name: str = "lower") -> str:
        """Return the graph after a pass, as text."""
        self._known(name)
        texts = [part.snapshots.texts[name] for part in self.graphs]
        if len(texts) == 1:
            return texts[0]
        return "\n\n".join(
            f"graph {index} of {len(texts)}\n{text}" for index, text in enumerate(texts, 1)
        )

    def graph_module(self, name: str = "lower", index: int = 0) -> fx.GraphModule:
        """Return the graph after a pass, as a module; `index` selects one of several graphs."""
        self._known(name)
        return self.graphs[index].snapshots.graphs[name].module

    def diff(self, first: str, second: str) -> str:
        """Return the difference between the graphs after two passes, as a unified diff."""
        self._known(first)
        self._known(second)
        return "\n".join(part.snapshots.diff(first, second) for part in self.graphs)

    def plan(self) -> Plan:
        """Return a plan with every adjustable operator's planned precision, as a base for edits."""
        return Plan(
            operators={op.id: _plannable(op) for op in self.operators if op.kind is Kind.ADJUSTABLE}
        )

    def replanned(self, plan: Plan) -> Explanation:
        """Return the explanation under another plan, in milliseconds, without another trace.

        Graphs after passes (`graph`, `diff`, `graph_module`) are computed lazily.

        Raises:
            PlanError: the plan does not fit the model.
        """
        with self.there():
            graphs = tuple(ReplayedPlan(part.snapshots, part.costing, plan) for part in self.graphs)
            adjustable = [
                op.id for part in graphs for op in part.operators if op.kind is Kind.ADJUSTABLE
            ]
        result = findings(plan, adjustable, self.uncovered)
        check_plan(plan, adjustable, complete=True, as_written=result.as_written)
        return Explanation(graphs, self.breaks, result.uncovered, self.parameters, plan)

    def table(self, kind: Kind | str | None = None, width: int | None = None) -> str:
        """Return the table that `print` shows.

        Args:
            kind: restrict the table to operators of this kind.
            width: columns to fit the table to, by wrapping and, if narrow, by omitting columns. By
                default the width depends only on the content, not on the terminal.

        Raises:
            OptionError: the kind is not "adjustable", "dependent" or "fixed".
        """
        from qsync_fx.diagnostics.explanation_table import explanation_text

        if kind is not None and kind not in list(Kind):
            raise OptionError(
                f"operators are of no kind {kind!r}", do=nearest(str(kind), [str(k) for k in Kind])
            )
        return explanation_text(self, None if kind is None else Kind(kind), width)

    def save_dot(self, path: str | Path) -> None:
        """Write the operators and the tensors between them as a Graphviz file."""
        from qsync_fx.diagnostics.dot import dot

        write_text(Path(path), dot(self))

    def there(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which device queries refer to the option "target", if set."""
        return self.graphs[0].graph.context.there() if self.graphs else contextlib.nullcontext()

    def _known(self, name: str) -> None:
        if name not in self.passes:
            raise OptionError(f"no pass {name!r} has run", do=nearest(name, self.passes))

    def __str__(self) -> str:
        return self.table()


def _plannable(operator: Operator) -> Precision:
    """Return an operator's planned precision, or its substitute without a scaled implementation."""
    planned, row = operator.note.planned or operator.precision, operator.row
    assert planned is not None and row is not None, f"{operator.id} was not assigned"
    return planned if planned.plain or row.scaled else planned.elsewhere


def line_of(operator: Operator) -> str:
    """Return the position of an operator in the user's code, such as "model.py:42"."""
    source = source_of(operator.node)
    return f"{Path(source.file).name}:{source.line}" if source else ""


def as_fast_wider(part: Explained | ReplayedPlan) -> Mapping[OpId, str]:
    """Return the operators that run in a format that is not faster at their shape, with reasons.

    The option "skip_unprofitable" would leave them in a wider format. Operators whose format was
    chosen explicitly, and plans for which the option has no effect, are excluded.
    """
    options = part.context.options
    if options.is_default or options.skip_unprofitable or options.emulate_unsupported:
        return {}
    written = {operator.id: operator for operator in _written(part)}
    result = {}
    for operator in part.operators:
        fmt, before = operator.precision, written.get(operator.id)
        if (
            operator.kind is not Kind.ADJUSTABLE
            or fmt is None
            or before is None
            or _kept(operator, before, part.context.plan)
        ):
            continue
        # Simulated formats have a line of their own, and are rarely chosen for speed.
        native = support(part.context.device, fmt).how != "simulated"
        if native and (why := before.slower(fmt)) is not None:
            result[operator.id] = why
    return result


def _written(part: Explained | ReplayedPlan) -> list[Operator]:
    """Return the operators before lowering, as `slower` applies to torch's own operators."""
    graph = part.written if isinstance(part, ReplayedPlan) else part.snapshots.graphs[WRITTEN]
    return graph.operators(Kind.ADJUSTABLE)


def _kept(operator: Operator, before: Operator, plan: Plan) -> bool:
    """Return whether the format is not the plan's default: an explicit choice always applies."""
    choice, note = plan.precision_for(operator.id), operator.note
    # A plan overrides an autocast region, even one from the plan at capture.
    live = None if isinstance(note.autocast, Precision) else before.held
    return (
        choice is None
        or choice.explicit
        or note.pinned
        or note.planned is not choice.precision
        or note.precision is live
    )
