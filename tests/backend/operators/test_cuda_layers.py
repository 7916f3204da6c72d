"""Layers that use `qsync::gemm` and `qsync::conv2d_product` on a device with kernels.

The tests need no GPU. The CPU implementation of the operators computes the same in plain torch, so
layers that assume kernels on the CPU run the same decisions, graphs, operators and gradients.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from qsync_fx.backend.cuda.kernel_config import Arch, KernelConfig
from qsync_fx.backend.cuda.problem import ConvProblem, GemmProblem, Problem
from qsync_fx.backend.cuda.runtime.device_state import assumed
from qsync_fx.backend.cuda.selection.candidates import candidates
from qsync_fx.backend.cuda.selection.select import decide, dispatch_path
from qsync_fx.backend.cuda.tuning import Environment, TunedChoice, TuningTable
from qsync_fx.backend.operators import linear
from qsync_fx.backend.operators.gemm.dispatch import KERNELS, RecordingDispatcher
from qsync_fx.backend.operators.layer_kernels import _quantizers, computed, problems_of
from qsync_fx.backend.operators.product_utils import compute_product
from qsync_fx.devices.cpu_features import native_integer_products
from qsync_fx.diagnostics import explain
from qsync_fx.formats import FORMATS
from tests.support import tiers
from tests.support.computing.layers_in_fp64 import assert_right
from tests.support.computing.lowered_layers import OUT, Geometry, Layer, leaf, recorded
from tests.support.computing.products_in_fp64 import SEED


def everything(arch: Arch, problems: list[Problem]) -> TuningTable:
    """Return a table in which kernels win every problem that they support."""
    choices = {}
    for problem in problems:
        path = dispatch_path(problem, arch)
        if not isinstance(path, str):
            name = path.configs[0].name
            choices[problem.bucket()] = TunedChoice(
                problem.bucket(), name, {"torch": 2.0, name: 1.0}
            )
    return TuningTable(Environment("", "", "", "", "", 1), choices)


@contextlib.contextmanager
def kernels_on_the_cpu(arch: Arch, problems: list[Problem]) -> Iterator[list[str]]:
    with assumed(arch, everything(arch, problems), on="cpu"), recorded() as calls:
        yield calls


def asked_by(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> list[Problem]:
    recorder = RecordingDispatcher()
    y = compute_product(layer.operator, layer.arguments(x, weight, bias), {}, recorder)
    torch.autograd.grad(y, [t for t in (x, weight) if t.requires_grad], torch.ones_like(y))
    return recorder.problems


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("fmt", ["int8", "int8_grad", "fp8", "tf32"])
@pytest.mark.parametrize("channel", [False, True])
def test_a_linear_layer_by_kernels(fmt: str, arch: Arch, channel: bool) -> None:
    """Output and gradients of a layer with kernels are within the error bounds for torch's
    products.
    """
    x, weight, bias = leaf(torch.randn(4, 8, 64)), leaf(torch.randn(48, 64)), leaf(torch.randn(48))
    layer = Layer(fmt, channel=channel)
    problems = asked_by(layer, x, weight, bias)
    assert [p.bias for p in problems] == [True, False, False] and all(
        isinstance(p, GemmProblem) for p in problems
    )
    with kernels_on_the_cpu(arch, problems) as calls:
        assert_right(layer, x, weight, bias)
    # FP8 requires sm_89. Gradients with a scale of their own are also quantized transposed.
    units = not (fmt == "fp8" and arch == "sm_80")
    assert calls.count("qsync::gemm") == (3 if units else 0)
    transposed = FORMATS[fmt].gradient.scaled and units and not channel
    assert calls.count("qsync::quantize_transposed") == transposed
    assert "aten::_int_mm" not in calls


@pytest.mark.parametrize("fmt", ["int8", "int8_grad", "tf32"])
@pytest.mark.parametrize(
    "geometry", [Geometry([1, 1], [1, 1], [1, 1]), Geometry([2, 1], [0, 1], [1, 2])]
)
def test_a_convolution_by_kernels(fmt: str, geometry: Geometry) -> None:
    x, weight, bias = (
        leaf(torch.randn(2, 32, 9, 8)),
        leaf(torch.randn(64, 32, 3, 3)),
        leaf(torch.randn(64)),
    )
    layer = Layer(fmt, geometry)
    problems = asked_by(layer, x, weight, bias)
    assert [p.operation for p in problems if isinstance(p, ConvProblem)] == [
        "fprop",
        "dgrad",
        "wgrad",
    ]
    served = [p for p in problems if not isinstance(dispatch_path(p, "sm_80"), str)]
    # No INT8 convolution kernel computes gradients.
    assert len(served) == 1 if fmt == "int8_grad" else len(served) > 1
    with kernels_on_the_cpu("sm_80", problems) as calls:
        assert_right(layer, x, weight, bias)
    assert calls.count("qsync::conv2d_product") == len(served)


def test_conv1d_is_conv2d_of_height_one() -> None:
    x, weight = leaf(torch.randn(2, 32, 20)), leaf(torch.randn(64, 32, 3))
    layer = Layer("tf32", Geometry([2], [1], [1]))
    problems = asked_by(layer, x, weight, None)
    assert [(p.h, p.r, p.w) for p in problems if isinstance(p, ConvProblem)] == [(1, 1, 20)] * 3
    with kernels_on_the_cpu("sm_80", problems) as calls:
        assert_right(layer, x, weight, None)
    assert "qsync::conv2d_product" in calls


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry([1, 1], [0, 0], [1, 1], groups=2),
        Geometry([1, 1], [0, 0], [1, 1], transposed=True),
        Geometry([1, 1, 1], [0, 0, 0], [1, 1, 1]),
    ],
)
def test_unsupported_convolutions(geometry: Geometry) -> None:
    spatial = len(geometry.stride)
    x, weight = (
        leaf(torch.randn(2, 32, *[5] * spatial)),
        leaf(torch.randn(32, 32 // geometry.groups, *[3] * spatial)),
    )
    assert asked_by(Layer("int8", geometry), x, weight, None) == []


def test_frozen_operand_computes_no_gradient() -> None:
    x, weight = leaf(torch.randn(8, 16)), torch.randn(8, 16)
    assert len(asked_by(Layer("int8"), x, weight, None)) == 2


def test_device_without_kernels_is_unchanged() -> None:
    x, weight = leaf(torch.randn(8, 64)), leaf(torch.randn(16, 64))
    with recorded() as calls:
        y = Layer("int8")(x, weight)
        before = y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    with assumed("sm_90a"), recorded() as other_calls:  # for CUDA devices
        y = Layer("int8")(x, weight)
        after = y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert calls == other_calls
    assert all(
        torch.equal(expected, actual) for expected, actual in zip(before, after, strict=True)
    )


def test_int8_that_does_not_pay_is_carried_by_bf16() -> None:
    """If INT8 was measured to be slower, torch multiplies in BF16; without tuning, a kernel
    multiplies the quantized operands.
    """
    x, weight = leaf(torch.randn(32, 64)), leaf(torch.randn(16, 64))
    table = everything("sm_80", asked_by(Layer("int8"), x, weight, None))
    slower = {
        problem: replace(choice, faster_than_bf16=False if problem.a == "int8" else None)
        for problem, choice in table.choices.items()
    }
    for rows, kernels in ((slower, 2), ({}, 1)):
        with assumed("sm_80", replace(table, choices=rows), on="cpu"), recorded() as calls:
            assert_right(Layer("int8"), x, weight, None)
        assert "aten::_int_mm" not in calls and calls.count("qsync::gemm") == kernels


# Decisions for fake tensors on CUDA.


@pytest.mark.parametrize("size", [4096, 64])
def test_on_cuda_quantized_operands_are_multiplied_by_kernels(size: int) -> None:
    with (
        torch._subclasses.FakeTensorMode(),
        torch.device("cuda"),
        assumed("sm_90a"),
        recorded() as calls,
    ):
        q, scale = torch.empty(size, size, dtype=torch.int8), torch.empty(())
        y = linear.output(
            q, scale, q, scale, torch.empty(size), FORMATS["int8"], torch.bfloat16, KERNELS
        )
        g = torch.empty(size, size, dtype=torch.float8_e5m2)
        e4m3 = torch.empty(size, size, dtype=torch.float8_e4m3fn)
        grad = linear.weight_gradient(g, scale, e4m3, scale, FORMATS["fp8"], torch.float32, KERNELS)
    assert y.device.type == grad.device.type == "cuda" and (y.dtype, grad.dtype) == (
        torch.bfloat16,
        torch.float32,
    )
    assert calls.count("qsync::gemm") == 2


def test_symbolic_sizes_use_the_example_without_guards() -> None:
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    env = ShapeEnv()
    x = torch.randn(32, 64)
    with (
        torch._subclasses.FakeTensorMode(shape_env=env) as mode,
        assumed("sm_80", on="cpu"),
        recorded() as calls,
    ):
        context: Any = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC]
        )
        rows = mode.from_tensor(x, symbolic_context=context)
        y = linear.output(
            rows, None, torch.empty(16, 64), None, None, FORMATS["tf32"], torch.float32, KERNELS
        )
    assert "qsync::gemm" in calls and isinstance(y.shape[0], torch.SymInt) and not env.guards


# Models.


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32)]
    return torch.nn.Sequential(*layers)


def test_explain_names_the_kernel() -> None:
    explained = explain(model(), torch.randn(8, 64), options={"precision": "int8"})
    assert all("kernel" not in op.reason for op in explained.operators)
    problems = problems_of(explained.lowered_graphs)
    # The input of the model needs no gradient.
    assert [(p.a, p.out) for p in problems] == [
        ("int8", "bf16"),
        ("bf16", "fp32"),
        ("int8", "fp32"),
        ("bf16", "bf16"),
        ("bf16", "fp32"),
    ]
    [first, second] = [
        n for n in explained.graph_module().graph.nodes if str(n.target) == "qsync.linear.default"
    ]
    device = torch.device("cuda")
    with assumed(None):
        assert (
            str(computed(first, device))
            == "torch computes: the device is assumed to have no kernels"
        )
    with assumed("sm_90a"):
        assert str(computed(first, device)).startswith("CUTLASS sm_90a kernels for output; torch")
    with assumed("sm_80", everything("sm_80", problems)):
        assert (
            str(computed(second, device))
            == "CUTLASS sm_80 kernels for output, input gradient, weight gradient"
        )
    with assumed("sm_80", everything("sm_80", problems), on="cpu"):
        again = explain(
            model(), torch.randn(8, 64), options={"precision": "int8", "skip_unprofitable": False}
        )
    reasons = [op.reason for op in again.operators if str(op.node.target) == "qsync.linear.default"]
    assert len(reasons) == 2 and all(
        "CUTLASS sm_80 kernels for output" in reason for reason in reasons
    )
    json.dumps(reasons)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("rows", "inner", "channels"), [(8192, 8192, 8192), (16384, 768, 3072), (16384, 3072, 768)]
)
def test_int8_gradients_of_large_layers_are_kernels_untuned(
    arch: Arch, rows: int, inner: int, channels: int
) -> None:
    """torch's integer product requires the same copies of operands."""

    def config(
        m: int, n: int, k: int, out: str, b_major: Literal["row", "column"]
    ) -> KernelConfig | None:
        return decide(
            GemmProblem(m, n, k, "int8", "int8", out, "row", b_major, "tensor", "tensor"), arch
        ).config

    assert config(rows, channels, inner, "bf16", "column")
    assert config(rows, inner, channels, "bf16", "row")
    assert config(channels, inner, rows, "fp32", "row")


