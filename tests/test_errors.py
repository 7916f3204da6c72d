"""Errors as callers of a compiled model see them: project classes with what, where and do.

Dynamo wraps backend errors, and changes the arguments of errors that it does not wrap. Neither may
be visible to the user.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx import (
    DeviceError,
    OptionError,
    PassError,
    Plan,
    PlanError,
    PrecisionError,
    PrecisionGraph,
    QSyncError,
    graph_pass,
)
from tests.support.models.small_models import Convolutional, Perceptron, build, compiled

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def error_of(model: nn.Module, *inputs: Any, **options: Any) -> QSyncError:
    """Return the error of torch.compile or the first call; a repeated call and `explain` must raise
    the same error.
    """
    with pytest.raises(QSyncError) as first:
        compiled(model, **options)(*inputs)
    with pytest.raises(QSyncError) as second:
        compiled(model, **options)(*inputs)
    with pytest.raises(QSyncError) as explained:
        qsync_fx.explain(model, *inputs, options=options)
    error = first.value
    for other in (second.value, explained.value):
        assert type(other).__name__ == type(error).__name__
        assert other.what == error.what
    for word in ("TORCHDYNAMO", "TORCH_LOGS", "BackendCompilerFailed", "qsync raised"):
        assert word not in str(error)
    assert error.what
    assert error.where, f"the error has no location: {error}"
    assert error.do, f"the error has no remedy: {error}"
    assert str(error) == f"{error.what}\n  where: {error.where}\n  do:    {error.do}"
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, QSyncError)
    assert (str(again), type(again).__name__) == (str(error), type(error).__name__)
    return error


def error_of_perceptron(**options: Any) -> QSyncError:
    return error_of(build(Perceptron), torch.randn(4, 16), **options)


class TestOptions:
    def test_an_unknown_option_names_the_nearest(self) -> None:
        error = error_of_perceptron(precison="int8")
        assert isinstance(error, OptionError)
        assert "precison" in error.what
        assert "did you mean 'precision'?" in str(error.do)

    def test_an_unknown_precision_names_the_nearest(self) -> None:
        error = error_of_perceptron(precision="in8")
        assert isinstance(error, OptionError)
        assert "in8" in error.what
        assert "did you mean 'int8'?" in str(error.do)

    def test_arguments_that_other_backends_have(self) -> None:
        with pytest.raises(OptionError, match="mode"):
            torch.compile(build(Perceptron), backend="qsync", mode="max-autotune")(
                torch.randn(4, 16)
            )


class TestPlans:
    def test_plan_for_another_model_lists_missing_and_extra_operators(self) -> None:
        x = torch.randn(4, 1, 8, 8)
        plan = qsync_fx.explain(build(Convolutional), x, options={"precision": "int8"}).plan()
        error = error_of_perceptron(plan=plan)
        assert isinstance(error, PlanError)
        for missing in ("layers.0/linear", "layers.3/linear"):
            assert missing in str(error.where)
        for extra in ("conv/conv2d", "norm/batch_norm", "hidden/linear"):
            assert extra in str(error.where)

    def test_pattern_without_a_match(self) -> None:
        error = error_of_perceptron(
            plan=Plan("int8", patterns=[("layers.0", "bf16"), ("heads", "bf16")])
        )
        assert isinstance(error, PlanError)
        assert "'heads'" in error.what
        assert "patterns[1]" in str(error.where)
        assert "head" in str(error.do)

    def test_a_model_that_dynamo_leaves_to_python(self) -> None:
        class Loop(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(16, 16)

            def forward(self, x: Tensor) -> Tensor:
                for _ in range(2):
                    x = self.linear(x)
                    torch._dynamo.graph_break()
                return x

        with pytest.raises(PlanError, match="compiled no part of the model") as caught:
            qsync_fx.explain(
                Loop(),
                torch.randn(4, 16),
                options={"plan": Plan("int8", patterns=[("linear", "bf16")])},
            )
        assert "graph_break" in str(caught.value.where)

    def test_the_file(self, tmp_path: Path) -> None:
        good = Plan.uniform("int8").with_precision("head", "bf16").to_json()
        newer = json.loads(good) | {"version": 99}
        files = {
            "truncated": good[: len(good) // 2],
            "newer": json.dumps(newer),
            "nested": "[" * 100_000 + "]" * 100_000,
            "huge": good.replace('"version": 1', '"version": 1' + "0" * 10_000),
            "types": good.replace('"int8"', "[1, 2]"),
            "empty": "",
            "other": '{"weights": [1, 2, 3]}',
        }
        for name, text in files.items():
            path = tmp_path / f"{name}.json"
            path.write_text(text)
            error = error_of_perceptron(plan=str(path))
            assert isinstance(error, PlanError), name
            assert str(path) in str(error.where), name
            assert len(str(error)) < 2000, name
            assert (name != "newer") or "99" in str(error)

    def test_no_file(self, tmp_path: Path) -> None:
        error = error_of_perceptron(plan=tmp_path / "missing.json")
        assert isinstance(error, PlanError)
        assert "missing.json" in str(error)


def _without_value(graph: PrecisionGraph) -> None:
    del graph.operators("adjustable", "head")[0].node.meta["val"]


def _without_reason(graph: PrecisionGraph) -> None:
    graph.operators("adjustable", "head")[0].update(reason="")


def _planned_but_lost(graph: PrecisionGraph) -> None:
    operator = graph.operators("adjustable", "head")[0]
    operator.update(precision=qsync_fx.FORMATS["int8"], planned=qsync_fx.FORMATS["int8"])


def _another_type(graph: PrecisionGraph) -> None:
    node = graph.operators("adjustable", "head")[0].node
    with graph.graph.inserting_before(node):
        half = graph.graph.call_function(torch.ops.aten.to.dtype, (node.args[0], torch.float16))
    graph.propagate(half)
    node.replace_input_with(node.args[0], half)


class TestPasses:
    @pytest.mark.parametrize(
        ("after", "breaks", "says"),
        [
            ("normalize", _without_value, "value"),
            ("insert_casts", _another_type, "f16"),
            ("lower", _without_value, "value"),
            ("lower", _planned_but_lost, "planned precision is present in the lowered graph"),
        ],
    )
    def test_pass_that_breaks_an_invariant_is_named_with_the_node(
        self, after: str, breaks: Callable[[PrecisionGraph], None], says: str
    ) -> None:
        error = error_of_perceptron(precision="bf16", passes=[graph_pass(after=after)(breaks)])
        assert isinstance(error, PassError)
        assert repr(breaks.__name__) in error.what
        assert says in error.what
        assert "node %" in str(error.where)
        assert "%linear" in error.graph

    def test_pass_that_raises_is_named_with_its_line(self) -> None:
        def fails(graph: PrecisionGraph) -> None:
            graph.operators("adjustable")[17].assign("fp32", reason="there is none")

        error = error_of_perceptron(passes=[graph_pass(fails)])
        assert isinstance(error, PassError)
        assert "'fails'" in error.what
        assert "IndexError" in error.what
        assert "test_errors.py:" in str(error.where)

    def test_pass_without_a_position(self) -> None:
        error = error_of_perceptron(passes=[graph_pass(after="asign")(_without_reason)])
        assert isinstance(error, OptionError)
        assert "'asign'" in error.what
        assert "did you mean 'assign'?" in str(error.do)

    def test_pass_that_is_not_a_pass(self) -> None:
        assert isinstance(error_of_perceptron(passes=[len]), OptionError)
        error = error_of_perceptron(passes=["no.such.pass"])
        assert isinstance(error, OptionError)
        assert "no.such.pass" in error.what

    def test_assignment_to_a_dependent_operator(self) -> None:
        def tanh_in_int8(graph: PrecisionGraph) -> None:
            next(op for op in graph.operators() if op.id.operator == "tanh").assign(
                "int8", reason="a test"
            )

        error = error_of_perceptron(passes=[graph_pass(tanh_in_int8)])
        assert isinstance(error, PrecisionError)
        assert "dependent" in error.what
        assert "layers.4/tanh" in str(error.where)
        assert "small_models.py" in str(error.where)

    def test_assigning_an_unknown_precision(self) -> None:
        def typo(graph: PrecisionGraph) -> None:
            graph.operators("adjustable")[0].assign("fp23", reason="a typo")

        error = error_of_perceptron(passes=[graph_pass(typo)])
        assert isinstance(error, PrecisionError)
        assert "fp23" in error.what
        assert "fp32" in str(error.do)


def test_a_device_that_is_not_supported() -> None:
    error = error_of(
        build(Perceptron).to("meta"), torch.randn(4, 16, device="meta"), precision="int8"
    )
    assert isinstance(error, DeviceError)
    assert "meta" in error.what
    assert "CPU" in str(error.do)


def test_errors_of_the_model_are_not_wrapped() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.ones(3, 3)

    for run in (compiled(Fails(), precision="int8"), lambda x: qsync_fx.explain(Fails(), x)):
        with pytest.raises(Exception, match=r"size|shape") as caught:
            run(torch.randn(4, 16))
        assert not isinstance(caught.value, QSyncError)


def test_a_model_that_failed_compiles_once_the_cause_is_gone() -> None:
    model, x = build(Perceptron), torch.randn(4, 16)
    with pytest.raises(OptionError):
        compiled(model, precision="in8")(x)
    assert compiled(model, precision="fp32")(x).equal(model(x))
