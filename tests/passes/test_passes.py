"""Custom passes: where they run, what they may do, and how the verifier catches what they must not do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qsync_fx
from qsync_fx.backend.operators import lowerings
from qsync_fx.errors import OptionError, PassError
from qsync_fx.graph import meta
from qsync_fx.options import Options
from qsync_fx.passes.base import Scope
from qsync_fx.passes.pipeline import pipeline
from qsync_fx.passes.verify import RULES


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.classifier = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.relu(self.body(x)))


def explain(*passes: object, precision: str = "bf16") -> qsync_fx.Explanation:
    return qsync_fx.explain(Net(), torch.randn(2, 8), options={"precision": precision, "passes": list(passes)})


@qsync_fx.graph_pass(after="assign")
def keep_head_fp32(graph: qsync_fx.PrecisionGraph) -> None:
    for op in graph.operators(kind="adjustable"):
        if op.id.module.endswith("classifier"):
            op.assign("fp32", reason="the head stays in FP32")


def test_a_custom_pass_decides() -> None:
    found = {str(op.id): op for op in explain(keep_head_fp32, precision="int8").operators}
    assert str(found["classifier/linear"].precision) == "fp32"
    assert found["classifier/linear"].reason == "the head stays in FP32"
    assert str(found["body/linear"].precision) == "int8"


def test_a_custom_pass_trains() -> None:
    torch.manual_seed(0)
    model = Net()
    compiled = torch.compile(
        model, backend="qsync", options={"precision": "int8", "inner": "aot_eager", "passes": [keep_head_fp32]}
    )
    compiled(torch.randn(2, 8)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_custom_passes_run_where_they_say_in_the_order_given() -> None:
    @qsync_fx.graph_pass(after="cascade")
    def first(graph: qsync_fx.PrecisionGraph) -> None: ...

    @qsync_fx.graph_pass(after="cascade")
    def second(graph: qsync_fx.PrecisionGraph) -> None: ...

    @qsync_fx.graph_pass(before="lower")
    def third(graph: qsync_fx.PrecisionGraph) -> None: ...

    names = explain(third, first, second).passes
    assert names[names.index("cascade") + 1 :] == ["first", "second", "insert_casts", "third", "lower", "annotate_cost"]


def test_a_pass_has_one_place() -> None:
    with pytest.raises(OptionError, match="one place"):
        qsync_fx.graph_pass(after="assign", before="lower")


def test_an_assignment_outlives_the_plan() -> None:
    @qsync_fx.graph_pass(before="assign")
    def early(graph: qsync_fx.PrecisionGraph) -> None:
        for op in graph.operators(kind="adjustable", pattern="body"):
            op.assign("fp32", reason="before the plan speaks")

    found = {str(op.id): str(op.precision) for op in explain(early).operators}
    assert found["body/linear"] == "fp32"
    assert found["classifier/linear"] == "bf16"


def narrow_a_linear(graph: qsync_fx.PrecisionGraph) -> None:
    """Undoes a cast: the linear then reads FP32 where BF16 is planned."""
    for node in graph.nodes:
        if meta.is_cast(node):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def double_a_cast(graph: qsync_fx.PrecisionGraph) -> None:
    cast = next(node for node in graph.nodes if meta.is_cast(node))
    (reader,) = cast.users
    with graph.graph.inserting_after(cast):
        again = graph.graph.node_copy(cast)
    reader.args = (cast, again, *reader.args[2:])


def leave_a_cast_unread(graph: qsync_fx.PrecisionGraph) -> None:
    cast = next(node for node in graph.nodes if meta.is_cast(node))
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
        ("assign", change_silently, "says why"),
        ("cascade", unassign_a_dependent, "dependent operators follow their inputs"),
        ("lower", narrow_an_output, "the graph takes and returns what Dynamo expects"),
        ("insert_casts", narrow_an_output, "output 0 is torch.float16, and Dynamo expects torch.float32"),
        ("normalize", return_one_more, "it returns 2 values, and Dynamo expects 1"),
        ("lower", take_one_more, "it takes 6 inputs, and Dynamo gives it 5"),
        ("insert_casts", leave_a_cast_unread, "every cast is needed"),
        ("insert_casts", double_a_cast, "every cast is needed and none is doubled"),
        ("lower", narrow_a_linear, "operators read operands of their precision"),
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


def test_no_two_roundings_draw_from_one_stream() -> None:
    @qsync_fx.graph_pass(after="insert_casts")
    def draw_alike(graph: qsync_fx.PrecisionGraph) -> None:
        first, second, *_ = (node for node in graph.nodes if meta.is_part(node, meta.Part.QUANTIZE))
        meta.CAST[second] = dataclasses.replace(meta.CAST[second], stream=meta.CAST[first].stream)

    with pytest.raises(PassError, match="each rounding draws from a stream of its own"):
        explain(draw_alike, precision="int8")


@pytest.mark.parametrize("returned", ["a graph", "a module", "text"])
def test_a_pass_that_returns_something_is_told_that_it_would_be_lost(returned: str) -> None:
    @qsync_fx.graph_pass(after="lower")
    def returns(graph: qsync_fx.PrecisionGraph) -> Any:
        return {"a graph": graph, "a module": graph.module, "text": returned}[returned]

    with pytest.raises(
        PassError, match=r"'returns' returned .*, which would be lost: passes change the graph in place"
    ):
        explain(returns)


class _Counts:
    """A pass as a package may bring one: what it is called with is noted."""

    name = "counts"
    after = "cascade"

    def __init__(self) -> None:
        self.bodies: list[bool] = []

    def __call__(self, graph: qsync_fx.PrecisionGraph) -> None:
        self.bodies.append(graph.parent is not None)


class _Whole(_Counts):
    name = "whole"
    scope = Scope.MODEL


class _Each(_Counts):
    name = "each"
    scope = Scope.BODY


@pytest.mark.parametrize(("kind", "bodies"), [(_Whole, [False]), (_Each, [False, True]), (_Counts, [False, True])])
def test_a_pass_is_called_with_what_its_scope_says(kind: type[_Counts], bodies: list[bool]) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    step = kind()
    qsync_fx.explain(Checkpointed(), torch.randn(2, 8, requires_grad=True), options={"passes": [step]})
    assert step.bodies == bodies


def test_a_pass_says_its_name_and_its_scope_in_its_class() -> None:
    for step in pipeline(Options(gradient_rounding="stochastic"), lowerings()):
        assert {"name", "scope"} <= vars(type(step)).keys(), step
        assert not {"name", "scope"} & {field.name for field in dataclasses.fields(step)}, step  # type: ignore[arg-type]


def test_what_is_put_in_after_lowering_is_charged_to_an_operator() -> None:
    @qsync_fx.graph_pass(after="annotate_cost")
    def tap(graph: qsync_fx.PrecisionGraph) -> None:
        last = graph.operators("adjustable")[-1].node
        with graph.graph.inserting_after(last):
            first = graph.graph.call_function(torch.ops.aten.argmax.default, (last,))
        with graph.graph.inserting_after(first):
            graph.graph.call_function(torch.ops.aten.neg.default, (first,))

    explanation = explain(tap)
    known = {str(operator.id) for operator in explanation.operators}
    put_in = [node for node in explanation.graph_module("tap").graph.nodes if node.target is torch.ops.aten.neg.default]
    assert [charge.owner in known for node in put_in if (charge := meta.charged(node)) is not None] == [True]


def test_every_rule_says_when_it_holds() -> None:
    names = [*explain().passes]
    assert all(rule.since in names and rule.says for rule in RULES)


def test_no_cast_outlives_a_write() -> None:
    """`x` is written to between two readers: each needs its own cast."""

    def model(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        x = x.clone()
        view = x[0:1]
        first = nn.functional.linear(x, weight)
        view.mul_(2)
        second = nn.functional.linear(x, weight)
        return first + second + other

    inputs = [torch.randn(4, 8), torch.randn(8, 8), torch.randn(4, 8)]
    text = qsync_fx.explain(model, *inputs, options={"precision": "bf16"}).graph()
    compiled = torch.compile(model, backend="qsync", options={"precision": "bf16", "inner": "aot_eager"})
    torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=0.05, atol=0.2)
    assert text.count("aten.to.dtype(%clone, bfloat16)") == 2


def test_a_tensor_is_cast_once_for_all_its_readers() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))

    for precision, cast in (("bf16", "aten.to.dtype(%x, bfloat16)"), ("int8", "qsync.quantize(%x,")):
        text = qsync_fx.explain(Attention(), torch.randn(2, 4, 8), options={"precision": precision}).graph()
        assert text.count(cast) == 1


def test_a_write_ends_the_sharing_of_what_it_may_alias_and_no_more() -> None:
    """A batch norm writes its statistics and counts its batches, between the two readers of the block's input."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.beside = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(x)
            return self.norm(self.conv(x)) + self.beside(x)

    for precision, cast in (("bf16", "aten.to.dtype(%relu, bfloat16)"), ("int8", "qsync.quantize(%relu,")):
        text = qsync_fx.explain(Block(), torch.randn(2, 4, 3, 3), options={"precision": precision}).graph()
        assert text.count("aten.add_.Tensor") == 1
        assert text.count(cast) == 1

    def statistics(x: Tensor, weight: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        before = nn.functional.linear(mean, weight)
        y = nn.functional.batch_norm(x, mean, var, training=True)
        return before + nn.functional.linear(mean, weight) + y

    inputs = torch.randn(4, 8), torch.randn(8, 8), torch.zeros(8), torch.ones(8)
    text = qsync_fx.explain(statistics, *inputs, options={"precision": "bf16"}).graph()
    assert text.count("aten.to.dtype(%mean, bfloat16)") == 2
    assert text.count("aten.to.dtype(%weight, bfloat16)") == 1


def test_operators_without_a_lowering_share_their_casts() -> None:
    def model(x: Tensor, first: Tensor, second: Tensor, added: Tensor) -> Tensor:
        left = torch.addmm(added, x, first, beta=0.5)
        return left + torch.addmm(added, x, second, beta=0.5) + torch.mm(x, first)

    inputs = [torch.randn(4, 8), torch.randn(8, 8), torch.randn(8, 8), torch.randn(4, 8)]
    text = qsync_fx.explain(model, *inputs, options={"precision": "int8"}).graph()
    for name in ("x", "first", "second", "added"):
        assert text.count(f"aten.to.dtype(%{name}, bfloat16)") == 1


def test_inverse_casts_cancel() -> None:
    """Autocast's BF16 cast in front of an operator planned in FP32 leaves no trace."""

    def model(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.linear(x, weight)

    explanation = qsync_fx.explain(model, torch.randn(4, 8), torch.randn(8, 8), options={"precision": "fp32"})
    assert "to.dtype(%x" in explanation.graph("autocast")
    assert "bfloat16)" not in explanation.graph("insert_casts").partition("linear")[0]
