"""The statistics of a model's sensitivity: whoever looks changes nothing, and what is seen is what quantized runs do."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import small_models
import tiers
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qsync_fx
from qsync_fx.errors import ProfileError
from qsync_fx.precision import FORMATS
from qsync_fx.predictor.sensitivity.agreement import agreement
from qsync_fx.predictor.sensitivity.rounding_noise import noise
from qsync_fx.profiling.statistics.batches import part_of, samples, stepped
from qsync_fx.profiling.statistics.captured import Captured, as_it_is
from qsync_fx.profiling.statistics.measured import several
from qsync_fx.profiling.statistics.methods import METHODS
from qsync_fx.profiling.statistics.tapped import tapped

Batch = tuple[Tensor, Tensor]


def step(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(width: tuple[int, ...] = (16,), count: int = 4, size: int = 32) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, *width, generator=generator), torch.randint(10, (size,), generator=generator))
        for _ in range(count)
    ]


class Twice(nn.Module):
    """A layer that is called twice, a functional product, a residual, and a write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(16, 10) / 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).relu_()
        return (h + self.layer(h)) @ self.weight


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, x, use_reentrant=False))


class Broken(nn.Module):
    """A graph break in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.last(F.gelu(h))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (lambda: small_models.Perceptron(0.3), (16,)),
    "convolutional": (small_models.Convolutional, (1, 8, 8)),
    "twice": (Twice, (16,)),
    "checkpointed": (Checkpointed, (16,)),
    "broken": (Broken, (16,)),
}


@pytest.mark.parametrize("name", [n if n == "twice" else pytest.param(n, marks=tiers.ALL) for n in MODELS])
def test_whoever_looks_changes_nothing(name: str) -> None:
    """Run as a whole or operator by operator, gradients are the model's own to the last bit; ids are those of plans."""
    make, width = MODELS[name]
    model = small_models.build(make)
    (batch, *_) = batches(width)
    captured, seen = Captured(model), list[str]()

    def gradients(called: Any) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        step(called, batch).backward()
        return small_models.gradients(model)

    def tap(operator: Any, given: list[Any], call: Any) -> Any:
        seen.append(str(operator.id))
        return call(given)

    wanted = gradients(model)
    for run in (as_it_is, tapped(tap)):
        with captured.running(run):
            small_models.assert_equal(gradients(captured.call), wanted)
    explained = qsync_fx.explain(model, batch[0], options={"precision": "fp32"})
    assert sorted(seen) == sorted(str(op.id) for op in explained.operators if op.kind == "adjustable")
    if name == "twice":
        assert seen == ["layer/linear", "layer/linear#1", "/matmul@layer"]


def state(model: nn.Module) -> list[Tensor]:
    grads = [p.grad if p.grad is not None else torch.zeros(()) for p in model.parameters()]
    return [t.clone() for t in (*model.state_dict().values(), *grads, torch.get_rng_state())]


@pytest.mark.parametrize("method", [m if m == "exact" else pytest.param(m, marks=tiers.ALL) for m in METHODS])
def test_a_model_is_left_as_it_was(method: str) -> None:
    make, width = MODELS["convolutional"]
    model = small_models.build(make)
    step(model, batches(width)[0]).backward()
    model.conv.eval()
    before, place = state(model), qsync_fx.rounding_stream.state_dict()
    found = qsync_fx.sensitivity(
        model,
        step,
        batches(width),
        method,
        ["bf16", "int8"],
        steps=2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    assert all(torch.equal(a, b) for a, b in zip(state(model), before, strict=True))
    assert (model.training, model.conv.training) == (True, False)
    assert qsync_fx.rounding_stream.state_dict() == place
    explained = qsync_fx.explain(model, batches(width)[0][0], options={"precision": "fp32"})
    assert found.operators == [str(op.id) for op in explained.operators if op.kind == "adjustable"]
    assert (found.steps, len(found.trace), found.precisions) == (2, 2, ["bf16", "int8"])
    weights = [name for name in found.operators if name.endswith(("linear", "conv2d"))]
    assert all(found.of(name, "int8") > 0 for name in weights)


def test_exact_tells_a_network_of_gates_in_few_steps() -> None:
    model = small_models.build(lambda: wide(nn.ReLU))
    held = agreement(
        *several(model, step, batches(), ["exact", "monte_carlo"], ["int8"], steps=4, fraction=1.0), "int8"
    )
    assert 0.5 < held.ratio < 2, held


def test_a_model_is_left_as_it_was_when_a_step_fails() -> None:
    model = small_models.build(MODELS["convolutional"][0])
    before = state(model)

    def fails(called: Any, batch: Batch) -> Tensor:
        step(called, batch)
        raise KeyError("a column")

    with pytest.raises(KeyError, match="a column"):
        qsync_fx.sensitivity(model, fails, batches((1, 8, 8)), steps=1)
    assert all(torch.equal(a, b) for a, b in zip(state(model), before, strict=True))


def wide(activation: Callable[[], nn.Module]) -> nn.Module:
    widths = (16, 64, 24, 96, 32, 10)
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), activation())][:-1]
    model = nn.Sequential(*layers)
    for at, layer in enumerate(model):
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=(0.5 + at % 3) * layer.in_features**-0.5)
    return model


