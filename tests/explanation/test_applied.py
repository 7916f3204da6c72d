"""A plan that is not applied is never silent: whatever keeps Dynamo from compiling a part of a model, `applied` names it with the reason
and the way out, a training step warns of it, and with the option "strict" it raises.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Perceptron, build
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import qsync_fx
from qsync_fx import Plan, PlanError, PlanWarning

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="qsync", options={"inner": "eager", **options})


def step(model: nn.Module, call: Callable[[], Tensor]) -> list[str]:
    """Trains one step and returns what it warns of."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    call().square().mean().backward()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(warning.message) for warning in told if issubclass(warning.category, PlanWarning)]


def uncovered(model: nn.Module) -> dict[str, str]:
    return {module.path: str(module.cause.why) for module in qsync_fx.applied(model).uncovered}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class Outer(nn.Module):
    """Calls `inner` between two layers, on what it takes and gives."""

    def __init__(self, inner: nn.Module, out: int = 4) -> None:
        super().__init__()
        self.start, self.inner, self.end = nn.Linear(16, 16), inner, nn.Linear(out, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.start(x))
        return self.end(x if isinstance(x, Tensor) else x[0])


# What is applied.


def test_every_module_with_what_runs_in_it() -> None:
    model = build(Perceptron)
    plan = Plan("int8", patterns=[("head", "bf16")])
    assert step(model, lambda: compiled(model, plan=plan)(torch.randn(4, 16))) == []
    found = qsync_fx.applied(model)
    assert {module.path: [str(ran.precision) for ran in module.operators] for module in found.modules} == {
        "layers.0": ["int8"],
        "layers.1": ["bf16"],
        "layers.2": ["bf16"],
        "layers.3": ["int8"],
        "layers.4": ["bf16"],
        "head": ["bf16"],
    }
    explained = qsync_fx.explain(build(Perceptron), torch.randn(4, 16), options={"plan": plan})
    assert [(ran.id, ran.precision, ran.reason) for ran in found.operators] == [
        (operator.id, operator.precision, operator.reason) for operator in explained.operators
    ]
    assert found.complete
    assert not found.uncovered
    text = str(found)
    assert "head/linear" in text
    assert "test_applied.py" not in text, "the lines are those of the model"
    assert text.endswith("all that is planned is applied")


def test_a_model_that_was_never_compiled_or_never_called() -> None:
    model = Plain()
    assert uncovered(model) == {"first": "not given", "second": "not given"}
    fast = compiled(model, precision="bf16")
    assert uncovered(model) == {"first": "not met", "second": "not met"}
    fast(torch.randn(4, 16))
    assert uncovered(model) == {}
    assert "torch.compile was not given it" in str(qsync_fx.applied(Plain()))
    with pytest.raises(qsync_fx.OptionError, match="takes a module"):
        qsync_fx.applied(print)  # type: ignore[arg-type]


def test_modules_whose_parameters_others_use_are_applied() -> None:
    """Tied weights, and the output projection of attention, which is never called."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.attention = nn.Embedding(20, 16), nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            x, _ = self.attention(x, x, x, need_weights=False)
            return x @ self.embedding.weight.T

    model = Tied()
    assert step(model, lambda: compiled(model, precision="bf16")(torch.randint(20, (2, 5)))) == []
    assert uncovered(model) == {}


def test_modules_that_share_compiled_code() -> None:
    """Dynamo compiles the first block's code, and uses it for the others without a word."""

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
    found = {str(ran.id) for ran in qsync_fx.applied(outer).operators}
    assert {f"inner.{at}.{name}/linear" for at in range(4) for name in ("first", "second")} <= found
    twin = copy.deepcopy(model)
    compiled(model, precision="bf16")(torch.randn(4, 16))
    compiled(twin, precision="bf16")(torch.randn(4, 16))
    assert uncovered(twin) == {}


def test_the_options_of_the_last_compilation_count() -> None:
    model, x = Plain(), torch.randn(4, 16)
    for precision in ("int8", "bf16"):
        compiled(model, precision=precision)(x)
        assert {str(ran.precision) for ran in qsync_fx.applied(model).operators if ran.kind == "adjustable"} == {
            precision
        }


# What is not, by reason.


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode() -> None:
    model = Plain()

    def call() -> Tensor:
        with _Mode():
            return compiled(model, precision="bf16")(torch.randn(4, 16))

    (told,) = step(model, call)
    assert told.startswith("the plan is not applied: 2 modules of Plain run as written")
    assert "first (Linear), second (Linear): a TorchDispatchMode is active" in told
    assert "Plain.forward" in told
    assert "call the model outside of the mode" in told
    assert uncovered(model) == {"first": "mode", "second": "mode"}


