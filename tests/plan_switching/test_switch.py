"""`qsync_fx.switch_plan` during training: only the plan changes, all other state is preserved.

torch counts the compilations. The active plan shows in the outputs, which differ between plans.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx import OptionError, Plan, PlanError
from qsync_fx.backend.operators.gemm import cpu_kernels
from qsync_fx.plan_switching import options_of
from tests.support import tiers
from tests.support.compiling.switched import BF16, FP32, INT8, NOT_FOLLOWED, compilations
from tests.support.models.small_models import Perceptron, assert_equal, build, compiled

pytestmark = NOT_FOLLOWED
torch.set_num_threads(1)


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(8, 16, generator=generator) for _ in range(count)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_training_continues_after_a_switch() -> None:
    """Steps after a switch equal steps of a model compiled with that plan, from the same state."""
    model = build(lambda: Perceptron(0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fast = compiled(model, plan=INT8)
    torch.manual_seed(3)
    for x in batches(3):
        train(fast, optimizer, x)
    snapshot = copy.deepcopy((model.state_dict(), optimizer.state_dict())), torch.get_rng_state()

    parameters = [id(p) for p in model.parameters()]
    assert qsync_fx.switch_plan(fast, BF16) is fast
    assert torch.equal(torch.get_rng_state(), snapshot[1]), "switching draws no random number"
    actual = [train(fast, optimizer, x) for x in batches(3)]
    assert [id(p) for p in model.parameters()] == parameters

    torch._dynamo.reset()
    again = build(lambda: Perceptron(0.5))
    optimizer_again = torch.optim.AdamW(again.parameters(), lr=0.01)
    again.load_state_dict(snapshot[0][0])
    optimizer_again.load_state_dict(snapshot[0][1])
    torch.set_rng_state(snapshot[1])
    expected = [train(compiled(again, plan=BF16), optimizer_again, x) for x in batches(3)]
    assert torch.equal(torch.stack(actual), torch.stack(expected))
    assert_equal(model.state_dict(), again.state_dict())


def test_each_plan_is_compiled_once() -> None:
    fast, x = compiled(build(Perceptron), plan=INT8), torch.randn(4, 16)

    def step(plan: Plan) -> int:
        return compilations(lambda: qsync_fx.switch_plan(fast, plan)(x).sum().backward())

    assert compilations(lambda: fast(x).sum().backward()) == 1
    assert step(BF16) == 1
    assert step(INT8) == 0, "the original plan is not recompiled"
    assert step(BF16) == 0
    assert step(Plan.from_json(BF16.to_json())) == 0, "an equal plan is not recompiled"
    assert step(BF16.with_precision("head", "fp32")) == 1
    assert step(INT8) == 0


def test_notes_of_an_equal_plan_become_active_without_compilation() -> None:
    fast, x = compiled(build(Perceptron), plan=INT8), torch.randn(4, 16)
    noted = Plan(INT8.default, INT8.patterns, INT8.operators, {"local batch": "8"})
    assert compilations(lambda: fast(x).sum().backward()) == 1
    for plan in (noted, INT8, noted):
        qsync_fx.switch_plan(fast, plan)
        assert compilations(lambda: fast(x).sum().backward()) == 0
        plans = [options.plan for options in options_of(fast)]
        assert plans and all(item is not None and item.notes == plan.notes for item in plans)


def test_a_uniform_plan_is_the_precision_of_that_name() -> None:
    fast, x = compiled(build(Perceptron), precision="int8"), torch.randn(4, 16)
    assert compilations(lambda: fast(x)) == 1
    assert compilations(lambda: qsync_fx.switch_plan(fast, BF16)(x)) == 1
    assert compilations(lambda: qsync_fx.switch_plan(fast, INT8)(x)) == 0


def test_without_a_plan_the_device_decides_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        cpu_kernels.ENOUGH_WORK, 16, 0
    )  # as for layers that are large enough for BF16
    model, x = build(Perceptron), torch.randn(4, 16)
    fast = compiled(model)
    expected = fast(x)
    assert not torch.equal(qsync_fx.switch_plan(fast, INT8)(x), expected)
    assert compilations(lambda: qsync_fx.switch_plan(fast, None)(x)) == 0
    assert torch.equal(fast(x), expected)


def many_plans() -> list[Plan]:
    """Return twenty plans of a perceptron with different results."""
    names = ("fp32", "bf16", "int8", "fp8")
    triples = [(a, b, c) for a in names for b in names for c in names][:20]
    return [
        Plan("fp32", patterns=[("layers.0", a), ("layers.3", b), ("head", c)])
        for a, b, c in triples
    ]


@tiers.ALL
def test_twenty_plans_and_back() -> None:
    """Dynamo compiles 8 versions of a function, 256 in total, and then falls back to eager mode."""
    model, x = build(Perceptron).eval(), torch.randn(64, 16)
    fast, plans = compiled(model, plan=FP32), many_plans()
    assert len(plans) > torch._dynamo.config.recompile_limit
    with torch.no_grad(), torch._dynamo.config.patch(accumulated_recompile_limit=8):
        first = [qsync_fx.switch_plan(fast, plan)(x) for plan in plans]
        assert len({tuple(y.flatten().tolist()) for y in first}) == len(plans), (
            "every plan is applied"
        )
        again: list[Tensor] = []
        assert (
            compilations(
                lambda: again.extend(
                    qsync_fx.switch_plan(fast, plan)(x) for plan in reversed(plans)
                )
            )
            == 0
        )
    assert torch.equal(torch.stack(first), torch.stack(again[::-1]))


class Scaled(nn.Module):
    """Module that Dynamo recompiles for every value of `scale`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def test_plan_is_applied_after_the_recompile_limit() -> None:
    model, x = build(Scaled), torch.randn(2, 4)
    fast = compiled(model, plan=BF16)
    with torch._dynamo.config.patch(recompile_limit=3), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for scale in (1, 2, 3):
            model.scale = scale
            assert not torch.equal(fast(x), model(x))
        model.scale = 4
        with pytest.raises(PlanError, match="recompile_limit"):
            fast(x)
        qsync_fx.switch_plan(fast, INT8)
        assert not torch.equal(fast(x), model(x))


