"""Models entirely or partly in FP16, BF16 or FP64: their dtypes are preserved unless the plan
changes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsync_fx
from qsync_fx.devices.cpu_features import multiplied_in_fp32
from qsync_fx.devices.format_support import default_precision
from tests.support import tiers
from tests.support.models.small_models import (
    assert_equal,
    build,
    compiled,
    gradients,
    relative_error,
)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Attending(nn.Module):
    """Embedding, linear layers, a layer norm with parameters, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        self.hidden, self.norm = nn.Linear(16, 32), nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.hidden(self.embedding(x[..., 0].argsort(-1)))))
        logits: Tensor = self.head(x + self.attention(x, x, x, need_weights=False)[0])
        return logits


class Convolving(nn.Module):
    """Convolution, and batch norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].to(self.conv.weight.dtype)
        logits: Tensor = self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))
        return logits


class Mixed(nn.Module):
    """Layers with different dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 16).half(), nn.LayerNorm(16)
        self.second, self.last = nn.Linear(16, 16).bfloat16(), nn.Linear(16, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.half()).float())
        logits: Tensor = self.last(self.second(x.bfloat16()).double())
        return logits


def train(model: nn.Module, call: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    out = call(torch.randn(4, 16, 16))
    out.float().square().mean().backward()
    buffers = {name: t.clone() for name, t in model.named_buffers()}
    return {"out": out.detach()} | gradients(model) | buffers


def assert_as_eager(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Assert equal values, within a bound on a CPU without AVX-512: there the backend rounds once,
    and torch does not.
    """
    if not multiplied_in_fp32():
        return assert_equal(actual, wanted)
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        assert actual[name].dtype == value.dtype, name
        error = (actual[name].double() - value.double()).norm()
        assert error <= 0.02 * value.double().norm() + 1e-3, name
    return None


def kept(make: Callable[[], nn.Module], dtype: torch.dtype | None) -> nn.Module:
    model = build(make)
    return model if dtype is None else model.to(dtype)


HALF, BF16, FP64 = torch.float16, torch.bfloat16, torch.float64
MODELS = [(make, dtype) for make in (Attending, Convolving) for dtype in (HALF, BF16, FP64)]


@pytest.mark.parametrize(("make", "dtype"), MODELS)
def test_dtypes_of_the_model_are_preserved(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    plain = kept(make, dtype)
    expected = train(plain, torch.compile(plain, backend="aot_eager"))
    equivalent = (
        [{"precision": "fp16"}]
        if dtype is HALF
        else [{"precision": "bf16"}]
        if dtype is BF16
        else []
    )
    for options in ({}, {"precision": "fp32"}, {"precision": "tf32"}, *equivalent):
        torch._dynamo.reset()
        model = kept(make, dtype)
        assert_as_eager(train(model, compiled(model, **options)), expected)


def test_each_part_of_a_mixed_model_stays() -> None:
    plain = build(Mixed)
    expected = train(plain, torch.compile(plain, backend="aot_eager"))
    model = build(Mixed)
    assert_equal(train(model, compiled(model, precision="fp32")), expected)
    # Only the FP32 operator gets the default precision.
    explanation = qsync_fx.explain(build(Mixed), torch.randn(4, 16, 16))
    precisions = {
        str(op.id): str(op.precision) for op in explanation.operators if op.kind == "adjustable"
    }
    default = default_precision(torch.device("cpu")).name
    assert precisions == {
        "first/linear": "fp16",
        "norm/layer_norm": default,
        "second/linear": "bf16",
        "last/linear": "fp64",
    }


@pytest.mark.parametrize("inner_backend", ["eager", pytest.param("inductor", marks=tiers.ALL)])
def test_half_models_stay_half_with_any_compiler(inner_backend: str) -> None:
    plain, model = kept(Attending, HALF), kept(Attending, HALF)
    expected = train(plain, plain)
    assert relative_error(train(model, compiled(model, inner_backend=inner_backend)), expected) <= (
        0 if inner_backend == "eager" else 1e-3
    )


@pytest.mark.parametrize(
    ("make", "dtype"), [(make, dtype) for make, dtype in MODELS if dtype is not FP64]
)
def test_a_plan_changes_a_narrow_model(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """Norms compute in another narrow dtype than their parameters have; gradients and running
    statistics retain the dtype of the model.
    """
    exact = train(model := kept(make, dtype).float(), model)
    for precision, bound in ("bf16", 0.02), ("int8", 0.15):
        torch._dynamo.reset()
        model = kept(make, dtype)
        actual = train(model, compiled(model, precision=precision))
        assert relative_error(actual, exact) <= bound, precision
        assert {t.dtype for name, t in actual.items() if "batches" not in name} == {dtype}


def test_a_plan_that_names_a_layer_widens_it() -> None:
    plan = (
        qsync_fx.Plan.uniform("fp32")
        .with_precision("hidden", "fp32")
        .with_precision("embedding", "fp32")
    )
    explanation = qsync_fx.explain(
        kept(Attending, HALF), torch.randn(2, 4, 16), options={"plan": plan}
    )
    precisions = {
        op.id.module: str(op.precision) for op in explanation.operators if op.kind == "adjustable"
    }
    assert (
        precisions["embedding"],
        precisions["hidden"],
        precisions["norm"],
        precisions["head"],
    ) == (
        "fp32",
        "fp32",
        "fp16",
        "fp16",
    )


def test_reports_show_preserved_and_substituted_formats() -> None:
    def reasons(model: nn.Module, **options: Any) -> dict[str, str]:
        explanation = qsync_fx.explain(model, torch.randn(2, 4, 16), options=options)
        return {
            op.id.module: f"{op.precision}: {op.reason}"
            for op in explanation.operators
            if op.kind == "adjustable"
        }

    stays = "fp16: its format in the model is fp16, which no default changes"
    assert reasons(kept(Attending, HALF))["head"] == stays
    assert reasons(kept(Attending, HALF), precision="fp32")["head"] == stays
    assert reasons(kept(Attending, HALF), precision="fp16")["head"] == "fp16: plan: uniform fp16"
    # INT8 does not apply to a norm, which stays in the format of the model.
    norm = reasons(kept(Attending, HALF), precision="int8")["norm"]
    assert (
        norm
        == "fp16: plan: uniform int8; int8 applies to products with a weight, layer_norm runs in "
        "fp16"
    )
    # A plan for an FP32 model: the CPU has no FP16 unit.
    assert reasons(build(Attending), precision="fp16")["head"].startswith(
        "bf16: plan: uniform fp16; FP16 runs as BF16"
    )
    assert (
        reasons(build(Attending), precision="fp16", emulate_unsupported=True)["head"]
        == "fp16: plan: uniform fp16"
    )


def test_an_autocast_region_in_half_is_computed_in_half() -> None:
    class Region(Attending):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return super().forward(x)

    plain, model = build(Region), build(Region)
    expected = train(plain, torch.compile(plain, backend="aot_eager"))
    assert_as_eager(train(model, compiled(model)), expected)
