"""Models that store values in float8, a storage format in which torch computes almost no operators.

A value that the model rounds to float8 is rounded under every plan. Operators on the value after a
conversion back run as planned.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsync_fx
from tests.support.models.small_models import (
    assert_equal,
    build,
    compiled,
    gradients,
    relative_error,
)

Forward = Callable[["Storing", Tensor], Tensor]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Storing(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("table", torch.randn(16, 16).to(E4M3))
        self.register_buffer("scale", torch.tensor(0.5))
        self.stored = nn.Parameter(torch.randn(16, 16).to(E4M3), requires_grad=False)
        self.call = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def there_and_back(model: Storing, x: Tensor) -> Tensor:
    return model.second(model.first(x).to(E4M3).to(x.dtype))


def other_float8(model: Storing, x: Tensor) -> Tensor:
    y = model.first(x)
    for dtype in (E5M2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        y = y.to(dtype).to(x.dtype)
    return model.second(y)


def straight_through(model: Storing, x: Tensor) -> Tensor:
    y = model.first(x)
    return model.second(y + (y.to(E4M3).to(y.dtype) - y).detach())


def rounded_weight(model: Storing, x: Tensor) -> Tensor:
    return model.second(F.linear(x, model.first.weight.to(E4M3).float(), model.first.bias))


def buffer_and_parameter(model: Storing, x: Tensor) -> Tensor:
    return model.second(
        F.linear(model.first(x), model.table.to(x.dtype) * model.scale) + x @ model.stored.float()
    )


def moved_about(model: Storing, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = model.first(x).to(E4M3)
        y = torch.cat([y, y])[:32].clone().view(2, 16, 16).transpose(0, 1).reshape(32, 16)
        y = y[torch.arange(31, -1, -1)]
    return model.second(y.to(x.dtype)) + model.first(x)


def looked_up(model: Storing, x: Tensor) -> Tensor:
    rows = F.embedding(torch.arange(32) % 16, model.table)
    return model.second(rows.type(torch.float32)) + model.first(x).type_as(model.table).float()


def written_to(model: Storing, x: Tensor) -> Tensor:
    model.table[:8].copy_(model.first(x)[:8].detach())
    return model.second(model.table[:8].to(x.dtype)) + model.first(x)[:8]


def multiplied(model: Storing, x: Tensor) -> Tensor:
    scale = torch.ones(())
    with torch.no_grad():
        y = torch._scaled_mm(
            model.first(x).to(E4M3),
            model.stored.t(),
            scale_a=scale,
            scale_b=scale,
            out_dtype=x.dtype,
        )
    return model.second(model.first(x)) + y


def in_autocast(model: Storing, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(model.first(x), model.stored).float()


CALLS = (
    there_and_back, other_float8, straight_through, rounded_weight, buffer_and_parameter,
    moved_about, looked_up, written_to, multiplied,
    in_autocast,
)  # fmt: skip


def train(model: nn.Module, call: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(32, 16, requires_grad=True)
    out = call(x)
    # Gradients through float8 are float8, too: the factors avoid its subnormal numbers.
    (out * torch.linspace(0.5, 4, 16)).sum().backward()
    with torch.no_grad():
        evaluated = call(x)
    assert x.grad is not None
    values = {
        "out": out.detach(),
        "evaluated": evaluated,
        "x": x.grad,
        "table": model.state_dict()["table"].float(),
    }
    return values | gradients(model)


@pytest.mark.parametrize("forward", CALLS, ids=lambda forward: forward.__name__)
def test_models_that_store_float8_train_as_in_torch(forward: Forward) -> None:
    plain = build(lambda: Storing(forward))
    exact = train(plain, plain)
    # A plan overrides the autocast regions of the model.
    fp32 = 0.02 if forward is in_autocast else 0.0
    for precision, inner_backend, bound in (
        ("fp32", "aot_eager", fp32), ("fp32", "eager", fp32), ("bf16", "aot_eager", 0.05),
        ("int8", "aot_eager", 0.2),
        ("fp8", "aot_eager", 0.3),
    ):  # fmt: skip
        torch._dynamo.reset()
        model = build(lambda: Storing(forward))
        actual = train(model, compiled(model, precision=precision, inner_backend=inner_backend))
        if bound:
            assert relative_error(actual, exact) <= bound, precision
        else:
            assert_equal(actual, exact)


def test_float8_output_preserves_its_dtype() -> None:
    def forward(model: Storing, x: Tensor) -> Tensor:
        return model.first(x).to(E5M2)

    model, x = build(lambda: Storing(forward)), torch.randn(4, 16)
    for precision in ("fp32", "bf16", "int8"):
        torch._dynamo.reset()
        actual = compiled(model, precision=precision)(x)
        assert actual.dtype is E5M2
        torch.testing.assert_close(actual.float(), model(x).float(), rtol=0.3, atol=0.1)


def test_autocast_regions_convert_float8_as_autocast_does() -> None:
    model, x = build(lambda: Storing(in_autocast)), torch.randn(4, 16)
    assert torch.equal(compiled(model)(x), model(x))


def test_report_shows_float8_storage() -> None:
    explanation = qsync_fx.explain(
        Storing(there_and_back), torch.randn(4, 16), options={"precision": "int8"}
    )
    assert "f8e4m3[4, 16] = aten.to.dtype(%linear" in explanation.graph()
    assert [str(op.precision) for op in explanation.operators if op.kind == "adjustable"] == [
        "int8",
        "int8",
    ]
    assert "a conversion that the model itself asks for" in str(explanation)
