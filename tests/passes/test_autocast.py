"""Autocast around and inside the model.

Without a plan or a precision the autocast regions decide: the compiled model is bit-identical to
torch under autocast. A plan overrides regions; only an explicit choice for an operator overrides an
island with autocast disabled.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qsync_fx
from qsync_fx import Plan
from qsync_fx.backend.operators.gemm import cpu_kernels
from qsync_fx.devices.format_support import default_precision
from tests.support.models.small_models import (
    Convolutional,
    assert_equal,
    build,
    compiled,
    gradients,
    relative_error,
)

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Attention(nn.Module):
    """Operators for which autocast has policies, in the orders of real models: linear, matmul,
    softmax, norms, losses, cat.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.mix = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = torch.softmax(q @ k.transpose(-2, -1) / 4, -1)
        y = self.norm(x + self.out(scores @ v))
        y = torch.cat([y, F.gelu(self.mix(y))], -1)
        return self.head(y).pow(2).mean(1)


class Inside(nn.Module):
    """A BF16 region in the forward pass, with an island in which autocast is off."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.region, self.island, self.after = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.relu(self.region(x))
            with torch.autocast("cpu", enabled=False):
                x = torch.tanh(self.island(x.float()))
            x = self.after(x)
        return x.float()


def _step(model: Any, x: Tensor, ambient: torch.dtype | None) -> Tensor:
    with torch.autocast("cpu", dtype=ambient, enabled=ambient is not None):
        out = model(x)
        loss = F.mse_loss(out.float(), torch.ones_like(out, dtype=torch.float32))
    loss.backward()
    return out


def _torch(model: Any) -> Any:
    """Return the model compiled by torch, with the backward pass outside of autocast as in eager
    mode.
    """
    fast = torch.compile(model, backend="aot_eager")

    def run(*args: Any) -> Any:
        with torch._functorch.config.patch(backward_pass_autocast="off"):
            return fast(*args)

    return run


def _precisions(
    model: nn.Module, x: Tensor, ambient: torch.dtype | None, **options: Any
) -> dict[str, str]:
    with torch.autocast("cpu", dtype=ambient, enabled=ambient is not None):
        operators = qsync_fx.explain(model, x, options=options or None).operators
    return {str(op.id): str(op.precision) for op in operators if op.kind == "adjustable"}


@pytest.mark.parametrize("make", [Attention, Inside], ids=lambda make: make.__name__)
@pytest.mark.parametrize("ambient", [torch.bfloat16, torch.float16])
def test_default_precision_equals_autocast(make: type[nn.Module], ambient: torch.dtype) -> None:
    model, plain, x = build(make), build(make), torch.randn(8, 5, 16)
    actual = _step(compiled(model, emulate_unsupported=True), x, ambient)
    reference = _step(_torch(plain), x, ambient)
    assert actual.dtype is reference.dtype
    assert torch.equal(actual, reference)
    assert_equal(gradients(model), gradients(plain))


def test_a_weight_used_twice_is_cast_once_as_in_eager_mode() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.relu(self.linear(x)))

    model, plain, x = build(Twice), build(Twice), torch.randn(8, 16)
    assert torch.equal(_step(compiled(model), x, torch.bfloat16), _step(plain, x, torch.bfloat16))
    assert_equal(gradients(model), gradients(plain))


def test_automatic_precision_without_a_region_is_the_default_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(cpu_kernels.ENOUGH_WORK, 16, 0)  # as for large layers
    precisions = _precisions(build(Attention), torch.randn(2, 5, 16), None)
    assert set(precisions.values()) == {default_precision(torch.device("cpu")).name}


def test_automatic_precision_follows_the_region() -> None:
    x = torch.randn(8, 16)
    inside = _precisions(build(Inside), x, None)
    assert inside["region/linear"] == inside["after/linear"] == "bf16"
    assert inside["island/linear"] == "fp32"
    ambient = _precisions(build(Attention), torch.randn(2, 5, 16), torch.bfloat16)
    assert ambient["qkv/linear"] == "bf16"
    assert ambient["norm/layer_norm"] == "fp32", (
        "autocast keeps layer_norm in the format of its input, an FP32 sum"
    )


@pytest.mark.parametrize("make", [Attention, Inside], ids=lambda make: make.__name__)
def test_fp32_runs_in_fp32_under_an_ambient_region(make: type[nn.Module]) -> None:
    """A plan overrides the region; the output has the dtype that the caller expects under
    autocast.
    """
    model, plain, x = build(make), build(make), torch.randn(8, 5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = compiled(model, plan=Plan(patterns=[("**", "fp32")]))(x)
        expected = _torch(build(make))(x)
    forward = Attention.forward if make is Attention else _without_regions
    reference = _torch(forward)(plain, x)
    assert actual.dtype is expected.dtype
    assert torch.equal(actual, reference.to(actual.dtype))
    actual.float().square().mean().backward()
    reference.to(actual.dtype).float().square().mean().backward()
    assert_equal(gradients(model), gradients(plain))


def _without_regions(model: nn.Module, x: Tensor) -> Tensor:
    x = torch.relu(model.region(torch.tanh(model.before(x))))
    return model.after(torch.tanh(model.island(x)))


def test_autocast_island_yields_only_to_explicit_choices() -> None:
    model, x = build(Inside), torch.randn(8, 16)
    uniform = _precisions(model, x, None, precision="int8")
    assert uniform == {f"{name}/linear": "int8" for name in ("before", "region", "after")} | {
        "island/linear": "fp32"
    }
    explicit = _precisions(model, x, None, plan=Plan("int8", patterns=[("island", "bf16")]))
    assert explicit["island/linear"] == "bf16"


def test_autocast_switched_off_around_the_call() -> None:
    model, x = build(Inside), torch.randn(8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert set(_precisions(model, x, None, precision="int8").values()) == {"fp32", "int8"}


@pytest.mark.parametrize("precision", ["int8", "fp8", "bf16"])
def test_narrow_precisions_under_an_ambient_region(precision: str) -> None:
    model, plain = build(Convolutional), build(Convolutional)
    x, y = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    fast = compiled(model, precision=precision)
    for network, region in ((fast, True), (plain, False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=region):
            loss = F.cross_entropy(network(x), y)
        loss.backward()
    model.conv.bias.grad = plain.conv.bias.grad = None
    assert (
        relative_error(gradients(model), gradients(plain))
        < {"bf16": 0.03, "int8": 0.15, "fp8": 0.4}[precision]
    )


def test_the_region_outside_is_left_as_it_was() -> None:
    fast = compiled(build(Inside), precision="int8")
    with torch.autocast("cpu", dtype=torch.float16):
        fast(torch.randn(8, 16))
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.float16
    assert not torch.is_autocast_enabled("cpu")


def test_inside_and_outside_a_region_compile_apart() -> None:
    model, plain, x = build(Attention), build(Attention), torch.randn(8, 5, 16)
    fast = compiled(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        region = fast(x)
        assert torch.equal(region, _torch(plain)(x))
    assert fast(x).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fast(x), region)


def test_a_checkpointed_region_under_autocast() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Attention()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False)

    model, plain, x = build(Checkpointed), build(Checkpointed), torch.randn(8, 5, 16)
    actual = _step(compiled(model), x, torch.bfloat16)
    reference = _step(_torch(plain), x, torch.bfloat16)
    assert torch.equal(actual, reference)
    assert_equal(gradients(model), gradients(plain))


def test_autocast_inside_an_operator() -> None:
    """`bilinear` is a composite operator: autocast casts intermediate values that only it sees."""

    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Bilinear(16, 16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.both(x, x))

    model, plain, x = build(Bilinear), build(Bilinear), torch.randn(8, 16)
    actual = _step(compiled(model), x, torch.bfloat16)
    reference = _step(_torch(plain), x, torch.bfloat16)
    assert actual.dtype is reference.dtype
    assert torch.equal(actual, reference)
    assert_equal(gradients(model), gradients(plain))
