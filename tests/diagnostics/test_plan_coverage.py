"""Plans that are applied only in part: `plan_coverage` names each module that Dynamo does not
compile, with the reason and a remedy. A training step warns, or raises with the option "strict".
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx import Plan, PlanError
from tests.support.compiling.applied_steps import (
    Breaking,
    Mode,
    Outer,
    Plain,
    Scaled,
    compiled,
    step,
    uncovered,
)
from tests.support.models.small_models import Perceptron, build

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


# Plans that are applied.


def test_every_module_has_its_running_formats() -> None:
    model = build(Perceptron)
    plan = Plan("int8", patterns=[("head", "bf16")])
    assert step(model, lambda: compiled(model, plan=plan)(torch.randn(4, 16))) == []
    coverage = qsync_fx.plan_coverage(model)
    assert {
        module.path: [str(ran.precision) for ran in module.operators] for module in coverage.modules
    } == {
        "layers.0": ["int8"],
        "layers.1": ["bf16"],
        "layers.2": ["bf16"],
        "layers.3": ["int8"],
        "layers.4": ["bf16"],
        "head": ["bf16"],
    }
    explained = qsync_fx.explain(build(Perceptron), torch.randn(4, 16), options={"plan": plan})
    assert [(ran.id, ran.precision, ran.reason) for ran in coverage.operators] == [
        (operator.id, operator.precision, operator.reason) for operator in explained.operators
    ]
    assert coverage.complete
    assert not coverage.uncovered
    text = str(coverage)
    assert "head/linear" in text
    assert "test_plan_coverage.py" not in text, "source lines are those of the model"
    assert text.endswith("all that is planned is applied")


def test_a_model_that_was_never_compiled_or_never_called() -> None:
    model = Plain()
    assert uncovered(model) == {"first": "not given", "second": "not given"}
    fast = compiled(model, precision="bf16")
    assert uncovered(model) == {"first": "not met", "second": "not met"}
    fast(torch.randn(4, 16))
    assert uncovered(model) == {}
    assert "torch.compile was not given it" in str(qsync_fx.plan_coverage(Plain()))
    with pytest.raises(qsync_fx.OptionError, match="not a module"):
        qsync_fx.plan_coverage(print)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"precision": "int8"}], ids=["default", "int8"])
def test_plan_is_not_applied_before_the_first_call(options: dict[str, Any]) -> None:
    model = Plain()
    fast = compiled(model, **options)
    before = qsync_fx.plan_coverage(fast)
    assert not before.called and not before.complete
    assert "no part of it has run in compiled code yet" in str(before)
    assert "call the result of torch.compile" in str(before)
    assert "all that is planned is applied" not in str(before)
    fast(torch.randn(4, 16))
    after = qsync_fx.plan_coverage(fast)
    assert after.called and after.complete
    assert str(after).endswith("all that is planned is applied")
    assert "yet" not in str(after)
    torch._dynamo.reset()
    assert not qsync_fx.plan_coverage(fast).called, "torch._dynamo.reset discards the compiled code"


def test_a_part_that_is_compiled_by_itself_and_was_not_called() -> None:
    model = Outer(Plain())
    start, inner = compiled(model.start, precision="bf16"), compiled(model.inner, precision="bf16")
    inner(torch.randn(4, 16))
    # Ids of the full model: the function between the layers of `inner` belongs to `inner`.
    ids = {str(ran.id) for ran in qsync_fx.plan_coverage(model).operators}
    assert ids == {"inner.first/linear", "inner/relu", "inner.second/linear"}
    text = str(qsync_fx.plan_coverage(model))
    assert "no call of it has been compiled" in text
    assert text.endswith("all that is planned is applied, as far as the model has been called")
    start(torch.randn(4, 16))
    assert str(qsync_fx.plan_coverage(model)).endswith("all that is planned is applied")


def test_modules_whose_parameters_others_use_are_applied() -> None:
    """Tied weights, and the output projection of attention, whose module is never called."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.attention = (
                nn.Embedding(20, 16),
                nn.MultiheadAttention(16, 2, batch_first=True),
            )

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            x, _ = self.attention(x, x, x, need_weights=False)
            return x @ self.embedding.weight.T

    model = Tied()
    assert step(model, lambda: compiled(model, precision="bf16")(torch.randint(20, (2, 5)))) == []
    assert uncovered(model) == {}


def test_modules_that_share_compiled_code() -> None:
    """Dynamo compiles the first block and silently reuses its code for the others."""

    class Block(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    model = nn.Sequential(*(Block() for _ in range(4)))
    outer = Outer(model, out=16)
    step(outer, lambda: compiled(outer, precision="bf16")(torch.randn(4, 16)))
    ids = {str(ran.id) for ran in qsync_fx.plan_coverage(outer).operators}
    assert {
        f"inner.{index}.{name}/linear" for index in range(4) for name in ("first", "second")
    } <= ids
    twin = copy.deepcopy(model)
    compiled(model, precision="bf16")(torch.randn(4, 16))
    compiled(twin, precision="bf16")(torch.randn(4, 16))
    assert uncovered(twin) == {}


def test_models_of_torch_classes_share_compiled_code() -> None:
    """Dynamo compiles its wrapper around the forward of a Sequential, and reuses it for the next
    Sequential after the first is deleted.
    """

    def trained(width: int) -> list[str]:
        model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 3))
        assert (
            step(model, lambda: compiled(model, precision="bf16", strict=True)(torch.randn(4, 16)))
            == []
        )
        assert qsync_fx.plan_coverage(model).complete
        return [f"{ran.id} {ran.precision}" for ran in qsync_fx.plan_coverage(model).operators]

    first = trained(16)
    assert first == ["0/linear bf16", "1/relu bf16", "2/linear bf16"]
    assert trained(16) == first
    assert trained(8) == first, "a model of another width is compiled separately"


