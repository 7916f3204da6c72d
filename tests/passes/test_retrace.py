"""Values that bypass autograd and the dispatcher: `.data`, straight-through estimators, writes to
`.data`, updates in the forward pass.

Re-tracing records only calls through the dispatcher. All other values must reach the compiled code,
too, never as constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qsync_fx
from tests.support.models.small_models import (
    assert_equal,
    build,
    compiled,
    gradients,
    relative_error,
)

Forward = Callable[["Two", Tensor], Tensor]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Two(nn.Module):
    """Two layers, a buffer, and a forward pass that is an argument."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.call = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def scaled_data(model: Two, x: Tensor) -> Tensor:
    return model.second((model.first(x) * 2).data * 3)


def data_alone(model: Two, x: Tensor) -> Tensor:
    return model.second(model.first(x)) + model.first(x).data


def weight_data(model: Two, x: Tensor) -> Tensor:
    return model.second(F.linear(x, model.first.weight.data) + model.first(x))


def straight_through(model: Two, x: Tensor) -> Tensor:
    y = model.first(x)
    return model.second(y + (torch.sin(4 * y) - y).data)


def straight_through_a_checkpoint(model: Two, x: Tensor) -> Tensor:
    output: Tensor = checkpoint(straight_through, model, x, use_reentrant=False)
    return output


def one_hot_straight_through(model: Two, x: Tensor) -> Tensor:
    soft = model.first(x).softmax(-1)
    hard = F.one_hot(soft.argmax(-1), 16).to(soft.dtype)
    return model.second((hard - soft).data + soft)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.data)
        return torch.sin(x).data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * torch.sigmoid(ctx.saved_tensors[0]).data


def own_function(model: Two, x: Tensor) -> Tensor:
    output: Tensor = model.second(_Identity.apply(model.first(x)))  # type: ignore[no-untyped-call]
    return output


def moving_average(model: Two, x: Tensor) -> Tensor:
    y = model.first(x)
    model.mean.data.mul_(0.9).add_(y.data.mean(0), alpha=0.1)
    return model.second(y - model.mean)


def weight_copied_in(model: Two, x: Tensor) -> Tensor:
    model.second.weight.data.copy_(model.first.weight.data * 0.5)
    return model.second(model.first(x))


def weight_changed_between_two_uses(model: Two, x: Tensor) -> Tensor:
    first = model.second(x.detach())
    model.second.weight.data.mul_(0.5)
    return 3 * model.second(x.detach()) - first


def write_to_data(model: Two, x: Tensor) -> Tensor:
    y = model.first(x) * 1
    y.data.mul_(2)
    y.data[:, :3].zero_()
    return model.second(y * y)


def write_after_use(model: Two, x: Tensor) -> Tensor:
    y = model.first(x)
    z = y + 1
    y.data.mul_(2)
    return model.second(z + y)


def data_replaced(model: Two, x: Tensor) -> Tensor:
    y = model.first(x) * 1
    y.data = y.data * 2
    return model.second(y)


def no_grad_region(model: Two, x: Tensor) -> Tensor:
    y = model.first(x)
    with torch.no_grad():
        z = torch.sin(4 * y.data) - y
        model.mean.lerp_(z.mean(0), 0.1)
    return model.second(y + z)


def detached(model: Two, x: Tensor) -> Tensor:
    y = model.first(x)
    y.detach().mul_(2)
    return model.second(y + (torch.sin(4 * y) - y).detach())


def own_gradient(model: Two, x: Tensor) -> Tensor:
    y = model.first(x)
    return (
        y
        if model.first.weight.grad is None
        else model.second(y) + model.first.weight.grad.data.mean()
    )


CALLS = (
    scaled_data, data_alone, weight_data, straight_through, straight_through_a_checkpoint,
    one_hot_straight_through, own_function,
    moving_average, weight_copied_in, weight_changed_between_two_uses, write_to_data,
    write_after_use, data_replaced, no_grad_region,
    detached, own_gradient,
)  # fmt: skip


def two_steps(model: nn.Module, call: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run two steps without an update; return outputs and buffers, and the gradients."""
    torch.manual_seed(1)
    x = torch.randn(32, 16, requires_grad=True)
    outputs = {}
    for step in range(2):
        out = call(x)
        assert type(out) is Tensor
        outputs[f"step {step}"] = out.detach().clone()
        (out * torch.linspace(-1, 1, 16)).sum().backward()
    grads = gradients(model) | ({} if x.grad is None else {"x": x.grad})
    return outputs | {name: t.clone() for name, t in model.state_dict().items()}, grads


@pytest.mark.parametrize("forward", CALLS, ids=lambda forward: forward.__name__)
def test_values_that_autograd_does_not_see(forward: Forward) -> None:
    plain = build(lambda: Two(forward))
    theirs = two_steps(plain, torch.compile(plain, backend="aot_eager"))
    for inner in ("aot_eager", "eager"):
        torch._dynamo.reset()
        model = build(lambda: Two(forward))
        ours = two_steps(model, compiled(model, precision="fp32", inner_backend=inner))
        assert_equal(ours[0], theirs[0])
        assert_equal(ours[1], theirs[1])
    for precision, bound in ("bf16", 0.03), ("int8", 0.15):
        torch._dynamo.reset()
        model = build(lambda: Two(forward))
        ours = two_steps(model, compiled(model, precision=precision))
        assert relative_error(ours[0], theirs[0]) <= bound
        assert relative_error(ours[1], theirs[1]) <= bound


def test_eager_preserves_detached_data() -> None:
    """Autograd does not see a write to `.data`. After a write to the result of `detach` it rejects
    the backward pass.
    """

    def through_data(x: Tensor) -> Tensor:
        y = x.exp()
        y.data.mul_(2)
        return y

    def through_detach(x: Tensor) -> Tensor:
        y = x.exp()
        y.detach().mul_(2)
        return y

    x = torch.ones(3, requires_grad=True)
    for wrapped in (through_data, compiled(through_data, precision="fp32", inner_backend="eager")):
        (gradient,) = torch.autograd.grad(wrapped(x).sum(), x)
        assert torch.equal(gradient, 2 * x.detach().exp())
    for wrapped in (
        through_detach,
        compiled(through_detach, precision="fp32", inner_backend="eager"),
    ):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(wrapped(x).sum(), x)


@torch._dynamo.allow_in_graph
def hiding(y: Tensor) -> Tensor:
    return y + (torch.sin(4 * y) - y).data


def test_a_function_that_hides_a_value_stays_as_it_is() -> None:
    """Dynamo does not trace into the function, and re-tracing does not see its read of `.data`."""

    def forward(model: Two, x: Tensor) -> Tensor:
        return model.second(hiding(model.first(x)))

    test_values_that_autograd_does_not_see(forward)
    explanation = qsync_fx.explain(Two(forward), torch.randn(4, 16), options={"precision": "bf16"})
    (opaque,) = (op for op in explanation.operators if op.id.operator == "hiding")
    assert "cannot be re-traced" in opaque.reason
    assert any("hiding" in text for text in explanation.unknown)
    assert [str(op.precision) for op in explanation.operators if op.kind == "adjustable"] == [
        "bf16",
        "bf16",
    ]