@pytest.mark.parametrize("rnn", [nn.LSTM, nn.GRU, nn.RNN])
def test_rnns(rnn: Callable[..., nn.Module]) -> None:
    model = Outer(rnn(16, 4, batch_first=True))
    (told,) = step(model, lambda: compiled(model, precision="bf16")(torch.randn(2, 3, 16)))
    assert "start (Linear), end (Linear): Dynamo leaves a function that calls an RNN to Python (Outer.forward" in told
    assert "allow_rnn" in told
    assert uncovered(model) == {"start": "rnn", "inner": "rnn", "end": "rnn"}

    class Apart(Outer):
        """The way out that the warning names."""

        @torch.compiler.disable
        def recurrent(self, x: Tensor) -> Tensor:
            return self.inner(x)[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.recurrent(self.start(x)))

    apart = Apart(rnn(16, 4, batch_first=True))
    assert step(apart, lambda: compiled(apart, precision="bf16")(torch.randn(2, 3, 16))) == []
    assert uncovered(apart) == {"inner": "disabled"}


def test_a_full_backward_hook() -> None:
    model = Plain()
    model.first.register_full_backward_hook(lambda *_: None)
    (told,) = step(model, lambda: compiled(model, precision="bf16")(torch.randn(4, 16)))
    assert "1 module of Plain runs as written" in told
    assert "first (Linear): it has a full backward hook" in told
    assert "compiled_autograd" in told
    assert uncovered(model) == {"first": "backward hook"}


def test_disabled() -> None:
    inner = Plain()
    inner.forward = torch.compiler.disable(inner.forward)  # type: ignore[method-assign]
    model = Outer(inner)
    (told,) = step(model, lambda: compiled(model, precision="bf16")(torch.randn(4, 16)))
    assert "inner.first (Linear), inner.second (Linear): torch.compiler.disable stands around it" in told
    assert uncovered(model) == {"inner.first": "disabled", "inner.second": "disabled"}

    class Whole(Plain):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    whole = Whole()
    (told,) = step(whole, lambda: compiled(whole, precision="bf16")(torch.randn(4, 16)))
    assert "Whole.forward" in told
    assert uncovered(whole) == {"first": "disabled", "second": "disabled"}


def test_a_forward_that_dynamo_gives_up_on() -> None:
    class Class(Plain):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(1):

                class Result(tuple):
                    pass

                x = self.first(x)
            return Result((self.second(x),))[0]

    model = Class()
    (told,) = step(model, lambda: compiled(model, precision="bf16")(torch.randn(4, 16)))
    assert "Dynamo left the function that calls it to Python: Invalid call to __build_class__" in told
    assert uncovered(model) == {"first": "skipped", "second": "skipped"}


def test_each_reason_is_given_to_the_modules_it_holds_for() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.first, self.second = nn.Linear(16, 16), Plain(), nn.Linear(4, 4)
            self.first.forward = torch.compiler.disable(self.first.forward)  # type: ignore[method-assign]
            self.second.register_full_backward_hook(lambda *_: None)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(self.start(x)))

    model = Two()
    step(model, lambda: compiled(model, precision="bf16")(torch.randn(4, 16)))
    assert uncovered(model) == {"first.first": "disabled", "first.second": "disabled", "second": "backward hook"}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(16, 4), 1

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def test_the_limit_of_versions() -> None:
    model = Scaled()
    fast = compiled(model, precision="bf16")
    with torch._dynamo.config.patch(recompile_limit=2):
        fast(torch.randn(4, 16))
        model.scale = 2
        with pytest.warns(UserWarning, match="this is version 2"):
            fast(torch.randn(4, 16))
        assert uncovered(model) == {}
        model.scale = 3
        with pytest.raises(PlanError, match="recompile_limit"):
            fast(torch.randn(4, 16))
    assert uncovered(model) == {"layer": "limit"}
    assert qsync_fx.applied(model).operators, "what was compiled before runs on"


def test_dynamo_switched_off() -> None:
    model = Plain()
    fast = compiled(model, precision="bf16")
    with torch.compiler.set_stance("force_eager"):
        (told,) = step(model, lambda: fast(torch.randn(4, 16)))
    assert "Dynamo has met nothing of the model" in told
    assert "set_stance" in told


# The check of a plan.


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


WRONG = [
    ({"patterns": [("first/lienar", "int8")]}, "the pattern 'first/lienar' (int8) names nothing", "first/linear"),
    ({"operators": {"second/linear#1": "int8"}}, "the operator second/linear#1 (int8) names nothing", "second/linear"),
]


