"""Verifier: a table of rules that a graph must satisfy between passes.

Invariant: a rule is valid from the pass `since` on, is checked after every pass from there on, and
does not change the graph.
"""

from __future__ import annotations

import operator as py_operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from qsync_fx.devices.format_support import compiles
from qsync_fx.errors import PassError
from qsync_fx.formats import Precision, precision_of
from qsync_fx.graph import Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.alias_analysis import Sharing, in_place
from qsync_fx.graph.fx_utils import (
    arguments,
    describe,
    is_float,
    memory_order,
    same_strides,
    tensors,
)
from qsync_fx.graph.operand_formats import OperandReader
from qsync_fx.ops import Kind
from qsync_fx.passes.printer import graph_text
from qsync_fx.torch_internals import OpOverload

Broken = tuple[fx.Node | None, str]
Check = Callable[[PrecisionGraph], Iterator[Broken]]


@dataclass(frozen=True)
class VerifierRule:
    """A statement, the first pass that it is valid after, and a generator of violations."""

    says: str
    since: str
    check: Check


RULES: list[VerifierRule] = []


def _rule(says: str, since: str) -> Callable[[Check], VerifierRule]:
    """Add a rule, which the decorated function checks, to the table."""

    def add(check: Check) -> VerifierRule:
        RULES.append(VerifierRule(says, since, check))
        return RULES[-1]

    return add


@_rule("the graph is well formed", since="normalize")
def _is_a_graph(graph: PrecisionGraph) -> Iterator[Broken]:
    try:
        graph.graph.lint()
    except Exception as error:  # noqa: BLE001 - lint re-raises errors of any class
        yield None, str(error).partition("\n")[0]


@_rule("every node has a value", since="normalize")
def _has_values(graph: PrecisionGraph) -> Iterator[Broken]:
    for node in graph.nodes:
        # An assertion about a size returns no value.
        gives = isinstance(node.target, OpOverload) and bool(node.target._schema.returns)
        if node.op == "call_function" and gives and "val" not in node.meta:
            yield node, "it has no value; call graph.propagate(node) on nodes that a pass adds"


@_rule("every operator has one id", since="normalize")
def _keeps_ids(graph: PrecisionGraph) -> Iterator[Broken]:
    visited: set[str] = set()
    for operator in graph.own_operators():
        if str(operator.id) in visited:
            yield operator.node, f"two operators are called {operator.id}"
        visited.add(str(operator.id))


@_rule("every decision has a reason", since="classify")
def _has_reasons(graph: PrecisionGraph) -> Iterator[Broken]:
    for operator in graph.own_operators():
        if not operator.reason:
            yield operator.node, f"it is {operator.kind} without a reason"


@_rule(
    "every adjustable operator has a precision, and every deviation from the plan has a reason",
    since="assign",
)
def _is_assigned(graph: PrecisionGraph) -> Iterator[Broken]:
    for operator in graph.own_operators():
        note = operator.note
        if operator.kind is Kind.ADJUSTABLE and note.precision is None:
            yield operator.node, "it is adjustable and has no precision"
        if note.planned is not None and note.precision is not note.planned and not note.instead:
            problem = f"{note.planned} is planned, {note.precision} runs"
            yield operator.node, f"{problem}, and the reason does not say why"


@_rule("dependent operators follow their inputs", since="cascade")
def _follows_inputs(graph: PrecisionGraph) -> Iterator[Broken]:
    for operator in graph.own_operators():
        if operator.kind is not Kind.DEPENDENT or operator.precision is not None:
            continue
        if any(is_float(t) for t in tensors(graph.value(operator.node))):
            yield operator.node, "it depends on its inputs and has no precision"


@_rule("types match", since="insert_casts")
def _types_match(graph: PrecisionGraph) -> Iterator[Broken]:
    for operator in graph.own_operators():
        note, value = operator.note, graph.value(operator.node)
        if note.output is not None and is_float(value) and not in_place(operator.node):
            result, wanted = graph.value(_after_own_cast(operator.node)), note.output.dtype
            if result.dtype is wanted:
                continue
            # After a lossless cast of the result alone, each reader converts as it needs.
            widens = torch.promote_types(result.dtype, wanted) is wanted
            if not widens or note.row is None or not note.row.output_only:
                yield operator.node, f"its output should be {note.output} and is {describe(result)}"


