"""Verifier: a table of rules that a graph must satisfy between passes.

Invariant: a rule is valid from the pass `since` on and is checked after every pass from there on. A
rule does not change the graph. An error names the broken rule, the operator, its line in the user's
model, and the pass that broke the rule.
"""

from __future__ import annotations

import operator as py_operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from qsync_fx.devices import compiles
from qsync_fx.errors import PassError
from qsync_fx.formats import Precision, precision_of
from qsync_fx.graph import Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.alias_analysis import Sharing, in_place
from qsync_fx.graph.cost_dag import computes
from qsync_fx.graph.fx_utils import (
    arguments,
    describe,
    is_float,
    memory_order,
    same_strides,
    tensors,
)
from qsync_fx.graph.node_metadata import OperatorInfo
from qsync_fx.graph.operand_formats import OperandReader
from qsync_fx.ops import Kind
from qsync_fx.passes.printer import graph_text

Broken = tuple[fx.Node | None, str]


@dataclass(frozen=True)
class VerifierRule:
    """One rule: its statement, the first pass it is valid after, and a generator of violations."""

    says: str
    since: str
    check: Callable[[PrecisionGraph], Iterator[Broken]]


def _is_a_graph(graph: PrecisionGraph) -> Iterator[Broken]:
    try:
        graph.graph.lint()
    except Exception as error:  # noqa: BLE001 - lint re-raises errors of any class
        yield None, str(error).partition("\n")[0]


def _fits_its_callers(graph: PrecisionGraph) -> Iterator[Broken]:
    """Check the graph's inputs and outputs; dtypes of a body's results depend on its readers."""
    takes = sum(node.op == "placeholder" for node in graph.nodes)
    if graph.parent is None and takes != len(graph.inputs):
        yield None, f"it takes {takes} inputs, and Dynamo gives it {len(graph.inputs)}"
    output, expected, result = graph.nodes[-1], graph.outputs, graph.output_types()
    if len(result) != len(expected):
        yield output, f"it returns {len(result)} values, and Dynamo expects {len(expected)}"
        return
    for index, (wanted, inputs) in enumerate(zip(expected, result, strict=True)):
        if graph.parent is None and wanted is not None and inputs is not wanted:
            yield output, f"output {index} is {inputs or 'no tensor'}, and Dynamo expects {wanted}"


def _has_values(graph: PrecisionGraph) -> Iterator[Broken]:
    for node in graph.nodes:
        # An assertion about a size returns no value.
        gives = isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.returns)
        if node.op == "call_function" and gives and "val" not in node.meta:
            yield node, "it has no value; call graph.propagate(node) on nodes that a pass adds"


def _keeps_ids(graph: PrecisionGraph) -> Iterator[Broken]:
    visited: set[str] = set()
    for operator in graph.own_operators():
        if str(operator.id) in visited:
            yield operator.node, f"two operators are called {operator.id}"
        visited.add(str(operator.id))


def _has_reasons(graph: PrecisionGraph) -> Iterator[Broken]:
    for operator in graph.own_operators():
        if not operator.reason:
            yield operator.node, f"it is {operator.kind} without a reason"


def _is_assigned(graph: PrecisionGraph) -> Iterator[Broken]:
    for operator in graph.own_operators():
        note = operator.note
        if operator.kind is Kind.ADJUSTABLE and note.precision is None:
            yield operator.node, "it is adjustable and has no precision"
        if note.planned is not None and note.precision is not note.planned and not note.instead:
            yield (
                operator.node,
                f"{note.planned} is planned, {note.precision} runs, and the reason does not say why",
            )


def _follows_inputs(graph: PrecisionGraph) -> Iterator[Broken]:
    for operator in graph.own_operators():
        note = operator.note
        if (
            operator.kind is Kind.DEPENDENT
            and note.precision is None
            and any(is_float(t) for t in tensors(graph.value(operator.node)))
        ):
            yield operator.node, "it depends on its inputs and has no precision"


def _types_match(graph: PrecisionGraph) -> Iterator[Broken]:
    for operator in graph.own_operators():
        note, value = operator.note, graph.value(operator.node)
        if note.output is not None and is_float(value) and not in_place(operator.node):
            result, wanted = graph.value(_after_own_cast(operator.node)), note.output.dtype
            # After a lossless cast of the result alone, each reader converts as it needs.
            widens = (
                note.row is not None
                and note.row.output_only
                and torch.promote_types(result.dtype, wanted) is wanted
            )
            if result.dtype is not wanted and not widens:
                yield operator.node, f"its output should be {note.output} and is {describe(result)}"


def _after_own_cast(node: fx.Node) -> fx.Node:
    """Return the last RESULT cast or copy that all readers of a node share; the node if none."""
    while len(node.users) == 1 and node_metadata.has_purpose(
        user := next(iter(node.users)), node_metadata.Purpose.RESULT
    ):
        node = user
    return node