@tiers.ALL
@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU])
def test_exact_and_injected_are_what_quantized_runs_do(activation: type[nn.Module]) -> None:
    """Of a network of ReLUs second derivatives alone tell a small part: gates flip."""
    model = small_models.build(lambda: wide(activation))
    found = several(model, step, batches(), ["exact", "injected", "monte_carlo"], ["int8"], steps=12, fraction=1.0)
    exact, injected, truth = found
    for one in (exact, injected):
        held = agreement(one, truth, "int8")
        assert held.operators == 5
        assert 0.6 < held.ratio < 1.6, held
        assert held.spearman >= (0.9 if one is exact else 0.7), held


@pytest.mark.parametrize("kind", ["relu", "max_pool2d"])
def test_gates_flip_as_often_as_noise_flips_them(kind: str) -> None:
    """The error of the gradient that passes, against real noise in front."""
    from torch.fx import symbolic_trace

    from qsync_fx.profiling.statistics.gates import Flips, Gate, gate

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, 16, 16, generator=generator)
    aten = torch.ops.aten
    target, args = (aten.relu.default, ()) if kind == "relu" else (aten.max_pool2d.default, ([2, 2],))
    graph = symbolic_trace(nn.Identity()).graph
    node = graph.call_function(target, (next(iter(graph.nodes)), *args))

    def passed(value: Tensor) -> Tensor:
        leaf = value.clone().requires_grad_()
        y = target(leaf, *args)
        return torch.autograd.grad(y, leaf, incoming)[0]

    incoming = torch.randn(target(x, *args).shape, generator=generator)
    slope = torch.randn(x.shape, generator=generator)
    found = gate(node, (x.requires_grad_(), *args), {})
    assert found is not None
    _, places, rivals = found
    x = x.detach()
    flips = Flips(Gate("a", None, None, x.numel(), places, rivals).histogram(slope, incoming))  # type: ignore[arg-type]
    exact = passed(x)
    for deviation in (0.3, 0.03):
        noisy = [passed(x + deviation * torch.randn(x.shape, generator=generator)) - exact for _ in range(60)]
        # Gates are independent: the mean square of what signs would make of their sum.
        if kind == "relu":
            wanted = sum(float((n * slope).square().sum()) for n in noisy) / 60
        else:
            windows = [(n * slope).unfold(2, 2, 2).unfold(3, 2, 2).sum((-1, -2)) for n in noisy]
            wanted = sum(float(w.square().sum()) for w in windows) / 60
        assert flips.at(deviation) / wanted == pytest.approx(1, abs=0.2)  # a window may have a third rival
    assert flips.at(0.0) == 0
    assert flips.at(0.02) / flips.at(0.01) == pytest.approx(2, rel=0.2)


@tiers.ALL
def test_what_two_operators_add_adds_up() -> None:
    from qsync_fx.plan import Plan
    from qsync_fx.profiling.statistics.measured import _Looking
    from qsync_fx.profiling.statistics.monte_carlo import lowered, truth

    model = small_models.build(lambda: wide(nn.GELU))
    looking = _Looking(Captured(model), step, ["int8"], 0)
    with looking.at(0, batches()[0]) as now:
        one, exact = now(), now().gradients()

        def square(*names: str) -> float:
            plan = Plan("fp32", operators=dict.fromkeys(names, "int8"))
            return truth(one, lowered(plan), 200, exact).square

        for pair in (("0/linear", "4/linear"), ("2/linear", "8/linear")):
            assert square(*pair) / (square(pair[0]) + square(pair[1])) == pytest.approx(1, abs=0.25)