@pytest.mark.parametrize(("wrong", "told", "near"), WRONG)
def test_what_decides_on_nothing_is_known_after_a_step(wrong: dict[str, Any], told: str, near: str) -> None:
    model, plan = Breaking(), Plan("bf16", **wrong)
    (text,) = step(model, lambda: compiled(model, plan=plan)(torch.randn(4, 16)))
    assert text.startswith("the plan is not applied: 1 entry of the plan decides on nothing")
    assert told in text
    assert f"nearest: {near}" in text
    assert told in str(qsync_fx.applied(model))
    assert not qsync_fx.applied(model).complete


@pytest.mark.parametrize(("wrong", "told", "near"), WRONG)
def test_strict_raises_it(wrong: dict[str, Any], told: str, near: str) -> None:
    model, plan = Breaking(), Plan("bf16", **wrong)
    with pytest.raises(PlanError) as caught:
        step(model, lambda: compiled(model, plan=plan, strict=True)(torch.randn(4, 16)))
    assert told in str(caught.value.where)
    assert near in str(caught.value.do)


@pytest.mark.parametrize("entry", [{"patterns": [("frist", "int8")]}, {"operators": {"frist/linear": "int8"}}])
def test_a_module_that_does_not_exist_is_known_at_once(entry: dict[str, Any]) -> None:
    """However the graph breaks, and in evaluation as in training."""
    model, plan = Breaking(), Plan("bf16", **entry)
    with pytest.raises(PlanError, match=r"frist|names 1 operator") as caught:
        compiled(model, plan=plan)(torch.randn(4, 16))
    assert "first" in str(caught.value.do)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(PlanError):
        compiled(model, plan=plan)(torch.randn(4, 16))


def test_one_warning_a_model_and_no_hook_left() -> None:
    model = Breaking()
    fast = compiled(model, plan=Plan("bf16", patterns=[("first/lienar", "int8")]))
    assert _global_optimizer_post_hooks
    assert len(step(model, lambda: fast(torch.randn(4, 16)))) == 1
    assert step(model, lambda: fast(torch.randn(4, 16))) == []
    assert step(model, lambda: fast(torch.randn(9, 16))) == []


def test_a_model_is_checked_at_a_step_of_its_own() -> None:
    first, second = Breaking(), Breaking()
    plan = Plan("bf16", patterns=[("first/lienar", "int8")])
    one, other = compiled(first, plan=plan), compiled(second, plan=plan)
    other(torch.randn(4, 16))
    assert len(step(first, lambda: one(torch.randn(4, 16)))) == 1
    assert not any(p.grad is not None for p in second.parameters())


def test_what_runs_in_its_planned_format_as_written_is_as_planned() -> None:
    model = Outer(nn.LSTM(16, 4, batch_first=True))
    plan = Plan("bf16", patterns=[("start", "fp32"), ("end", "fp32"), ("inner", "fp32")])
    assert step(model, lambda: compiled(model, plan=plan, strict=True)(torch.randn(2, 3, 16))) == []
    assert qsync_fx.applied(model).complete
    assert step(model, lambda: compiled(model, precision="fp32", strict=True)(torch.randn(2, 3, 16))) == []