def test_the_options_of_the_last_compilation_count() -> None:
    model, x = Plain(), torch.randn(4, 16)
    for precision in ("int8", "bf16"):
        compiled(model, precision=precision)(x)
        assert {
            str(ran.precision)
            for ran in qsync_fx.plan_coverage(model).operators
            if ran.kind == "adjustable"
        } == {precision}


# Reading options.


def test_a_plan_file_is_read_once(tmp_path: Any) -> None:
    path = tmp_path / "plan.json"
    Plan("int8").save(path)
    model, x = Scaled(), torch.randn(4, 16)
    options = {"plan": path, "inner_backend": "eager"}
    fast = torch.compile(model, backend="qsync", options=options)
    path.unlink()
    for model.scale in (1, 2):
        fast(x)
        assert {
            str(ran.precision)
            for ran in qsync_fx.plan_coverage(model).operators
            if ran.kind == "adjustable"
        } == {"int8"}
    assert options == {"plan": path, "inner_backend": "eager"}, (
        "torch.compile does not change the user's options"
    )
    with pytest.raises(PlanError, match=r"plan\.json"):
        torch.compile(model, backend="qsync", options=options)


@pytest.mark.parametrize("call_style", ["function", "method", "decorator", "module"])
def test_wrong_options_raise_at_torch_compile(call_style: str) -> None:
    model: Any = Plain()
    make: dict[str, Callable[..., Any]] = {
        "function": lambda **arguments: torch.compile(model.forward, **arguments),
        "module": lambda **arguments: torch.compile(model, **arguments),
        "method": lambda **arguments: model.compile(**arguments),
        "decorator": lambda **arguments: torch.compile(**arguments)(lambda x: model(x)),
    }
    with pytest.raises(qsync_fx.OptionError, match="unknown option 'precison'"):
        make[call_style](backend="qsync", options={"precison": "int8"})
    with pytest.raises(qsync_fx.OptionError, match="has no mode"):
        torch.compile(model, backend="qsync", mode="max-autotune")


def test_other_backends_are_left_alone() -> None:
    def backend(module: Any, inputs: Any) -> Any:
        return module.forward

    compiled(Plain(), precision="bf16")
    model = Plain()
    fast = torch.compile(model, backend=backend)
    with Mode():
        fast(torch.randn(4, 16))
    assert type(fast.dynamo_ctx.callback).__name__ == "CatchErrorsWrapper"
    assert uncovered(model) == {"first": "not given", "second": "not given"}


def test_functions_and_trainers() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = Plain()

        def loss(self, x: Tensor) -> Tensor:
            return self.model(x).square().mean()

    trainer = Trainer()
    assert (
        step(
            trainer.model,
            lambda: compiled(trainer.loss, precision="bf16", strict=True)(torch.randn(4, 16)),
        )
        == []
    )
    assert uncovered(trainer.model) == {}
    assert [str(ran.precision) for ran in qsync_fx.plan_coverage(trainer.model).operators] == [
        "bf16"
    ] * 3

    def run(network: nn.Module, x: Tensor) -> Tensor:
        for _ in range(1):
            torch._dynamo.graph_break()
        return network(x)

    plain = Plain()
    assert (
        step(plain, lambda: compiled(run, precision="bf16", strict=True)(plain, torch.randn(4, 16)))
        == []
    )
    assert uncovered(plain) == {}


def test_explain_lists_modules_outside_graphs() -> None:
    inner = Plain()
    inner.forward = torch.compiler.disable(inner.forward)  # type: ignore[method-assign]
    model, x = Outer(inner), torch.randn(4, 16)
    explanation = qsync_fx.explain(model, x, options={"precision": "int8"})
    assert [
        (module.path, str(module.cause.why), module.lost) for module in explanation.uncovered
    ] == [
        ("inner.first", "disabled", True),
        ("inner.second", "disabled", True),
    ]
    text = str(explanation)
    assert "inner.second (Linear)   in no graph   as written (not int8)" in text
    assert "remove torch.compiler.disable" in text
    assert uncovered(model)["inner.first"] == "not given", "explain does not compile the model"
    plan = Plan("int8", patterns=[("inner", "fp32")])
    assert not any(
        module.lost for module in qsync_fx.explain(model, x, options={"plan": plan}).uncovered
    )
    with pytest.raises(PlanError, match="selects none"):
        qsync_fx.explain(model, x, options={"plan": Plan("int8", patterns=[("inner", "bf16")])})


def test_required_torch_internals_exist() -> None:
    """List the private names of torch that the project depends on, to identify a missing one."""
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch._dynamo.eval_frame import innermost_backend
    from torch._dynamo.utils import counters

    fast = compiled(Plain(), precision="bf16")
    callback = fast.dynamo_ctx.callback
    assert isinstance(callback, CatchErrorsWrapper)
    assert callback.hooks is not None
    wrapper = innermost_backend(callback)
    assert wrapper.compiler_fn is lookup_backend("qsync")  # type: ignore[attr-defined]
    assert wrapper.kwargs == {"options": qsync_fx.Options(precision="bf16", inner_backend="eager")}  # type: ignore[attr-defined]
    broken = Breaking()
    before = sum(counters["graph_break"].values())
    compiled(broken, precision="bf16")(torch.randn(4, 16))
    assert sum(counters["graph_break"].values()) > before
    fast(torch.randn(4, 16))
    torch._dynamo.reset()
    assert set(uncovered(fast).values()) == {"not met"}, (
        "torch.compiler.reset calls the backend's reset"
    )