def _keeps_strides(graph: PrecisionGraph) -> Iterator[Broken]:
    """Check the traced strides.

    Readers may depend on them: tracing drops a `contiguous()` without an effect on the traced
    strides.
    """
    written = graph.whole.written
    traced = (
        {} if written is None else {str(operator.id): operator for operator in written.operators()}
    )
    for operator in graph.own_operators():
        before = traced.get(str(operator.id))
        node = _after_own_cast(operator.node)
        old, new = (None if before is None else before.graph.value(before.node)), graph.value(node)
        if (
            isinstance(old, torch.Tensor)
            and isinstance(new, torch.Tensor)
            and not same_strides(old, new)
        ):
            yield (
                operator.node,
                f"its result has the strides {tuple(new.stride())}, where the model has {tuple(old.stride())}; "
                f"put qsync.in_order(%{node.name}, {memory_order(old)}) behind it",
            )


def _casts_are_needed(graph: PrecisionGraph) -> Iterator[Broken]:
    visited: dict[tuple[object, ...], fx.Node] = {}
    sharing = Sharing(graph)
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if node_metadata.is_cast(node) and node.target is not py_operator.getitem:
            if not node.users:
                yield node, "this cast has no reader"
            if isinstance(source, fx.Node):
                if (
                    node.target is torch.ops.aten.to.dtype
                    and graph.value(source).dtype is node.args[1]
                ):
                    yield node, f"%{source.name} is {node.args[1]} already"
                key = (node.target, *_asked(node), sharing.epoch(source))
                if key in visited:
                    yield node, f"%{visited[key].name} is the same cast"
                visited[key] = node
        sharing.passed(node)


def _asked(node: fx.Node) -> Iterator[object]:
    """Yield a cast's arguments without its random stream: equal casts should be shared."""
    for name, value in arguments(node).items():
        if name != "stream":
            yield tuple(value) if isinstance(value, list) else value


def _streams_are_apart(graph: PrecisionGraph) -> Iterator[Broken]:
    if graph.parent is not None:
        return
    visited: dict[int, fx.Node] = {}
    for node in (node for part in graph.walk() for node in part.nodes):
        for fact in (node_metadata.CAST.get(node), node_metadata.NOTE.get(node)):
            if fact is not None and fact.stream is not None:
                if fact.stream in visited:
                    yield (
                        node,
                        f"it draws its rounding from stream {fact.stream}, like %{visited[fact.stream].name}",
                    )
                visited[fact.stream] = node


def _reads_current_values(graph: PrecisionGraph) -> Iterator[Broken]:
    """Check for stale casts.

    A reader of a cast gets a stale value if the cast's source is written to between the cast and
    the reader.
    """
    sharing = Sharing(graph)
    selected: dict[fx.Node, tuple[fx.Node, int]] = {}
    for node in graph.nodes:
        cast = node_metadata.is_cast(node)
        for used in () if cast else node.all_input_nodes:
            source, before = selected.get(used, (used, 0))
            if source is not used and sharing.writes(source) > before:
                yield (
                    node,
                    f"it reads %{used.name}, a cast of %{source.name} from before it was written to",
                )
        origin = node.args[0] if node.args else None
        if cast and isinstance(origin, fx.Node):
            selected[node] = selected.get(origin, (origin, sharing.writes(origin)))
        for used in () if cast else node.all_input_nodes:
            if used in selected and sharing.memory.of(used) & sharing.memory.of(node):
                selected[node] = selected[used]
        sharing.passed(node)


def _dequantizes_for_products(graph: PrecisionGraph) -> Iterator[Broken]:
    for node in graph.nodes:
        for user in (
            node.users if node_metadata.is_part(node, node_metadata.Part.DEQUANTIZE) else ()
        ):
            note = node_metadata.NOTE.get(user)
            if (
                note is None
                or note.kind is not Kind.ADJUSTABLE
                or note.precision is None
                or not note.precision.scaled
            ):
                yield (
                    user,
                    f"it reads %{node.name}, which represents a quantized operand and has no gradient",
                )


def _losses_are_wide(graph: PrecisionGraph) -> Iterator[Broken]:
    for operator in graph.own_operators():
        row = operator.row
        if row is None or not row.loss:
            continue
        for used in operator.node.all_input_nodes:
            value = graph.value(used)
            if is_float(value) and value.dtype.itemsize < 4 and node_metadata.is_cast(used):
                yield operator.node, f"a loss reads {describe(value)} from the cast %{used.name}"


def _reads_what_it_asks_for(graph: PrecisionGraph) -> Iterator[Broken]:
    for operator in graph.own_operators():
        note, node = operator.note, operator.node
        # a lowered operator reads the original next to each rounded operand
        if _lowered(note, node):
            continue
        reader = OperandReader.of(node, note, graph.value(node))
        for operand in () if reader.in_place else reader.operands:
            value = graph.value(operand.node)
            requested = reader.asks(note.precision, operand, value)
            if (
                isinstance(requested, Precision)
                and requested.plain
                and value.dtype is not requested.dtype
            ):
                yield (
                    node,
                    f"it runs in {note.precision} and reads {describe(value)} from %{operand.node.name}",
                )