def test_modules_that_do_not_run_are_listed_and_not_warned_of() -> None:
    class Spare(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(16, 16)

    model = Spare()
    assert step(model, lambda: compiled(model, precision="bf16", strict=True)(torch.randn(4, 16))) == []
    assert uncovered(model) == {"spare": "not called"}
    broken = nn.Sequential(Breaking())
    broken.spare = nn.Identity()
    assert step(broken, lambda: compiled(broken, precision="bf16", strict=True)(torch.randn(4, 16))) == []


def test_evaluation_may_have_less_than_training() -> None:
    class Auxiliary(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.auxiliary = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x + self.auxiliary(x) if self.training else x

    model, x = Auxiliary(), torch.randn(4, 16)
    fast = compiled(model, plan=Plan("bf16", patterns=[("auxiliary", "int8")]), strict=True)
    with torch.no_grad():
        model.eval()
        fast(x)
        model.train()
    assert step(model, lambda: fast(x)) == []
    assert qsync_fx.applied(model).complete


def test_helpers_are_not_the_whole_model() -> None:
    """What a model calls after a graph break is compiled alone, and has none of the operators that the plan names."""

    def loss_of(y: Tensor) -> Tensor:
        return (y * 2).square().mean()

    class Loss(Plain):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                torch._dynamo.graph_break()
                return loss_of(y)

    model = Loss()
    plan = Plan("bf16", patterns=[("first", "int8")])
    assert step(model, lambda: compiled(model, plan=plan, strict=True)(torch.randn(4, 16))) == []


def test_a_transformer_with_labels_and_a_compiled_optimizer() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16, bos_token_id=1, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config)
    plan = Plan("bf16", patterns=[("transformer.h.0", "int8")])
    tokens = torch.randint(50, (2, 8))
    fast = compiled(model, plan=plan, strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fast(input_ids=tokens, labels=tokens).loss.backward()
    compiled(lambda: optimizer.step(), plan=plan, strict=True)()
    assert qsync_fx.applied(model).complete
    assert uncovered(model) == {}


# Reading options.


def test_a_plan_file_is_read_once(tmp_path: Any) -> None:
    path = tmp_path / "plan.json"
    Plan("int8").save(path)
    model, x = Scaled(), torch.randn(4, 16)
    given = {"plan": path, "inner": "eager"}
    fast = torch.compile(model, backend="qsync", options=given)
    path.unlink()
    for model.scale in (1, 2):
        fast(x)
        assert {str(ran.precision) for ran in qsync_fx.applied(model).operators if ran.kind == "adjustable"} == {"int8"}
    assert given == {"plan": path, "inner": "eager"}, "the user's dictionary is the user's"
    with pytest.raises(PlanError, match=r"plan\.json"):
        torch.compile(model, backend="qsync", options=given)


@pytest.mark.parametrize("how", ["function", "method", "decorator", "module"])
def test_wrong_options_raise_at_torch_compile(how: str) -> None:
    model: Any = Plain()
    make: dict[str, Callable[..., Any]] = {
        "function": lambda **how: torch.compile(model.forward, **how),
        "module": lambda **how: torch.compile(model, **how),
        "method": lambda **how: model.compile(**how),
        "decorator": lambda **how: torch.compile(**how)(lambda x: model(x)),
    }
    with pytest.raises(qsync_fx.OptionError, match="there is no option 'precison'"):
        make[how](backend="qsync", options={"precison": "int8"})
    with pytest.raises(qsync_fx.OptionError, match="has no mode"):
        torch.compile(model, backend="qsync", mode="max-autotune")


def test_other_backends_are_left_alone() -> None:
    def backend(module: Any, inputs: Any) -> Any:
        return module.forward

    compiled(Plain(), precision="bf16")
    model = Plain()
    fast = torch.compile(model, backend=backend)
    with _Mode():
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
    assert step(trainer.model, lambda: compiled(trainer.loss, precision="bf16", strict=True)(torch.randn(4, 16))) == []
    assert uncovered(trainer.model) == {}
    assert [str(ran.precision) for ran in qsync_fx.applied(trainer.model).operators] == ["bf16"] * 3

    def run(network: nn.Module, x: Tensor) -> Tensor:
        for _ in range(1):
            torch._dynamo.graph_break()
        return network(x)

    plain = Plain()
    assert step(plain, lambda: compiled(run, precision="bf16", strict=True)(plain, torch.randn(4, 16))) == []
    assert uncovered(plain) == {}


def test_explain_lists_what_is_in_no_graph() -> None:
    inner = Plain()
    inner.forward = torch.compiler.disable(inner.forward)  # type: ignore[method-assign]
    model, x = Outer(inner), torch.randn(4, 16)
    found = qsync_fx.explain(model, x, options={"precision": "int8"})
    assert [(module.path, str(module.cause.why), module.lost) for module in found.uncovered] == [
        ("inner.first", "disabled", True),
        ("inner.second", "disabled", True),
    ]
    text = str(found)
    assert "inner.second (Linear)   in no graph   as written (not int8)" in text
    assert "remove torch.compiler.disable" in text
    assert uncovered(model)["inner.first"] == "not given", "explaining is not compiling"
    plan = Plan("int8", patterns=[("inner", "fp32")])
    assert not any(module.lost for module in qsync_fx.explain(model, x, options={"plan": plan}).uncovered)
    with pytest.raises(PlanError, match="selects none"):
        qsync_fx.explain(model, x, options={"plan": Plan("int8", patterns=[("inner", "bf16")])})


def test_what_is_used_of_torch_is_there() -> None:
    """The names of torch's that are no promise of its: where one is gone, this says which."""
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
    assert wrapper.kwargs == {"options": qsync_fx.Options(precision="bf16", inner="eager")}  # type: ignore[attr-defined]
    broken = Breaking()
    before = sum(counters["graph_break"].values())
    compiled(broken, precision="bf16")(torch.randn(4, 16))
    assert sum(counters["graph_break"].values()) > before
    fast(torch.randn(4, 16))
    torch._dynamo.reset()
    assert set(uncovered(fast).values()) == {"not met"}, "torch.compiler.reset calls the backend's reset"
