"""What the backend does to a model, and why, as a value.

Invariant: what it says follows from the graphs that it holds; asking changes nothing.

Which operators that nobody named run in a format that is not faster at their shape: the option "skip_unprofitable" leaves them wider.

Invariant: it asks what that option would ask, of the graph as the model wrote it, and decides and changes nothing.
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
from qsync_fx.plan.plan import Plan
from qsync_fx.plan.validation import check_plan
from qsync_fx.serialization.atomic_files import write_text


@dataclass(frozen=True)
class Explained:
    """One graph of the model: Dynamo gives one, or several when it breaks."""

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
        path: its name in the model, without wrappers; the first one where it has several.
        numel, dtype_bytes: its elements, and the bytes of one.
        trained: whether it gets a gradient.
    """

    path: str
    numel: int
    dtype_bytes: int
    trained: bool


@dataclass(frozen=True)
class Explanation:
    """What the backend does to a model.

    Attributes:
        graphs: the graphs that the model makes, in the order they run.
        breaks: why Dynamo broke the graph, each with its place; empty for a model that is one graph.
        uncovered: the modules with parameters that no graph holds, which run as the model wrote them, each with the reason.
        parameters: those of the model, in the order in which it registers them.
    """

    graphs: tuple[Explained | ReplayedPlan, ...]
    breaks: tuple[str, ...] = ()
    uncovered: tuple[Uncovered, ...] = ()
    parameters: tuple[Registered, ...] = ()
    _plan: Plan | None = field(default=None, repr=False)

    @property
    def lowered_graphs(self) -> list[PrecisionGraph]:
        """The graphs after the last pass, in the order they run."""
        return [part.graph for part in self.graphs]

    @property
    def operators(self) -> list[Operator]:
        """Every operator of the model, in the order they run."""
        return [operator for part in self.graphs for operator in part.operators]

    @property
    def passes(self) -> list[str]:
        """The names of the passes, in the order they ran."""
        return list(self.graphs[0].snapshots.texts) if self.graphs else []

    @property
    def seconds(self) -> dict[str, float]:
        """The time that each pass took, over all graphs."""
        return {
            name: sum(part.timing.seconds.get(name, 0.0) for part in self.graphs)
            for name in self.passes
        }

    @property
    def unknown(self) -> dict[str, int]:
        """The operators that the table does not know, and how often each occurs."""
        result: dict[str, int] = {}
        for part in self.graphs:
            for graph in part.graph.walk():
                for name, count in graph.unknown.items():
                    result[name] = result.get(name, 0) + count
        return result

    @property
    def rewritten(self) -> dict[str, Rewritten]:
        """What each rewrite has done, by its name: how many places it changed, and which it left alone."""
        result: dict[str, Rewritten] = {}
        for part in self.graphs:
            for name, done in part.graph.rewritten.items():
                result[name] = result.get(name, Rewritten()) + done
        return result

    def graph(self, name: str = "lower") -> str:
        """Returns the graph after a pass, as text."""
        self._known(name)
        texts = [part.snapshots.texts[name] for part in self.graphs]
        if len(texts) == 1:
            return texts[0]
        return "\n\n".join(
            f"graph {index} of {len(texts)}\n{text}" for index, text in enumerate(texts, 1)
        )

    def graph_module(self, name: str = "lower", index: int = 0) -> fx.GraphModule:
        """Returns the graph after a pass, as a module; `index` chooses among several graphs."""
        self._known(name)
        return self.graphs[index].snapshots.graphs[name].module

    def diff(self, first: str, second: str) -> str:
        """Returns what changed between the graphs after two passes, as a unified diff."""
        self._known(first)
        self._known(second)
        return "\n".join(part.snapshots.diff(first, second) for part in self.graphs)

    def plan(self) -> Plan:
        """Returns the plan that names every adjustable operator with the precision it was planned in; a starting point for edits."""
        return Plan(
            operators={op.id: _plannable(op) for op in self.operators if op.kind is Kind.ADJUSTABLE}
        )

    def replanned(self, plan: Plan) -> Explanation:
        """Returns what the backend would do with another plan, without another trace: all as `explain` says it, but in milliseconds.

        Graphs after passes (`graph`, `diff`, `graph_module`) are made when they are asked for.

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
        """Returns the table that `print` shows.

        Args:
            kind: shows the operators of this kind alone.
            width: fits the table to so many columns: what is long wraps, and a narrow one does without costs. By default it is as wide as
                what it says, whatever the terminal.

        Raises:
            OptionError: there is no such kind; there are "adjustable", "dependent" and "fixed".
        """
        from qsync_fx.diagnostics.explanation_table import explanation_text

        if kind is not None and kind not in list(Kind):
            raise OptionError(
                f"operators are of no kind {kind!r}", do=nearest(str(kind), [str(k) for k in Kind])
            )
        return explanation_text(self, None if kind is None else Kind(kind), width)

    def save_dot(self, path: str | Path) -> None:
        """Writes the operators and what flows between them as a Graphviz file."""
        from qsync_fx.diagnostics.dot import dot

        write_text(Path(path), dot(self))

    def there(self) -> contextlib.AbstractContextManager[None]:
        """Lets what is asked of devices be answered for the option "target", where it was given."""
        return self.graphs[0].graph.context.there() if self.graphs else contextlib.nullcontext()

    def _known(self, name: str) -> None:
        if name not in self.passes:
            raise OptionError(f"no pass {name!r} has run", do=nearest(name, self.passes))

    def __str__(self) -> str:
        return self.table()


def _plannable(operator: Operator) -> Precision:
    """What a plan should say of an operator: what was planned, unless the operator runs elsewhere on every device."""
    planned, row = operator.note.planned or operator.precision, operator.row
    assert planned is not None and row is not None, f"{operator.id} was not assigned"
    return planned if planned.plain or row.scaled else planned.elsewhere


def line_of(operator: Operator) -> str:
    """Returns where an operator stands in the user's model, short: "model.py:42"."""
    source = source_of(operator.node)
    return f"{Path(source.file).name}:{source.line}" if source else ""


def as_fast_wider(part: Explained | ReplayedPlan) -> Mapping[OpId, str]:
    """Returns the operators of a graph that the option would leave in a wider format, each with the reason; none where it has no say."""
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
        # Of a format without a unit a line of the explanation tells, and who asks for one seldom does for speed.
        native = support(part.context.device, fmt).how != "simulated"
        if native and (why := before.slower(fmt)) is not None:
            result[operator.id] = why
    return result


def _written(part: Explained | ReplayedPlan) -> list[Operator]:
    """Before they are lowered: what is asked of a shape is asked of torch's own operators."""
    graph = part.written if isinstance(part, ReplayedPlan) else part.snapshots.graphs[WRITTEN]
    return graph.operators(Kind.ADJUSTABLE)


def _kept(operator: Operator, before: Operator, plan: Plan) -> bool:
    """Whether an operator runs otherwise than a plan says of all: what the plan, a pass or the model names is obeyed."""
    choice, note = plan.precision_for(operator.id), operator.note
    # A region of autocast gives way to a plan, whatever plan the graph was written under.
    live = None if isinstance(note.autocast, Precision) else before.held
    return (
        choice is None
        or choice.explicit
        or note.pinned
        or note.planned is not choice.precision
        or note.precision is live
    )