@tiers.ALL
def test_the_error_grows_with_the_square_of_the_step_and_at_gates_with_the_step() -> None:
    """Formats of one bit less: FP8's mantissas. With GELU four times the error, with ReLU twice as much and more."""

    def growth(activation: Callable[[], nn.Module]) -> float:
        model = small_models.build(lambda: wide(activation))
        (found,) = several(model, step, batches(), ["exact"], ["fp8", "fp8_e5m2"], steps=6, fraction=1.0)
        first = "2/linear"
        return found.of(first, "fp8_e5m2") / found.of(first, "fp8")

    assert growth(nn.GELU) > 3.3
    assert 1.5 < growth(nn.ReLU) < 3.3


@tiers.ALL
def test_gradients_of_one_layer_are_known_in_closed_form() -> None:
    """The mean square of a linear layer: H and J are constants, so that every term can be written down."""
    layer = nn.Linear(24, 8, bias=False)
    x = torch.randn(40, 24)

    def square(model: Any, batch: Tensor) -> Tensor:
        return 0.5 * model(batch).square().sum()

    (exact,) = several(layer, square, [x], ["exact"], ["int8"], steps=300, fraction=1.0)
    w = layer.weight.detach()
    vx, vw = noise(x, FORMATS["int8"]), noise(w, FORMATS["int8"])
    y = x @ w.t()
    # The gradient y'x of w moves by (dx w')'x + y'dx + (x dw')'x, beside what is rounded to BF16, a thousandth of that.
    wanted = 0.0
    gram = x.t() @ x
    wanted += float((vw.sum(0) * gram.square().sum(1)).sum())
    weight_gram = (w.t() @ w).diagonal()
    for n in range(len(x)):
        cross = 2 * (w.t() @ y[n]) * x[n]
        wanted += float((vx[n] * (weight_gram * x[n].square().sum() + y[n].square().sum() + cross)).sum())
    assert exact.of("/linear", "int8") / wanted == pytest.approx(1, abs=0.05)


@tiers.ALL
def test_hessian_finds_the_largest_eigenvalue() -> None:
    layer = nn.Linear(6, 1, bias=False)
    x = torch.randn(50, 6)

    def loss(model: Any, batch: Tensor) -> Tensor:
        return 0.5 * model(batch).square().sum()

    (found,) = several(layer, loss, [x], ["hessian"], ["int8"], steps=12, fraction=1.0)
    largest = float(torch.linalg.eigvalsh(x.t() @ x)[-1])
    wanted = largest / 6 * float(noise(layer.weight, FORMATS["int8"]).sum())
    assert found.trace[-1]["/linear"]["int8"] == pytest.approx(wanted, rel=0.02)


def test_random_halves_with_each_wider_precision_and_stays() -> None:
    model = small_models.build(lambda: wide(nn.ReLU))
    (found,) = several(model, step, batches(), ["random"], ["bf16", "int8"], steps=3)
    for by in found.variance.values():
        assert by["bf16"] == by["int8"] / 2 > 0
    assert found.trace[0] == found.trace[2] == found.variance


@pytest.mark.parametrize("make", [list, lambda: iter(())])
def test_without_a_batch_there_is_nothing_to_see(make: Callable[[], Any]) -> None:
    with pytest.raises(ProfileError, match="no batches"):
        qsync_fx.sensitivity(wide(nn.ReLU), step, make())


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda model, batch: model(batch[0]), "a tensor of shape"),
        (lambda model, batch: 3.0, "a float, which is no loss"),
        (lambda model, batch: step(model, batch).detach(), "depends on no parameter"),
        (lambda model, batch: step(model, batch) * torch.nan, "the loss is nan"),
        (lambda model, batch: next(model.parameters()).sum(), "Dynamo compiled no part"),
    ],
)
def test_a_step_that_gives_no_loss_is_told(wrong: Callable[..., Any], what: str) -> None:
    with pytest.raises(ProfileError, match=what) as raised:
        qsync_fx.sensitivity(wide(nn.ReLU), wrong, batches(), steps=1)
    assert raised.value.do


def test_other_mistakes_are_told() -> None:
    model = wide(nn.ReLU)
    with pytest.raises(ProfileError, match="did you mean 'exact'"):
        qsync_fx.sensitivity(model, step, batches(), "exat")
    with pytest.raises(ProfileError, match="no part of a batch"):
        qsync_fx.sensitivity(model, step, batches(), fraction=0.0)
    with pytest.raises(qsync_fx.PrecisionError):
        qsync_fx.sensitivity(model, step, batches(), precisions=["int7"])
    with pytest.raises(ProfileError, match="no parameter that requires a gradient"):
        qsync_fx.sensitivity(model.requires_grad_(False), step, batches())