def test_explain_names_the_kernel_of_int8_gradients() -> None:
    """All three products of a linear layer use kernels; torch computes the gradients of a
    convolution, with a reason.
    """
    linears = explain(model(), torch.randn(32, 64), options={"precision": "int8_grad"})
    problems = problems_of(linears.lowered_graphs)
    assert {(p.a, p.b) for p in problems} == {("int8", "int8")} and len(problems) == 5
    layers = [
        n for n in linears.graph_module().graph.nodes if str(n.target) == "qsync.linear.default"
    ]
    device = torch.device("cuda")
    with assumed("sm_90a", everything("sm_90a", problems)):
        first, second = (str(computed(layer, device)) for layer in layers)
    assert first == "CUTLASS sm_90a kernels for output, weight gradient"
    assert second == "CUTLASS sm_90a kernels for output, input gradient, weight gradient"
    quantizers = _quantizers(linears.graphs[0].graph, "sm_90a")
    assert {unit.name for unit in quantizers} == {
        "quantize_sm_90a_fp32_int8",
        "quantize_sm_90a_bf16_int8",
    }
    convolutions = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3), torch.nn.Conv2d(32, 32, 3))
    explained = explain(convolutions, torch.randn(4, 16, 9, 9), options={"precision": "int8_grad"})
    [_, layer] = [
        n
        for n in explained.graph_module().graph.nodes
        if str(n.target) == "qsync.convolution.default"
    ]
    with assumed("sm_80", everything("sm_80", problems_of(explained.lowered_graphs))):
        assert str(computed(layer, device)) == (
            "CUTLASS sm_80 kernels for output; "
            "torch computes input gradient, weight gradient: sm_80 has no kernel for this product "
            "of int8"
        )


