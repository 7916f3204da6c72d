"""INT8 matrix products by torch's integer unit, of any shape and layout: exact or not available."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from hypothesis import given, settings, strategies as st
from torch import Tensor, fx, nn

import qsync_fx
from qsync_fx.backend.operators.gemm import int_mm
from qsync_fx.devices.cpu_features import cpu_multiplies_integers, native_integer_products
from qsync_fx.formats import FORMATS, encoding
from tests.support import tiers
from tests.support.computing.lowered_layers import Layer, leaf, recorded

INT8 = FORMATS["int8"]
SIZES = st.one_of(st.integers(0, 3), st.integers(4, 70))
LAYOUTS = st.sampled_from(["rows", "columns", "within", "spread"])


def matrix(rows: int, columns: int, layout: str) -> Tensor:
    match layout:
        case "rows":
            return torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
        case "columns":
            return torch.randint(-127, 128, (columns, rows), dtype=torch.int8).t()
        case "within":
            return torch.randint(-127, 128, (rows + 3, columns + 5), dtype=torch.int8)[
                2 : rows + 2, 3 : columns + 3
            ]
        case _:
            return torch.randint(-127, 128, (rows, 2 * columns), dtype=torch.int8)[:, ::2]


@settings(max_examples=150)
@given(SIZES, SIZES, SIZES, LAYOUTS, LAYOUTS, st.integers(0, 2**32))
def test_a_product_is_exact_or_none(
    m: int, n: int, k: int, first: str, second: str, seed: int
) -> None:
    torch.manual_seed(seed)
    a, bt = matrix(m, k, first), matrix(n, k, second)
    result = int_mm.product(a, bt, (INT8, INT8))
    assert (result is None) == (k == 1 or not cpu_multiplies_integers())
    if result is not None:
        assert result.dtype == torch.int32 and torch.equal(
            result.double(), a.double() @ bt.double().t()
        )


@pytest.mark.parametrize(("rows", "unit"), [(133_144, True), (133_145, False)])
def test_weight_gradients_that_int32_does_not_hold_are_summed_in_fp32(
    rows: int, unit: bool
) -> None:
    x, weight = torch.ones(rows, 1), leaf(torch.ones(2, 1))
    y = Layer("int8_grad")(x, weight)
    with recorded() as calls:
        [gradient] = torch.autograd.grad(y, weight, torch.ones_like(y))
    unit = unit and cpu_multiplies_integers()
    assert ("qsync::integer_products" in calls) == unit
    bound = 2**-22 if unit else rows * 2**-24
    torch.testing.assert_close(gradient, torch.full((2, 1), float(rows)), rtol=bound, atol=0.0)


@pytest.mark.skipif(
    not native_integer_products(), reason="torch computes INT8 products on this CPU"
)
def test_gradients_in_int8_cost_three_products_by_the_kernel() -> None:
    x, weight = leaf(torch.randn(32, 48)), leaf(torch.randn(16, 48))
    with recorded() as calls:
        y = Layer("int8_grad")(x, weight)
        torch.autograd.grad(y, (x, weight), torch.randn_like(y))
    assert (
        calls.count("qsync::gemm") == 3
        and "aten::mm" not in calls
        and "qsync::integer_products" not in calls
    )
    assert calls.count("qsync::quantize") == 3, (
        "each operand is quantized once, and so is the gradient that both products share"
    )


def test_formats_with_equal_values_share_a_name() -> None:
    assert {
        row.name: encoding(row).name for row in FORMATS.values() if encoding(row) is not row
    } == {"int8_grad": "int8"}


WITHOUT_UNITS = """
import torch
from tests.support.computing.lowered_layers import Layer, leaf, recorded
from torch import nn

import qsync_fx
from qsync_fx import _C
from qsync_fx.devices import support
from qsync_fx.devices.cpu_features import cpu_multiplies_integers, native_integer_products
from qsync_fx.formats import FORMATS

print(_C.isa())
x, weight = leaf(torch.full((8, 64), 2.0)), leaf(torch.full((16, 64), -3.0))
for fmt in ("int8", "int8_grad"):
    with recorded() as calls:
        y = Layer(fmt, rounding="nearest", out_dtype=torch.float32)(x, weight)
        found = y, *torch.autograd.grad(y.sum(), (x, weight))
    for one, exact in zip(found, (-384.0, -48.0, 16.0), strict=True):
        torch.testing.assert_close(one, torch.full_like(one, exact))
    as_integers = bool({"qsync::gemm", "qsync::integer_products"} & {*calls})
    print(fmt, as_integers == (cpu_multiplies_integers() or native_integer_products()), support(torch.device("cpu"), FORMATS[fmt]).kind)

torch.manual_seed(0)
images = torch.randn(16, 3, 9, 9)
layers = nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.GELU(), nn.Flatten(), nn.Linear(1600, 32), nn.GELU(), nn.Linear(32, 10)
model = nn.Sequential(*layers)

def step(run):
    model.zero_grad()
    y = run(images)
    y.square().mean().backward()
    return y.detach(), *(p.grad for p in model.parameters())

exact = step(model)
for options in ({}, {"precision": "int8"}, {"precision": "int8_grad"}):
    planned = {str(op.precision) for op in qsync_fx.explain(model, images, options=options).operators if op.kind == "adjustable"}
    torch._dynamo.reset()
    found = step(torch.compile(model, backend="qsync", options={"inner_backend": "aot_eager", **options}))
    off = max(float((one - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True))
    print(*planned, "exact" if off < 1e-5 else "near" if off < 0.2 else off)
"""


@tiers.ALL
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
@pytest.mark.parametrize(
    ("isa", "path", "capability"), [("AVX2", "avx2", "avx2"), ("AVX512_CORE", "scalar", "default")]
)
def test_a_processor_without_units_trains_in_fp32_by_default_and_right_in_int8(
    isa: str, path: str, capability: str
) -> None:
    """oneDNN's saturating unit is not used; layers and a model equal those in FP32 except for
    rounding.
    """
    env = {
        **os.environ,
        "ONEDNN_MAX_CPU_ISA": isa,
        "QSYNC_CPU_ISA": path,
        "ATEN_CPU_CAPABILITY": capability,
    }
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_UNITS], env=env, capture_output=True, text=True, timeout=250
    )
    assert ran.returncode == 0, ran.stderr
    layers = ["int8 True simulated", "int8_grad True simulated"]
    assert ran.stdout.splitlines() == [path, *layers, "fp32 exact", "int8 near", "int8_grad near"]


@pytest.mark.parametrize("width", [48, 64])
def test_saved_weight_has_one_byte_per_value(width: int) -> None:
    """Regression test: for every other size, torch's partitioner saved the weight in BF16."""
    layer, x = nn.Linear(width, width, bias=False), leaf(torch.randn(32, width))
    saved: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def backward(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        saved.extend((t.dtype, tuple(t.shape)) for t in inputs)
        return make_boxed_func(graph.forward)

    lowered = qsync_fx.explain(layer, x, options={"precision": "int8"}).graph_module("lower")
    names = [node.name for node in lowered.graph.nodes if node.op == "placeholder"]
    compiled = aot_function(
        lowered,
        lambda graph, _: make_boxed_func(graph.forward),
        backward,
        partition_fn=min_cut_rematerialization_partition,
    )
    arguments = (layer.weight if "weight" in name else x for name in names)
    compiled(*arguments)[0].sum().backward()
    assert (torch.int8, (width, width)) in saved and (torch.bfloat16, (width, width)) not in saved