def _lowered(note: OperatorInfo, node: fx.Node) -> bool:
    return (
        note.kind is Kind.ADJUSTABLE
        and note.precision is not None
        and note.precision.name in node.args
    )


def _plan_is_kept(graph: PrecisionGraph) -> Iterator[Broken]:
    for operator in graph.own_operators():
        fmt, node = operator.precision, operator.node
        if (
            operator.kind is Kind.ADJUSTABLE
            and fmt is not None
            and not fmt.plain
            and not _lowered(operator.note, node)
        ):
            yield node, f"{fmt} is planned, and the node does not compute in it"


def _is_compiled(graph: PrecisionGraph) -> Iterator[Broken]:
    """Check that the device compiles each format that the model itself does not use."""
    written = graph.whole.written
    if written is None:
        return
    live = {fmt for part in written.walk() for node in part.nodes for fmt in _formats(part, node)}
    for node in graph.nodes:
        for fmt in _formats(graph, node):
            if fmt not in live and not compiles(graph.context.device, fmt):
                yield node, f"nothing compiles {fmt} for the device"


def _formats(graph: PrecisionGraph, node: fx.Node) -> Iterator[Precision]:
    for value in tensors(graph.value(node)):
        fmt = precision_of(value.dtype)
        if fmt is not None:
            yield fmt


def _is_charged(graph: PrecisionGraph) -> Iterator[Broken]:
    for node in graph.nodes if any(graph.own_operators()) else ():
        if computes(node) and tensors(graph.value(node)) and node_metadata.charged(node) is None:
            yield node, "its time is not assigned to any operator"


STRIDES = VerifierRule(
    "results have the strides that the model was traced with", "insert_casts", _keeps_strides
)
RULES = (
    VerifierRule("the graph is well formed", "normalize", _is_a_graph),
    VerifierRule("every node has a value", "normalize", _has_values),
    VerifierRule("every operator has one id", "normalize", _keeps_ids),
    VerifierRule("every decision has a reason", "classify", _has_reasons),
    VerifierRule(
        "every adjustable operator has a precision, and every deviation from the plan has a reason",
        "assign",
        _is_assigned,
    ),
    VerifierRule("dependent operators follow their inputs", "cascade", _follows_inputs),
    VerifierRule("types match", "insert_casts", _types_match),
    STRIDES,
    VerifierRule(
        "operators read operands of their precision", "insert_casts", _reads_what_it_asks_for
    ),
    VerifierRule("every cast is needed and none is doubled", "insert_casts", _casts_are_needed),
    VerifierRule(
        "each rounding draws from its own random stream", "insert_casts", _streams_are_apart
    ),
    VerifierRule("no reader of a cast gets a stale value", "insert_casts", _reads_current_values),
    VerifierRule(
        "only lowered operators read placeholders of quantized operands",
        "insert_casts",
        _dequantizes_for_products,
    ),
    VerifierRule("losses read FP32", "insert_casts", _losses_are_wide),
    VerifierRule("the graph has no format that the device does not compile", "lower", _is_compiled),
    VerifierRule("planned precision is present in the lowered graph", "lower", _plan_is_kept),
    VerifierRule("the time of every node is assigned to an operator", "lower", _is_charged),
    VerifierRule(
        "inputs and outputs of the graph are those that Dynamo expects",
        "normalize",
        _fits_its_callers,
    ),
)


def verify(graph: PrecisionGraph, passed: tuple[str, ...]) -> None:
    """Check every rule that is valid after the passes named in `passed`, in order.

    Raises:
        PassError: names the broken rule, the operator and its line, and the last pass.
    """
    _check(graph, [rule for rule in RULES if rule.since in passed], passed[-1])


def verify_strides(graph: PrecisionGraph, step: str) -> None:
    """Check the strides of a graph that `step` has rewritten after the pipeline.

    Raises:
        PassError: an operator's result has other strides than in the traced model.
    """
    _check(graph, [STRIDES], step)


def _check(graph: PrecisionGraph, rules: Sequence[VerifierRule], step: str) -> None:
    for part in graph.walk():
        for rule in rules:
            for node, problem in rule.check(part):
                error = PassError(
                    f'after pass {step!r} the graph breaks the rule "{rule.says}": {problem}',
                    where=_where(part, node) or f"the graph after pass {step!r}",
                )
                error.graph = graph_text(graph)
                raise error


def _where(graph: PrecisionGraph, node: fx.Node | None) -> str | None:
    if node is None:
        return None
    note = node_metadata.NOTE.get(node)
    return f"node %{node.name}" + (f", {Operator(graph, node).where}" if note else "")
