"""Second derivatives: equal to torch in FP32, as near as autocast in BF16, else an error with a
remedy.

Wasserstein GANs add a gradient penalty to the loss; second-order optimizers and influence functions
use Hessian-vector products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.errors import PrecisionError, QSyncError
from tests.support import tiers
from tests.support.models.small_models import (
    assert_equal,
    build,
    compiled,
    gradients,
    relative_error,
)

Run = Callable[[Tensor], Tensor]


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.avg_pool2d(nn.functional.gelu(self.conv(x)), 2).flatten(1))


SHAPES = {Perceptron: (6, 16), Convolutional: (6, 3, 8, 8)}
every_model = pytest.mark.parametrize("make", SHAPES)


def penalty(model: nn.Module, run: Run, x: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a loss with a penalty on input gradients whose norm is not 1."""
    x = x.clone().requires_grad_()
    y = run(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    loss = y.square().mean() + (slope.flatten(1).norm(dim=1) - 1).square().mean()
    loss.backward()
    return {**gradients(model), "x": x.grad}


def hessian_product(model: nn.Module, run: Run, x: Tensor) -> dict[str, Tensor]:
    """Return the Hessian of the loss with respect to the parameters, times a vector."""
    parameters = dict(model.named_parameters())
    first = torch.autograd.grad(run(x).square().mean(), parameters.values(), create_graph=True)
    vector = [torch.linspace(-1, 1, p.numel()).view_as(p) for p in parameters.values()]
    along = sum((g * v).sum() for g, v in zip(first, vector, strict=True))
    return dict(zip(parameters, torch.autograd.grad(along, parameters.values()), strict=True))


every_use = pytest.mark.parametrize("use", [penalty, hessian_product])
Use = Callable[[nn.Module, Run, Tensor], dict[str, Tensor]]


def inputs(make: type[nn.Module]) -> Tensor:
    return torch.randn(SHAPES[make], generator=torch.Generator().manual_seed(1))


@every_model
@every_use
def test_fp32_is_bit_equal_to_torch(make: type[nn.Module], use: Use) -> None:
    x, model = inputs(make), build(make)
    wanted = use(model, model, x)
    model = build(make)
    assert_equal(use(model, compiled(model, precision="fp32", inner_backend="eager"), x), wanted)


@every_model
@every_use
def test_bf16_is_as_near_as_autocast(make: type[nn.Module], use: Use) -> None:
    x, model = inputs(make), build(make)
    exact = use(model, model, x)

    def with_autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    model = build(make)
    autocast = use(model, with_autocast, x)
    model = build(make)
    actual = use(model, compiled(model, precision="bf16", inner_backend="eager"), x)
    error = relative_error(autocast, exact)
    assert 0 < error < 0.05
    assert relative_error(actual, exact) < 1.5 * error
    assert relative_error(actual, autocast) < 1.5 * error


@every_model
@every_use
@pytest.mark.parametrize("fmt", ["int8", "int8_grad", "fp8", "tf32"])
def test_formats_without_a_second_derivative_name_the_operator(
    make: type[nn.Module], use: Use, fmt: str
) -> None:
    model = build(make)
    with pytest.raises(PrecisionError) as caught:
        use(model, compiled(model, precision=fmt, inner_backend="eager"), inputs(make))
    problem = caught.value
    assert problem.what.startswith(f"an operator in {fmt} has no second derivative: ")
    assert problem.where in [
        f"operator {op.id}, {op.source}: {op.source.code}" for op in operators(model, make, fmt)
    ]
    assert '"eager"' in str(problem.do)
    assert not gradients(model)


def operators(model: nn.Module, make: type[nn.Module], fmt: str) -> Iterator[Any]:
    explanation = qsync_fx.explain(model, inputs(make), options={"precision": fmt})
    return (op for op in explanation.operators if op.kind == "adjustable")


@every_use
def test_plan_determines_second_derivatives(use: Use) -> None:
    """A default of INT8 raises no error if the plan sets all layers with a weight to BF16."""
    plan = (
        qsync_fx.Plan.uniform("int8").with_precision("conv", "bf16").with_precision("last", "bf16")
    )
    model = build(Convolutional)
    actual = use(model, compiled(model, plan=plan, inner_backend="eager"), inputs(Convolutional))
    model = build(Convolutional)
    assert_equal(
        actual,
        use(model, compiled(model, precision="bf16", inner_backend="eager"), inputs(Convolutional)),
    )


def test_a_penalty_is_never_left_out() -> None:
    """The gradient of a sum is constant. torch's `once_differentiable` would treat the derived
    input gradient as constant, too, so that the penalty would have no effect.
    """
    layer = nn.Linear(16, 1)
    x = torch.randn(4, 16, requires_grad=True)
    (slope,) = torch.autograd.grad(
        compiled(layer, precision="int8", inner_backend="eager")(x).sum(), x, create_graph=True
    )
    with pytest.raises(PrecisionError, match="an operator in int8 has no second derivative"):
        (layer.weight.square().sum() + slope.square().sum()).backward()


def test_a_hessian_that_may_be_zero_is_refused_all_the_same() -> None:
    """With `allow_unused`, torch does not report a parameter that the first gradient does not
    depend on.
    """
    model = build(Perceptron)
    run = compiled(model, precision="int8", inner_backend="eager")
    (first,) = torch.autograd.grad(
        run(inputs(Perceptron)).sum(), model.first.weight, create_graph=True
    )
    with pytest.raises(PrecisionError, match="an operator in int8 has no second derivative"):
        torch.autograd.grad(first.sum(), model.last.weight, allow_unused=True)


@every_use
@pytest.mark.parametrize(
    ("inner_backend", "fmt"),
    [
        ("aot_eager", "fp32"),
        ("aot_eager", "int8"),
        pytest.param("inductor", "bf16", marks=tiers.ALL),
    ],
)
def test_compiled_double_backward_is_an_error_with_a_remedy(
    use: Use, inner_backend: str, fmt: str
) -> None:
    model = build(Perceptron)
    with pytest.raises(QSyncError) as caught:
        use(model, compiled(model, precision=fmt, inner_backend=inner_backend), inputs(Perceptron))
    assert inner_backend in caught.value.what
    assert "operator first/linear" in str(caught.value.where)
    assert '"inner_backend": "eager"' in str(caught.value.do)
    assert not gradients(model)


@pytest.mark.parametrize("inner_backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fmt", ["fp32", "int8"])
def test_graph_without_gradients_is_unchanged(inner_backend: str, fmt: str) -> None:
    """Gradients are equal with and without `create_graph`."""
    results = []
    for create_graph in (False, True):
        torch._dynamo.reset()  # code compiled without `create_graph` cannot run with it
        model = build(Perceptron)
        run, x = (
            compiled(model, precision=fmt, inner_backend=inner_backend),
            inputs(Perceptron).requires_grad_(),
        )
        for _ in range(2):
            loss = run(x).square().mean()
            values = torch.autograd.grad(loss, [*model.parameters(), x], create_graph=create_graph)
            assert all(g.requires_grad is create_graph for g in values)
        results.append({str(index): g.detach() for index, g in enumerate(values)})
    assert_equal(*results)