def _after_own_cast(node: fx.Node) -> fx.Node:
    """Return the last RESULT cast or copy that all readers of a node share; the node if none."""
    while len(node.users) == 1:
        (user,) = node.users
        if not node_metadata.has_purpose(user, node_metadata.Purpose.RESULT):
            break
        node = user
    return node


@_rule("results have the strides that the model was traced with", since="insert_casts")
def _keeps_strides(graph: PrecisionGraph) -> Iterator[Broken]:
    # Readers may depend on them: tracing drops a `contiguous()` that changes no strides.
    written = graph.top_level.written
    if written is None:
        return
    traced = {str(item.id): item.graph.value(item.node) for item in written.operators()}
    for operator in graph.own_operators():
        node = _after_own_cast(operator.node)
        old, new = traced.get(str(operator.id)), graph.value(node)
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
            continue
        if not same_strides(old, new):
            strides = f"{tuple(new.stride())}, where the model has {tuple(old.stride())}"
            copy = f"qsync.in_order(%{node.name}, {memory_order(old)})"
            yield operator.node, f"its result has the strides {strides}; put {copy} behind it"


@_rule("every cast is needed and none is doubled", since="insert_casts")
def _casts_are_needed(graph: PrecisionGraph) -> Iterator[Broken]:
    visited: dict[tuple[object, ...], fx.Node] = {}
    sharing = Sharing(graph)
    for node in graph.nodes:
        if node_metadata.is_cast(node) and node.target is not py_operator.getitem:
            if not node.users:
                yield node, "this cast has no reader"
            source = next(iter(node.args), None)
            if isinstance(source, fx.Node):
                converts = node.target is torch.ops.aten.to.dtype
                if converts and graph.value(source).dtype is node.args[1]:
                    yield node, f"%{source.name} is {node.args[1]} already"
                # Casts that differ in the random stream alone should be one cast.
                settings = str({**arguments(node), "stream": None})
                key = (node.target, settings, sharing.epoch(source))
                if key in visited:
                    yield node, f"%{visited[key].name} is the same cast"
                visited[key] = node
        sharing.passed(node)


@_rule("each rounding draws from its own random stream", since="insert_casts")
def _streams_are_apart(graph: PrecisionGraph) -> Iterator[Broken]:
    if graph.parent is not None:
        return
    visited: dict[int, fx.Node] = {}
    for node in (node for part in graph.walk() for node in part.nodes):
        for fact in (node_metadata.CAST.get(node), node_metadata.NOTE.get(node)):
            if fact is not None and fact.stream is not None:
                if fact.stream in visited:
                    other = visited[fact.stream].name
                    yield node, f"it draws its rounding from stream {fact.stream}, like %{other}"
                visited[fact.stream] = node


@_rule("no reader of a cast gets a stale value", since="insert_casts")
def _reads_current_values(graph: PrecisionGraph) -> Iterator[Broken]:
    """Check that no cast's source is written to between the cast and a reader of the cast."""
    sharing = Sharing(graph)
    selected: dict[fx.Node, tuple[fx.Node, int]] = {}
    for node in graph.nodes:
        if node_metadata.is_cast(node):
            origin = next(iter(node.args), None)
            if isinstance(origin, fx.Node):
                selected[node] = selected.get(origin, (origin, sharing.writes(origin)))
            sharing.passed(node)
            continue
        for used in node.all_input_nodes:
            source, before = selected.get(used, (used, 0))
            if source is not used and sharing.writes(source) > before:
                stale = f"a cast of %{source.name} from before it was written to"
                yield node, f"it reads %{used.name}, {stale}"
        for used in node.all_input_nodes:
            if used in selected and sharing.memory.of(used) & sharing.memory.of(node):
                selected[node] = selected[used]
        sharing.passed(node)


@_rule("only lowered operators read placeholders of quantized operands", since="insert_casts")
def _dequantizes_for_products(graph: PrecisionGraph) -> Iterator[Broken]:
    for node in graph.nodes:
        if not node_metadata.is_part(node, node_metadata.Part.DEQUANTIZE):
            continue
        problem = f"it reads %{node.name}, which represents a quantized operand and has no gradient"
        for user in node.users:
            note = node_metadata.NOTE.get(user)
            lowers = note is not None and note.kind is Kind.ADJUSTABLE and note.precision
            if not (lowers and lowers.scaled):
                yield user, problem