def test_other_options_stay(tmp_path: Path) -> None:
    ran = []

    @qsync_fx.graph_pass
    def note(graph: qsync_fx.PrecisionGraph) -> None:
        options = graph.context.options
        ran.append((options.rounding, options.scaling, options.inner_backend, graph.context.plan))

    fast = compiled(
        build(Perceptron), precision="int8", rounding="floor", scaling="channel", passes=[note]
    )
    fast(torch.randn(4, 16))
    BF16.save(tmp_path / "plan.json")
    qsync_fx.switch_plan(fast, tmp_path / "plan.json")
    (tmp_path / "plan.json").unlink()  # switch_plan has read it
    fast(torch.randn(4, 16))
    assert ran == [("floor", "channel", "aot_eager", INT8), ("floor", "channel", "aot_eager", BF16)]


def test_compile_arguments_are_preserved() -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x + 1

    full_graph = torch.compile(Breaks(), backend="qsync", fullgraph=True, options={"plan": BF16})
    qsync_fx.switch_plan(full_graph, INT8)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        full_graph(torch.randn(2))
    dynamic = torch.compile(
        build(Perceptron), backend="qsync", dynamic=True, options={"inner_backend": "aot_eager"}
    )
    dynamic(torch.randn(3, 16))
    qsync_fx.switch_plan(dynamic, INT8)
    assert compilations(lambda: [dynamic(torch.randn(n, 16)) for n in (3, 4, 5)]) == 1


def test_mismatched_plan_is_an_error_and_can_be_reverted() -> None:
    model, x = build(Perceptron), torch.randn(32, 16)
    fast = compiled(model, plan=FP32)
    fast(x)
    with pytest.raises(PlanError):
        qsync_fx.switch_plan(fast, "no such file.json")
    with pytest.raises(OptionError):
        qsync_fx.switch_plan(fast, 8)  # type: ignore[arg-type]
    assert torch.equal(fast(x), model(x)), "a failed switch keeps the previous plan"
    qsync_fx.switch_plan(fast, Plan("fp32", patterns=[("heed", "int8")]))
    with pytest.raises(PlanError, match="heed"):
        fast(x)
    assert compilations(lambda: qsync_fx.switch_plan(fast, FP32)(x)) == 0


def test_explain_accepts_a_switched_model() -> None:
    fast, x = compiled(build(Perceptron), plan=FP32), torch.randn(4, 16)
    qsync_fx.switch_plan(fast, INT8)(x)
    explained = qsync_fx.explain(fast, x, options={"plan": BF16})
    assert {str(op.precision) for op in explained.operators if op.kind == "adjustable"} == {"bf16"}
    assert compilations(lambda: fast(x)) == 0
