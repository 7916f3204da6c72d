"""Violations that the verifier detects; its error names the pass, the node and the rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

import qsync_fx
from qsync_fx.errors import PassError
from qsync_fx.graph import node_metadata
from tests.support.compiling.passes_on_net import explain


def narrow_a_linear(graph: qsync_fx.PrecisionGraph) -> None:
    """Remove the casts: a linear operator then reads FP32 where BF16 is planned."""
    for node in graph.nodes:
        if node_metadata.is_cast(node):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def double_a_cast(graph: qsync_fx.PrecisionGraph) -> None:
    cast = next(node for node in graph.nodes if node_metadata.is_cast(node))
    (reader,) = cast.users
    with graph.graph.inserting_after(cast):
        again = graph.graph.node_copy(cast)
    reader.args = (cast, again, *reader.args[2:])


def leave_a_cast_unread(graph: qsync_fx.PrecisionGraph) -> None:
    cast = next(node for node in graph.nodes if node_metadata.is_cast(node))
    with graph.graph.inserting_after(cast):
        graph.graph.node_copy(cast)


def forget_a_value(graph: qsync_fx.PrecisionGraph) -> None:
    del next(op.node for op in graph.operators() if op.kind == "adjustable").meta["val"]


def forget_a_reason(graph: qsync_fx.PrecisionGraph) -> None:
    graph.operators()[0].update(reason="")


def forget_a_precision(graph: qsync_fx.PrecisionGraph) -> None:
    graph.operators("adjustable")[0].update(precision=None)


def change_silently(graph: qsync_fx.PrecisionGraph) -> None:
    graph.operators("adjustable")[0].update(precision=qsync_fx.FORMATS["fp32"], reason="just so")


def share_an_id(graph: qsync_fx.PrecisionGraph) -> None:
    first, second, *_ = graph.operators("adjustable")
    second.update(id=first.id)


def read_before_it_is_written(graph: qsync_fx.PrecisionGraph) -> None:
    first, *_, last = graph.operators("adjustable")
    first.node.replace_input_with(first.node.all_input_nodes[0], last.node)


def narrow_an_output(graph: qsync_fx.PrecisionGraph) -> None:
    output = graph.nodes[-1]
    (result,) = output.args[0]
    with graph.graph.inserting_before(output):
        half = graph.graph.call_function(torch.ops.aten.to.dtype, (result, torch.float16))
    graph.propagate(half)
    output.args = ((half,),)


def return_one_more(graph: qsync_fx.PrecisionGraph) -> None:
    output = graph.nodes[-1]
    output.args = ((*output.args[0], graph.nodes[0]),)


def take_one_more(graph: qsync_fx.PrecisionGraph) -> None:
    with graph.graph.inserting_before(graph.nodes[0]):
        graph.graph.placeholder("more").meta["val"] = graph.value(graph.nodes[-2])


def change_strides(graph: qsync_fx.PrecisionGraph) -> None:
    """Set a product that is row-major in the model to column-major."""
    node = next(op.node for op in graph.operators("adjustable") if graph.value(op.node).dim() == 2)
    node.meta["val"] = graph.value(node).t().contiguous().t()


def unassign_a_dependent(graph: qsync_fx.PrecisionGraph) -> None:
    graph.operators("dependent")[0].update(precision=None)


@pytest.mark.parametrize(
    ("after", "breaks", "rule"),
    [
        ("normalize", forget_a_value, "every node has a value"),
        ("normalize", share_an_id, "every operator has one id"),
        ("normalize", read_before_it_is_written, "the graph is well formed"),
        ("classify", forget_a_reason, "every decision has a reason"),
        ("assign", forget_a_precision, "every adjustable operator has a precision"),
        ("assign", change_silently, "does not say why"),
        ("cascade", unassign_a_dependent, "dependent operators follow their inputs"),
        (
            "lower",
            narrow_an_output,
            "inputs and outputs of the graph are those that Dynamo expects",
        ),
        (
            "insert_casts",
            narrow_an_output,
            "output 0 is torch.float16, and Dynamo expects torch.float32",
        ),
        ("normalize", return_one_more, "it returns 2 values, and Dynamo expects 1"),
        ("lower", take_one_more, "it takes 6 inputs, and Dynamo gives it 5"),
        ("insert_casts", leave_a_cast_unread, "every cast is needed"),
        ("insert_casts", double_a_cast, "every cast is needed and none is doubled"),
        ("lower", narrow_a_linear, "operators read operands of their precision"),
        (
            "lower",
            change_strides,
            r"its result has the strides \(1, \d+\), where the model has \(\d+, 1\)",
        ),
    ],
)
def test_the_verifier_names_pass_node_and_rule(
    after: str, breaks: Callable[[qsync_fx.PrecisionGraph], None], rule: str
) -> None:
    with pytest.raises(PassError, match=rule) as caught:
        explain(qsync_fx.graph_pass(after=after)(breaks))
    assert breaks.__name__ in str(caught.value)
    assert "linear" in caught.value.graph
    if breaks not in (read_before_it_is_written, take_one_more):
        assert "node %" in (caught.value.where or "")


def test_roundings_have_distinct_streams() -> None:
    @qsync_fx.graph_pass(after="insert_casts")
    def draw_alike(graph: qsync_fx.PrecisionGraph) -> None:
        first, second, *_ = (
            node for node in graph.nodes if node_metadata.is_part(node, node_metadata.Part.QUANTIZE)
        )
        node_metadata.CAST[second] = dataclasses.replace(
            node_metadata.CAST[second], stream=node_metadata.CAST[first].stream
        )

    with pytest.raises(PassError, match="each rounding draws from its own random stream"):
        explain(draw_alike, precision="int8")