@_rule("losses read FP32", since="insert_casts")
def _losses_are_wide(graph: PrecisionGraph) -> Iterator[Broken]:
    for operator in graph.own_operators():
        row = operator.row
        if row is None or not row.loss:
            continue
        for used in operator.node.all_input_nodes:
            value = graph.value(used)
            if is_float(value) and value.dtype.itemsize < 4 and node_metadata.is_cast(used):
                yield operator.node, f"a loss reads {describe(value)} from the cast %{used.name}"


@_rule("operators read operands of their precision", since="insert_casts")
def _reads_what_it_asks_for(graph: PrecisionGraph) -> Iterator[Broken]:
    for operator in graph.own_operators():
        note, node = operator.note, operator.node
        reader = OperandReader.of(node, note, graph.value(node))
        # A lowered operator reads the original next to each rounded operand.
        if _lowered(operator) or reader.in_place:
            continue
        for operand in reader.operands:
            value = graph.value(operand.node)
            requested = reader.read_as(note.precision, operand, value)
            if requested is None or not requested.plain:
                continue
            if value.dtype is not requested.dtype:
                source = f"{describe(value)} from %{operand.node.name}"
                yield node, f"it runs in {note.precision} and reads {source}"


def _lowered(operator: Operator) -> bool:
    fmt = operator.precision
    return operator.kind is Kind.ADJUSTABLE and fmt is not None and fmt.name in operator.node.args


@_rule("planned precision is present in the lowered graph", since="lower")
def _plan_is_kept(graph: PrecisionGraph) -> Iterator[Broken]:
    for operator in graph.own_operators():
        fmt = operator.precision
        if operator.kind is not Kind.ADJUSTABLE or fmt is None or fmt.plain:
            continue
        if not _lowered(operator):
            yield operator.node, f"{fmt} is planned, and the node does not compute in it"


@_rule("the graph has no format that the device does not compile", since="lower")
def _is_compiled(graph: PrecisionGraph) -> Iterator[Broken]:
    written = graph.top_level.written
    if written is None:
        return
    live = {fmt for part in written.walk() for node in part.nodes for fmt in _formats(part, node)}
    for node in graph.nodes:
        for fmt in _formats(graph, node):
            # The model itself may use formats that its device does not compile.
            if fmt not in live and not compiles(graph.context.device, fmt):
                yield node, f"nothing compiles {fmt} for the device"


def _formats(graph: PrecisionGraph, node: fx.Node) -> Iterator[Precision]:
    for value in tensors(graph.value(node)):
        if fmt := precision_of(value.dtype):
            yield fmt


@_rule("the time of every node is assigned to an operator", since="lower")
def _is_charged(graph: PrecisionGraph) -> Iterator[Broken]:
    if not any(graph.own_operators()):
        return
    for node in graph.nodes:
        if (
            node_metadata.computes(node)
            and tensors(graph.value(node))
            and node_metadata.charged(node) is None
        ):
            yield node, "its time is not assigned to any operator"


@_rule("inputs and outputs of the graph are those that Dynamo expects", since="normalize")
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


def verify(graph: PrecisionGraph, passed: tuple[str, ...]) -> None:
    """Raise `PassError` if a rule is broken that is valid after the passes named in `passed`."""
    _check(graph, [rule for rule in RULES if rule.since in passed], passed[-1])


def verify_strides(graph: PrecisionGraph, step: str) -> None:
    """Raise `PassError` if `step`, after the pipeline, has changed strides of the traced model."""
    _check(graph, [_keeps_strides], step)


def _check(graph: PrecisionGraph, rules: Sequence[VerifierRule], step: str) -> None:
    for part in graph.walk():
        for rule in rules:
            for node, problem in rule.check(part):
                where = f"the graph after pass {step!r}"
                if node is not None:
                    where = f"node %{node.name}"
                    if node in node_metadata.NOTE:
                        where += f", {Operator(part, node).where}"
                message = f'after pass {step!r} the graph breaks the rule "{rule.says}": {problem}'
                error = PassError(message, where=where)
                error.graph = graph_text(graph)
                raise error