class Residual(nn.Module):
    """A sum hands one and the same gradient to both of its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(h + self.second(torch.tanh(h)))


def test_an_error_in_a_gradient_counts_for_its_operator_alone() -> None:
    from qsync_fx.profiling.statistics.injected import Injected
    from qsync_fx.profiling.statistics.measured import _Looking
    from qsync_fx.profiling.statistics.second_order import SecondOrder

    model = small_models.build(Residual)
    looking = _Looking(Captured(model), step, ["bf16"], 0)
    with looking.at(0, batches()[0]) as now:
        exact, injected = SecondOrder(draws=256).look(now()), Injected().look(now())
    assert exact.keys() == injected.keys()
    for key, square in injected.items():
        assert exact[key] / square == pytest.approx(1, abs=0.3), key


class Unrecorded(nn.Module):
    """A part that the model computes without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.tanh(self.first(x))
        return self.last(h)


def test_what_runs_without_gradients_errs_all_the_same() -> None:
    model = small_models.build(Unrecorded)
    held = agreement(
        *several(model, step, batches(), ["exact", "monte_carlo"], ["int8"], steps=4, fraction=1.0), "int8"
    )
    assert held.operators == 2 and 0.5 < held.ratio < 2, held


class _Once(torch.autograd.Function):
    """A gradient that has none of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_a_model_without_second_derivatives_is_told_what_serves() -> None:
    """Here outside of the model, in the user's loss."""
    model = wide(nn.GELU)

    def loss(called: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(_Once.apply(called(batch[0])), batch[1])

    with pytest.raises(ProfileError, match="cannot be differentiated twice") as raised:
        qsync_fx.sensitivity(model, loss, batches(), precisions=["int8"], steps=1)
    assert 'method="injected"' in str(raised.value)
    found = qsync_fx.sensitivity(model, loss, batches(), "injected", ["int8"], steps=1)
    assert all(by["int8"] > 0 for by in found.variance.values())


@tiers.ALL
def test_frozen_layers_and_inputs_without_gradients_still_make_noise() -> None:
    model = wide(nn.GELU)
    for parameter in (*model[0].parameters(), *model[2].parameters()):
        parameter.requires_grad_(False)
    found = several(model, step, batches(), ["exact", "monte_carlo"], ["int8"], steps=8, fraction=1.0)
    held = agreement(*found, "int8")
    assert held.spearman >= 0.9 and 0.5 < held.ratio < 2


def test_it_says_what_it_costs_and_how_far_it_is() -> None:
    said: list[str] = []
    qsync_fx.sensitivity(wide(nn.ReLU), step, batches(), precisions=["int8"], steps=2, say=said.append)
    assert said[0].startswith("exact: 2 steps of about ") and "5 operators in int8" in said[0]
    assert [line.partition(",")[0] for line in said[1:]] == ["step 1 of 2", "step 2 of 2"]


Point = namedtuple("Point", "x y")


def test_parts_of_batches() -> None:
    x, mask = torch.arange(10), torch.ones(4, 4)
    batch = {"x": x, "y": [torch.zeros(10, 2), Point(torch.ones(10), 3)], "mask": mask, "name": "a"}
    half = part_of(batch, 0.45)
    assert (samples(batch), samples("nothing"), samples(half)) == (10, 1, 5)
    assert half["x"].tolist() == [0, 1, 2, 3, 4] and len(half["y"][0]) == len(half["y"][1].x) == 5
    assert half["mask"] is mask and half["name"] == "a" and half["y"][1].y == 3 and len(batch["x"]) == 10
    assert len(part_of(x, 0.01)) == 1
    assert [len(one) for one in stepped([x], 3, 0.5)] == [5, 5, 5]
    assert len(list(stepped(iter([x, x]), 3, 1.0))) == 2


def test_the_trace_of_a_model_that_trains() -> None:
    """QSync's Fig. 8: ranks over the first updates. Without an optimizer the same batch gives the same numbers but for the probes."""
    model = small_models.build(lambda: wide(nn.ReLU))
    one = batches()[:1]
    (still,) = several(model, step, one, ["fisher"], ["int8"], steps=3)
    (trained,) = several(
        model, step, one, ["fisher"], ["int8"], steps=3, optimizer=lambda p: torch.optim.SGD(p, lr=0.5)
    )
    assert still.trace[0] == still.trace[1] == trained.trace[0] != trained.trace[1]
    assert all(sorted(ranks.values()) == [0, 1, 2, 3, 4] for ranks in trained.ranks("int8"))
