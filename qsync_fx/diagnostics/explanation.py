"""Explanation of the backend's decisions for a model, as a value, and under other plans.

A `ReplayedPlan` runs the passes on an explained graph again, without another trace. A decision
needs milliseconds, as it only replaces the metadata of the same nodes. The text has one line per
operator or module in no graph, and is as wide as its content unless a width is given.

Invariant: queries are computed from the graphs in the explanation, which they do not change. A
replay equals a new explanation with its plan: states, reasons, costs and graphs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import fx

from qsync_fx.coverage.findings import Uncovered, findings
from qsync_fx.devices.format_support import TARGETS, support
from qsync_fx.diagnostics.graph_export import dot, model_explorer
from qsync_fx.errors import OptionError, nearest
from qsync_fx.formats import Precision
from qsync_fx.formatting import many, short
from qsync_fx.graph import Context, Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.graph import copied
from qsync_fx.graph.node_metadata import OperatorInfo, Rewritten
from qsync_fx.graph.operator_costs import Costing
from qsync_fx.html_view import HtmlView
from qsync_fx.ops.spec import Kind
from qsync_fx.passes.annotate_cost import costed
from qsync_fx.passes.pass_base import GraphPass, Pass
from qsync_fx.passes.pass_manager import pipeline, run
from qsync_fx.passes.printer import Snapshots, Timing
from qsync_fx.plan.cluster_plan import CHOSEN_BY, DevicePlan, device_plans
from qsync_fx.plan.operator_id import OpId
from qsync_fx.plan.plan import DEVICE_CLASS, Plan, check_plan
from qsync_fx.serialization.atomic_files import write_text
from qsync_fx.text_tables import plain, table_of

_WRITTEN, _DECIDED = "classify", "insert_casts"
"""Pass after which a graph is as written, and the pass before which all states are decided."""


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

    @property
    def written(self) -> PrecisionGraph:
        """The graph as the model wrote it."""
        return self.snapshots.graphs[_WRITTEN]


class ReplayedPlan:
    """One graph under another plan; the graphs after later passes are computed lazily.

    Attributes:
        operators: operators with their metadata under this plan.
        written: the graph as the model wrote it.
    """

    def __init__(self, explained: Snapshots, costing: Costing, plan: Plan) -> None:
        from qsync_fx.backend import operators

        self.costing = costing
        self.written = explained.graphs[_WRITTEN]
        self._plan = plan
        self._options = dataclasses.replace(self.written.context.options, plan=plan, precision=None)
        self.context = self._under(self.written.context)
        self.timing, self._snapshots = Timing(), Snapshots()
        passes = pipeline(self._options, operators.lowerings(), self.context.training)
        names = [step.name for step in passes]
        start, end = names.index(_WRITTEN) + 1, names.index(_DECIDED)
        for name in names[:start]:
            self._snapshots.texts[name] = explained.texts[name]
            self._snapshots.graphs[name] = explained.graphs[name]
        self._passes, self._before = passes[start:], tuple(names[:start])
        # A user's pass may change more than metadata.
        if any(isinstance(step, GraphPass) for step in passes[end:]):
            self.operators = self.graph.operators()
        elif any(isinstance(step, GraphPass) for step in passes[start:end]):
            self.operators = self._decided(self._copy(), passes[start:end], verified=True)
        else:
            with _borrowed(self.written, self._under) as graph:
                # Without rewrites, the verifier's rules cannot be broken.
                self.operators = self._decided(graph, passes[start:end], verified=False)

    def _under(self, context: Context) -> Context:
        return dataclasses.replace(context, plan=self._plan, options=self._options)

    def _decided(
        self, graph: PrecisionGraph, passes: Sequence[Pass], verified: bool
    ) -> list[Operator]:
        result = run(graph, passes, (self.timing,), verified=verified, after=self._before)
        return [
            Operator(op.graph, op.node, dataclasses.replace(op.note, cost=cost))
            for op, cost in costed(result, self.costing)
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
        return run(self._copy(), self._passes, (self.timing, self._snapshots), after=self._before)

    @property
    def snapshots(self) -> Snapshots:
        """The graph after every pass, as text and as a copy."""
        assert self.graph is not None
        return self._snapshots


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


@dataclass(frozen=True)
class Registered:
    """A parameter as the model registers it; `path` is its first name, without wrappers."""

    path: str
    numel: int
    dtype_bytes: int
    trained: bool


@dataclass(frozen=True)
class Explanation(HtmlView):
    """Decisions of the backend for a model.

    Attributes:
        breaks: reasons and positions of Dynamo's graph breaks.
        uncovered: modules with parameters that are in no graph and run as written, with reasons.
        parameters: the model's parameters in registration order.
    """

    graphs: tuple[Explained | ReplayedPlan, ...]
    breaks: tuple[str, ...] = ()
    uncovered: tuple[Uncovered, ...] = ()
    parameters: tuple[Registered, ...] = ()

    @property
    def lowered_graphs(self) -> list[PrecisionGraph]:
        """Graphs after the last pass, in execution order."""
        return [part.graph for part in self.graphs]

    @property
    def operators(self) -> list[Operator]:
        """All operators of the model, in execution order."""
        return [operator for part in self.graphs for operator in part.operators]

    @property
    def adjustable(self) -> list[Operator]:
        """The operators whose precision a plan decides, in execution order."""
        return [operator for operator in self.operators if operator.kind is Kind.ADJUSTABLE]

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
        result: Counter[str] = Counter()
        for part in self.graphs:
            for graph in part.graph.walk():
                result.update(graph.unknown)
        return dict(result)

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
        self._check_pass(name)
        texts = [part.snapshots.texts[name] for part in self.graphs]
        if len(texts) == 1:
            return texts[0]
        return "\n\n".join(
            f"graph {index} of {len(texts)}\n{text}" for index, text in enumerate(texts, 1)
        )

    def graph_module(self, name: str = "lower", index: int = 0) -> fx.GraphModule:
        """Return the graph after a pass, as a module; `index` selects one of several graphs."""
        self._check_pass(name)
        return self.graphs[index].snapshots.graphs[name].module

    def diff(self, first: str, second: str) -> str:
        """Return the difference between the graphs after two passes, as a unified diff."""
        self._check_pass(first)
        self._check_pass(second)
        return "\n".join(part.snapshots.diff(first, second) for part in self.graphs)

    def _check_pass(self, name: str) -> None:
        if name not in self.passes:
            raise OptionError(f"no pass {name!r} has run", do=nearest(name, self.passes))

    def plan(self) -> Plan:
        """Return a plan with every adjustable operator's planned precision, as a base for edits."""
        return Plan(operators={op.id: _plannable(op) for op in self.adjustable})

    def replanned(self, plan: DevicePlan) -> Explanation:
        """Return the explanation under another plan, in milliseconds, without another trace.

        Graphs after passes (`graph`, `diff`, `graph_module`) are computed lazily.

        Raises:
            PlanError: the plan does not fit the model.
        """
        (plan,) = device_plans(plan)
        with self.on_target():
            graphs = tuple(ReplayedPlan(part.snapshots, part.costing, plan) for part in self.graphs)
        return dataclasses.replace(self, graphs=graphs).compared(plan, check=True)

    def compared(self, plan: Plan, check: bool) -> Explanation:
        """Return the explanation with the planned formats of uncovered modules.

        With `check`, raise `PlanError` if the plan does not fit the model.
        """
        adjustable = [operator.id for operator in self.adjustable]
        result = findings(plan, adjustable, self.uncovered)
        if check:
            check_plan(plan, adjustable, complete=True, as_written=result.as_written)
        return dataclasses.replace(self, uncovered=result.uncovered)

    def table(self, kind: Kind | str | None = None, width: int | None = None) -> str:
        """Return the table that `print` shows.

        Args:
            kind: restrict the table to operators of this kind.
            width: columns to fit the table to, by wrapping and, if narrow, by omitting columns. By
                default the width depends only on the content, not on the terminal.

        Raises:
            OptionError: the kind is not "adjustable", "dependent" or "fixed".
        """
        if kind is not None and kind not in list(Kind):
            do = nearest(str(kind), [str(k) for k in Kind])
            raise OptionError(f"operators are of no kind {kind!r}", do=do)
        chosen = None if kind is None else Kind(kind)
        return plain(explanation_table(self, chosen, width), width)

    def save_dot(self, path: str | Path) -> None:
        """Write the operators and the tensors between them as a Graphviz file."""
        write_text(Path(path), dot(self.lowered_graphs))

    def save_model_explorer(self, path: str | Path) -> None:
        """Write the operators as JSON that Model Explorer opens, with modules as its layers."""
        write_text(Path(path), model_explorer(self.lowered_graphs, Path(path).stem))

    def on_target(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which device queries refer to the option "target", if set."""
        return self.graphs[0].context.on_target() if self.graphs else contextlib.nullcontext()

    def __str__(self) -> str:
        return self.table()


def _plannable(operator: Operator) -> Precision:
    """Return an operator's planned precision, or its substitute without a scaled implementation."""
    planned, row = operator.note.planned or operator.precision, operator.row
    assert planned is not None and row is not None, f"{operator.id} was not assigned"
    return planned if planned.plain or row.scaled else planned.elsewhere


def as_fast_wider(part: Explained | ReplayedPlan) -> Mapping[OpId, str]:
    """Return the operators that run in a format that is not faster at their shape, with reasons.

    The option "skip_unprofitable" would leave them in a wider format. Operators whose format was
    chosen explicitly, and plans for which the option has no effect, are excluded.
    """
    options = part.context.options
    if options.is_default or part.context.skips_unprofitable or options.emulate_unsupported:
        return {}
    # `slower` applies to torch's own operators, before lowering.
    written = {operator.id: operator for operator in part.written.operators(Kind.ADJUSTABLE)}
    result = {}
    for operator in part.operators:
        before, fmt = written.get(operator.id), operator.precision
        if before is None or fmt is None or not _by_default(operator, before, part.context.plan):
            continue
        # Simulated formats have a line of their own, and are rarely chosen for speed.
        native = support(part.context.device, fmt).kind != "simulated"
        if native and (why := before.slower(fmt)) is not None:
            result[operator.id] = why
    return result


def _by_default(operator: Operator, before: Operator, plan: Plan) -> bool:
    """Return whether the format is the plan's default; an explicit choice always applies."""
    choice, note = plan.precision_for(operator.id), operator.note
    if choice is None or choice.explicit or note.pinned or note.planned is not choice.precision:
        return False
    # A plan overrides an autocast region, even one from the plan at capture.
    return note.precision is not before.model_format or isinstance(note.autocast, Precision)


_COSTS = ("flops", "bytes", "saved")
_COLUMNS = ("operator", "kind", "precision", "output", *_COSTS, "line", "reason")


def explanation_table(
    explanation: Explanation, kind: Kind | None = None, width: int | None = None
) -> RenderableType:
    """Return the explanation for a rich console, for one kind and fitted to a width if given."""
    table = table_of(_COLUMNS)
    notes: list[str] = []
    with explanation.on_target():
        operators = explanation.operators
        shown = [operator for operator in operators if kind in (None, operator.kind)]
        for operator in shown:
            table.add_row(*map(Text, _cells(operator)))
        if kind is None:
            for module in explanation.uncovered:
                table.add_row(*map(Text, uncovered_cells(module, _COLUMNS)))
        else:
            notes.append(f"{len(shown)} of {len(operators)} operators are {kind} and shown")
        notes += _notes(explanation)
    fit(table, width)
    return Group(table, *map(Text, notes))


def fit(table: Table, width: int | None) -> None:
    """Wrap long columns; below 120 columns omit costs and lines, below 60 also kind and output."""
    if width is None:
        return
    dropped = {*_COSTS, "line"} if width < 120 else set()
    if width < 60:
        dropped |= {"kind", "output"}
    table.columns[:] = [column for column in table.columns if column.header not in dropped]
    for column in table.columns:
        if column.header in ("operator", "line", "reason"):
            column.no_wrap, column.overflow = False, "fold"


def precision_cell(precision: Precision | None, planned: Precision | None) -> str:
    """Return the precision that runs, and the planned one if it differs."""
    if planned is not None and precision is not None and planned is not precision:
        return f"{precision} (not {planned})"
    return str(precision or "-")


def uncovered_cells(module: Uncovered, columns: Sequence[str]) -> list[str]:
    """Return the row of a module that is in no graph."""
    precision = "as written"
    if module.lost:
        precision += f" (not {module.planned})"
    available = {
        "operator": f"{module.path} ({module.type})".strip(),
        "kind": "in no graph",
        "precision": precision,
        "reason": module.cause.reason,
    }
    return [available.get(name, "") for name in columns]


def _cells(operator: Operator) -> list[str]:
    note, cost = operator.note, operator.note.cost
    costs = ["", "", ""]
    if cost is not None:
        costs = [short(cost.flops), short(cost.bytes, "B"), short(cost.saved_bytes, "B")]
    precision = precision_cell(note.precision, note.planned)
    head = [str(note.id), str(note.kind), precision, str(note.output or "-")]
    return [*head, *costs, operator.line, operator.reason]


def _notes(explanation: Explanation) -> Iterator[str]:
    counts = Counter(str(operator.precision) for operator in explanation.adjustable)
    formats = ", ".join(f"{count} in {name}" for name, count in counts.most_common())
    number = f"{len(explanation.adjustable)} adjustable operators"
    yield f"{number}: {formats}" if formats else number
    if explanation.graphs:
        context = explanation.graphs[0].context
        yield from _substitutes(explanation)
        yield from _unprofitable(explanation)
        if DEVICE_CLASS in (notes := context.plan.notes):
            yield f"plan: the part for {notes[DEVICE_CLASS]}, chosen by {notes[CHOSEN_BY]}"
        device, target = f"device {context.device}", context.options.target
        if target is not None:
            version = ".".join(map(str, TARGETS[target]))
            device = f"target {target} (compute capability {version}), explained on {device}"
        yield f"{device}, {many(len(explanation.graphs), 'graph')}"
    for name, done in explanation.rewritten.items():
        yield f"rewrite {name}: {many(done.count, 'place')}"
        yield from (f"  left alone: {where}" for where in done.left)
    for text in explanation.breaks:
        first_line = text.strip().partition("\n")[0]
        yield f"graph break: {first_line}"
    advice = dict.fromkeys(module.cause.advice for module in explanation.uncovered)
    yield from (f"in no graph: {text}" for text in advice if text)
    for name, count in explanation.unknown.items():
        yield f"not in the operator table, so FP32: {name} ({count})"


def _substitutes(explanation: Explanation) -> Iterator[str]:
    result: dict[str, str] = {}
    for operator in explanation.adjustable:
        context, fmt = operator.graph.context, operator.precision
        if fmt is not None:
            settings = support(context.device, fmt, context.options.emulate_unsupported)
            if settings.kind != "native":
                result[str(fmt)] = f"{fmt}: {settings.kind}, {settings.reason}"
    yield from result.values()


def _unprofitable(explanation: Explanation) -> Iterator[str]:
    result: dict[OpId, str] = {}
    for part in explanation.graphs:
        result.update(as_fast_wider(part))
    if not result:
        return
    first, why = next(iter(result.items()))
    yield (
        f"in a format that is not faster here: {many(len(result), 'operator')}, such as {first} "
        f'({why}); the option "skip_unprofitable" uses a wider format instead'
    )