@tiers.ALL
@pytest.mark.parametrize("inner_backend", ["aot_eager", "inductor"])
def test_a_model_trains_through_the_operators(
    inner_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled graph calls `qsync::gemm` for every product, saves one byte per value, and
    computes the same as without kernels.
    """
    from qsync_fx.backend.cuda.kernel_build import kernel_registry

    # Do not compile GPU kernels, which the CPU cannot run.
    monkeypatch.setattr(kernel_registry, "prepare", lambda units: [])
    x = torch.randn(8, 64)
    options = {
        "precision": "int8",
        "skip_unprofitable": False,
        "inner_backend": inner_backend,
        "rounding": "nearest",
    }
    problems = problems_of(explain(model(), x, options={"precision": "int8"}).lowered_graphs)
    saved: list[Tensor] = []

    def train() -> tuple[list[Tensor], int]:
        """Return output and gradients, and the number of operator calls in a second step."""
        torch.compiler.reset()
        net = model()
        compiled = torch.compile(net, backend="qsync", options=options)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (saved.append(t), t)[1], lambda t: t
        ):
            y = compiled(x)
        y.float().square().mean().backward()
        results = [y.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            compiled(x).float().square().mean().backward()
        return results, sum(event.name == "qsync::gemm" for event in profile.events())

    before, calls = train()
    assert calls == (2 if native_integer_products() else 0), (
        "the CPU kernel computes the output of each layer"
    )
    saved.clear()
    with assumed("sm_80", everything("sm_80", problems), on="cpu"):
        after, calls = train()
    assert calls == 5
    torch.compiler.reset()
    # The partitioner of "aot_eager" does not minimize bytes: it saves the second weight as
    # converted for the backward pass.
    assert sum(t.dtype == torch.int8 for t in saved) == (3 if inner_backend == "inductor" else 2)
    for expected, actual in zip(before, after, strict=True):
        assert torch.allclose(
            expected.float(), actual.float(), rtol=0.02, atol=0.02 * expected.abs().max().item()
        )


def test_candidates_exist_for_the_tested_problems() -> None:
    """The tests above depend on candidates for their problems."""
    bf16 = GemmProblem(32, 64, 48, "bf16", "bf16", "fp32", "column", "row")
    assert candidates(bf16, "sm_80") and candidates(replace(bf16, a="tf32", b="tf32"), "sm_90a")


def test_seed_has_64_bits() -> None:
    assert SEED.dtype == torch.int64 and set(OUT) >= {"int8", "fp8", "tf32"}
