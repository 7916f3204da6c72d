"""Reuse of compiled code across batch sizes, plans and models.

The tests count the graphs that the backend compiles. They check values only to see that reused code
computes.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import qsync_fx
from qsync_fx import Plan, PlanError
from tests.support import tiers
from tests.support.models.small_models import Convolutional, Counting, Perceptron, build, compiled

torch.set_num_threads(1)

PRECISIONS = ["fp32", "bf16", "int8", "fp8"]
BATCHES = (4, 8, 6, 5, 12, 3)  # below 16: torch specializes convolutions of larger batches


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def _train(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    return loss


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_batch_size_marked_dynamic_compiles_once(precision: str) -> None:
    backend = Counting()
    model = backend.compile(build(Convolutional), precision=precision)
    for batch in BATCHES:
        x = torch.randn(batch, 1, 8, 8)
        torch._dynamo.mark_dynamic(x, 0)
        _train(model, x)
    assert len(backend.graphs) == 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_changing_batch_sizes_compile_twice(precision: str) -> None:
    """Dynamo assumes a static batch size at the first call and a dynamic one at the second."""
    backend = Counting()
    model = backend.compile(build(Convolutional), precision=precision)
    for batch in BATCHES:
        _train(model, torch.randn(batch, 1, 8, 8))
    assert len(backend.graphs) == 2


@tiers.ALL
def test_changing_sequence_lengths_compile_twice() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 16)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.layer(self.embedding(tokens))

    backend = Counting()
    model = backend.compile(build(Attention), precision="int8")
    for batch, length in ((2, 5), (3, 7), (4, 6), (6, 11), (5, 9)):
        _train(model, torch.randint(20, (batch, length)))
    assert len(backend.graphs) == 2


def test_dynamic_batch_equals_static_batch() -> None:
    x = torch.randn(7, 1, 8, 8)
    static = compiled(build(Convolutional), precision="int8", rounding="nearest")(x)
    torch._dynamo.reset()
    backend = Counting()
    model = build(Convolutional)
    dynamic = backend.compile(model, precision="int8", rounding="nearest")
    dynamic(torch.randn(5, 1, 8, 8))
    dynamic(torch.randn(6, 1, 8, 8))
    model.load_state_dict(build(Convolutional).state_dict())  # the running statistics have changed
    assert torch.equal(dynamic(x), static)
    assert len(backend.graphs) == 2


def test_equal_plans_share_code_and_others_compile_once() -> None:
    """Plans are equal by content, regardless of identity, notes and order of construction."""
    backend, model, x = Counting(), build(Perceptron), torch.randn(4, 16)

    def run(plan: Plan) -> int:
        before = len(backend.graphs)
        backend.compile(model, plan=plan)(x).sum().backward()
        return len(backend.graphs) - before

    assert run(Plan.uniform("int8")) == 1
    assert run(Plan.uniform("int8")) == 0
    assert run(Plan("int8", notes={"made by": "a test"})) == 0
    assert run(Plan.from_json(Plan.uniform("int8").to_json())) == 0
    assert run(Plan.uniform("int8").with_precision("head", "bf16")) == 1
    assert run(Plan("int8", patterns=[("head", "bf16")])) == 0
    assert run(Plan.uniform("bf16")) == 1
    assert run(Plan.uniform("int8")) == 0, "the code of an earlier plan is reused"


def test_only_different_options_recompile() -> None:
    backend, model, x = Counting(), build(Perceptron), torch.randn(4, 16)

    def run(**options: object) -> int:
        before = len(backend.graphs)
        backend.compile(model, **options)(x).sum().backward()
        return len(backend.graphs) - before

    def head_in_fp32(graph: qsync_fx.PrecisionGraph) -> None:
        for operator in graph.operators("adjustable", "head"):
            operator.assign("fp32", reason="a test")

    assert run(precision="int8") == 1
    assert run(precision="int8", rounding="nearest") == 1
    assert run(precision="int8", rounding="nearest") == 0
    assert run(precision="int8", passes=[qsync_fx.graph_pass(head_in_fp32)]) == 1
    assert run(precision="int8", passes=[qsync_fx.graph_pass(head_in_fp32)]) == 0, (
        "a pass with the same function is not recompiled"
    )


def test_changed_plan_applies_after_recompilation() -> None:
    model, x = build(Perceptron), torch.randn(64, 16)
    exact = compiled(model, precision="fp32")(x)
    rounded = compiled(model, precision="int8", rounding="nearest")(x)
    assert torch.equal(exact, model(x))
    assert 1e-4 < (rounded - exact).abs().max() < 0.1
    assert torch.equal(compiled(model, precision="fp32")(x), exact)


def test_two_models_in_one_process() -> None:
    """Two instances of one class share their code object, but each has its own plan."""
    x = torch.randn(32, 16)
    first, second = build(Perceptron, 1), build(Perceptron, 2)
    in_fp32, in_int8 = (
        compiled(first, precision="fp32"),
        compiled(second, precision="int8", rounding="nearest"),
    )
    for _ in range(2):
        assert torch.equal(in_fp32(x), first(x))
        error = (in_int8(x) - second(x)).abs().max()
        assert 1e-4 < error < 0.1
    in_fp32(x).sum().backward()
    assert all(p.grad is None for p in second.parameters())
    in_int8(x).sum().backward()
    assert all(p.grad is not None for p in (*first.parameters(), *second.parameters()))


def test_switching_between_training_and_evaluation_compiles_each_once() -> None:
    backend, model = Counting(), build(lambda: Perceptron(0.5))
    fast, x = backend.compile(model, precision="int8"), torch.randn(4, 16)
    for _ in range(3):
        model.train()
        fast(x).sum().backward()
        model.eval()
        with torch.no_grad():
            fast(x)
    assert len(backend.graphs) == 2


def test_model_compile() -> None:
    model = build(Perceptron)
    keys = list(model.state_dict())
    expected = model(torch.ones(4, 16))
    model.compile(backend="qsync", options={"precision": "fp32", "inner_backend": "aot_eager"})
    assert torch.equal(model(torch.ones(4, 16)), expected)
    assert list(model.state_dict()) == keys
    model.compile(
        backend="qsync",
        options={"precision": "int8", "rounding": "nearest", "inner_backend": "aot_eager"},
    )
    actual = model(torch.ones(4, 16))
    assert not torch.equal(actual, expected)
    assert torch.allclose(actual, expected, atol=0.1)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def test_ignored_plan_is_reported() -> None:
    """Beyond its recompile limit Dynamo runs the model uncompiled.

    The backend warns at the limit. Further calls raise an error until the limit is raised.
    """
    model = build(Scaled)
    fast, x = compiled(model, precision="bf16"), torch.randn(2, 4)
    with (
        torch._dynamo.config.patch(recompile_limit=3),
        warnings.catch_warnings(record=True) as recorded,
    ):
        warnings.simplefilter("always")
        for scale in (1, 2, 3):
            model.scale = scale
            assert not torch.equal(fast(x), model(x))
            # torch may issue warnings, too, as on Python 3.13.0.
            ours = [str(w.message) for w in recorded if w.filename == __file__]
            assert ["Scaled.forward" in text for text in ours] == [True] * (scale >= 3)
        model.scale = 4
        for _ in range(2):
            with pytest.raises(
                PlanError, match=r"has reached torch\._dynamo\.config\.recompile_limit"
            ) as caught:
                fast(x)
            assert "Scaled.forward" in str(caught.value.where) and __file__ in str(
                caught.value.where
            )
            assert "recompile_limit higher" in str(caught.value.do)
        model.scale = 2
        assert not torch.equal(fast(x), model(x)), "compiled versions still run at the limit"
    model.scale = 4
    assert not torch.equal(fast(x), model(x)), (
        "the model is compiled again under the restored limit"
    )
    assert "recompile_limit" in ours[0]


def test_the_limit_of_all_versions_is_an_error_too() -> None:
    model, x = build(Scaled), torch.randn(2, 4)
    fast = compiled(model, precision="bf16")
    with torch._dynamo.config.patch(accumulated_recompile_limit=2):
        for model.scale in (1, 2):
            fast(x)
        model.scale = 3
        with pytest.raises(
            PlanError, match=r"has reached torch\._dynamo\.config\.accumulated_recompile_limit"
        ):
            fast(x)


def test_plan_beyond_the_recompile_limit_is_an_error() -> None:
    """Dynamo counts versions of a function under all options: no graph would run this plan."""
    model, x = build(Scaled), torch.randn(2, 4)
    with torch._dynamo.config.patch(recompile_limit=2):
        for precision in ("bf16", "int8"):
            compiled(model, precision=precision)(x)
        with pytest.raises(PlanError, match="without the plan"):
            compiled(model, plan=Plan(operators={"layer/linear": "fp16"}))(x)
        other = compiled(model, plan=Plan(operators={"elsewhere/linear": "fp16"}))
        assert torch.equal(other(x), model(x)), (
            "a plan that selects no operator of the model is not an error"
        )


def test_recompile_limit_is_reported_once_without_a_plan() -> None:
    model, x = build(Scaled), torch.randn(2, 4)
    fast = compiled(model)
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        warnings.catch_warnings(record=True) as recorded,
    ):
        warnings.simplefilter("always")
        for scale in (1, 2, 3, 4, 3):
            model.scale = scale
            fast(x)
            ours = [str(w.message) for w in recorded if w.filename == __file__]
            assert ["run uncompiled" in text for text in ours] == [True] * (scale >= 3)


class Plainly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * self.scale


def test_a_function_without_anything_planned_may_run_as_written() -> None:
    model, x = Plainly(), torch.randn(2, 4)
    fast = compiled(model, precision="bf16")
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        warnings.catch_warnings(record=True) as recorded,
    ):
        warnings.simplefilter("always")
        for scale in (1, 2, 3):
            model.scale = scale
            assert torch.equal(fast(x), model(x))
    assert not [w for w in recorded if w.filename == __file__]
