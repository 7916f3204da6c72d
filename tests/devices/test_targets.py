"""GPUs before Ampere, which cannot compile BF16: compute, output and gradient dtypes are FP16, and
no graph is skipped silently.

No such GPU is required. Passes and operators run on the CPU; Inductor is patched to treat the CPU
as such a GPU.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx as compile_fx
from torch import Tensor, nn
from torch._dynamo.device_interface import CpuInterface

import qsync_fx
from benchmarks.support.unbuilt import without_kernels
from qsync_fx import FORMATS
from qsync_fx.backend.cuda.runtime.device_state import assumed
from qsync_fx.backend.operators.layer_kernels import problems_of
from qsync_fx.devices import TARGETS, support
from qsync_fx.devices.format_support import compiles, row_on, targeted
from qsync_fx.errors import DeviceError, OptionError, PassError
from tests.support import tiers
from tests.support.models.small_models import (
    Convolutional,
    Perceptron,
    build,
    gradients,
    relative_error,
)
from tests.support.models.zoo import language, loss_of
from tests.support.models.zoo_torch import resnet

CPU = torch.device("cpu")


@contextlib.contextmanager
def on_a(target: str, kernels: bool = True) -> Iterator[None]:
    """Treat the CPU as a GPU, with or without the project's kernels."""
    with targeted(target, CPU), contextlib.nullcontext() if kernels else assumed(None, on="cpu"):
        yield


@pytest.fixture
def believing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Inductor treat the CPU as a GPU without BF16."""
    monkeypatch.setattr(compile_fx, "is_gpu", lambda device: True)
    monkeypatch.setattr(
        type(CpuInterface.get_device_properties()), "name", "a GPU without BF16", raising=False
    )
    monkeypatch.setattr(
        CpuInterface, "is_bf16_supported", staticmethod(lambda including_emulation=False: False)
    )


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_format_support_is_one_row_per_device(target: str) -> None:
    with on_a(target):
        old = TARGETS[target] < (8, 0)
        for name, fmt in FORMATS.items():
            row = row_on(CPU, fmt)
            named = {row.carrier, row.output, row.gradient, row.elsewhere}
            assert (FORMATS["bf16"] not in named) if old else row is fmt, name
            assert all(compiles(CPU, other) for other in named if other.plain)
        int8, fp8 = row_on(CPU, FORMATS["int8"]), row_on(CPU, FORMATS["fp8"])
        assert {int8.carrier, int8.output, int8.gradient} == {FORMATS["fp16" if old else "bf16"]}
        assert fp8.carrier is FORMATS["fp32" if old else "bf16"]
    assert row_on(CPU, FORMATS["int8"]) is FORMATS["int8"]


def test_bf16_is_substituted_by_fp16_or_an_error_if_exact() -> None:
    explanation = qsync_fx.explain(
        Perceptron(), torch.randn(4, 16), options={"precision": "bf16", "target": "t4"}
    )
    products = [op for op in explanation.operators if op.kind == "adjustable"]
    assert {str(op.precision) for op in products} == {"fp16"}
    assert all("bf16 cannot be compiled for compute capability 7.5" in op.reason for op in products)
    with pytest.raises(DeviceError, match="emulate_unsupported=True forbids fp16"):
        qsync_fx.explain(
            Perceptron(),
            torch.randn(4, 16),
            options={"precision": "bf16", "target": "t4", "emulate_unsupported": True},
        )


@pytest.mark.parametrize("target", ["v100", "t4", "a100"])
def test_explain_shows_the_graph_of_an_absent_device(target: str) -> None:
    model, x = Convolutional(), torch.randn(2, 1, 8, 8)
    explanation = qsync_fx.explain(
        model, x, options={"precision": "int8", "target": target, "skip_unprofitable": False}
    )
    text, old = explanation.graph("lower"), target != "a100"
    assert ("bfloat16" not in text and "bf16" not in text) is old
    assert ("float16)" in text and "f16[" in text) is True
    assert f"target {target} (compute capability" in str(explanation)
    assert "INT8" in text or "int8" in text
    again = explanation.replanned(qsync_fx.Plan.uniform("int8"))
    assert again.graph("lower") == text
    outputs = {str(op.output) for op in explanation.adjustable if str(op.precision) == "int8"}
    assert "bf16" not in outputs or not old


def test_compilation_for_an_absent_device_is_an_error() -> None:
    model = torch.compile(
        Perceptron(), backend="qsync", options={"precision": "int8", "target": "t4"}
    )
    with pytest.raises(DeviceError, match=r"runs on cpu, but its target is t4"):
        model(torch.randn(2, 16))
    with pytest.raises(OptionError, match="did you mean"):
        qsync_fx.explain(Perceptron(), torch.randn(2, 16), options={"target": "t5"})


def _perceptron() -> tuple[nn.Module, dict[str, Any]]:
    return build(Perceptron), {"x": torch.randn(8, 16)}


@pytest.mark.parametrize(
    ("make", "kernels", "built"),
    [
        pytest.param(_perceptron, False, False, id="mlp-torch-unbuilt"),
        pytest.param(_perceptron, True, True, id="mlp-kernels", marks=tiers.ALL),
        pytest.param(
            language("BertForMaskedLM"), True, False, id="bert-kernels-unbuilt", marks=tiers.ALL
        ),
        pytest.param(language("BertForMaskedLM"), False, True, id="bert-torch", marks=tiers.EVERY),
        pytest.param(resnet, True, True, id="resnet-kernels", marks=tiers.EVERY),
        pytest.param(resnet, False, False, id="resnet-torch-unbuilt", marks=tiers.ALL),
    ],
)
@pytest.mark.usefixtures("believing")
def test_models_train_in_int8_where_inductor_compiles_no_bf16(
    make: Any, kernels: bool, built: bool
) -> None:
    """If `built` is false, Inductor only generates the source of its kernels, and gradients are not
    compared.
    """
    model, inputs = make()

    def train(call: Any) -> dict[str, Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        output = call(**inputs) if isinstance(inputs, dict) else call(*inputs)
        (loss_of(output) if not isinstance(output, Tensor) else output.square().mean()).backward()
        return gradients(model)

    model.train()
    plain = train(torch.compile(model, backend="aot_eager")) if built else None
    with (
        on_a("t4", kernels),
        contextlib.nullcontext() if built else without_kernels(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")  # Inductor warns of a skipped graph
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", "Guards may run slower")  # Dynamo on Python 3.13.0
        step = torch.compile(
            model, backend="qsync", options={"precision": "int8", "skip_unprofitable": False}
        )
        ours = train(step)
    applied = qsync_fx.plan_coverage(model)
    ran = [
        op for op in applied.operators if op.kind == "adjustable" and str(op.precision) == "int8"
    ]
    assert ran, str(applied)
    assert all(gradient.isfinite().all() for gradient in ours.values())
    assert plain is None or relative_error(ours, plain) < 0.5


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("precision", ["int8", "int8_grad", "fp8"])
@pytest.mark.parametrize("layer", ["linear", "convolution"])
@pytest.mark.parametrize("scaling", ["tensor", "channel"])
def test_sums_stay_in_the_range_of_fp16(
    precision: str, layer: str, scaling: str, kernels: bool
) -> None:
    """A sum of 5 products of 127 by 127 exceeds the range of FP16. Some gradients are below that
    range and some above it.
    """
    torch.manual_seed(0)
    module = nn.Linear(300, 24) if layer == "linear" else nn.Conv2d(33, 24, 3)
    x = torch.full((40, 300), 0.5) if layer == "linear" else torch.full((2, 33, 7, 5), 0.5)
    x = (x + 0.01 * torch.randn_like(x)).requires_grad_()
    with torch.no_grad():
        module.weight.fill_(0.25)
        module.weight.add_(0.01 * torch.randn_like(module.weight))
    incoming = torch.randn_like(module(x)) * 1e-9
    incoming[0] *= 1e14  # below and above the range of FP16

    def train(call: Any) -> tuple[Tensor, ...]:
        y = call(x)
        return (y, *torch.autograd.grad(y, (x, module.weight, module.bias), incoming))

    options = {
        "precision": precision,
        "skip_unprofitable": False,
        "inner_backend": "aot_eager",
        "rounding": "nearest",
        "scaling": scaling,
    }
    exact, on_cpu = train(module), train(torch.compile(module, backend="qsync", options=options))
    torch._dynamo.reset()
    with on_a("t4", kernels):
        on_t4 = train(torch.compile(module, backend="qsync", options=options))
    for actual, other, wanted in zip(on_t4, on_cpu, exact, strict=True):
        assert actual.isfinite().all()
        # The CPU's emulation dtype, BF16, rounds more coarsely than FP16.
        assert (actual - wanted).norm() <= 1.1 * (other - wanted).norm() + 0.002 * wanted.norm()


def test_infinite_gradients_reach_loss_scaling() -> None:
    layer = nn.Linear(16, 8)
    with on_a("t4", kernels=False):
        step = torch.compile(
            layer,
            backend="qsync",
            options={"precision": "int8", "inner_backend": "aot_eager", "skip_unprofitable": False},
        )
        y = step(torch.randn(4, 16))
        y.backward(torch.full_like(y, float("inf")))
    assert layer.weight.grad is not None and not layer.weight.grad.isfinite().any()
    layer.zero_grad()
    with on_a("t4", kernels=False):
        step(torch.randn(4, 16)).backward(torch.zeros(4, 8))
    assert not layer.weight.grad.any()


def test_no_format_that_the_device_does_not_compile_is_put_in() -> None:
    @qsync_fx.graph_pass(after="lower")
    def narrow(graph: qsync_fx.PrecisionGraph) -> None:
        output = graph.nodes[-1]
        (result,) = output.args[0]
        with graph.graph.inserting_before(output):
            half = graph.graph.call_function(torch.ops.aten.to.dtype, (result, torch.bfloat16))
            back = graph.graph.call_function(torch.ops.aten.to.dtype, (half, torch.float32))
        output.args = ((back,),)

    with pytest.raises(PassError, match="has no format that the device does not compile"):
        qsync_fx.explain(
            Perceptron(), torch.randn(4, 16), options={"passes": [narrow], "target": "t4"}
        )
    qsync_fx.explain(
        Perceptron(), torch.randn(4, 16), options={"passes": [narrow], "target": "a100"}
    )


@pytest.mark.usefixtures("believing")
def test_skipped_graph_is_an_error_only_with_a_plan() -> None:
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    with on_a("t4"):
        planned = torch.compile(
            Perceptron().bfloat16(), backend="qsync", options={"precision": "fp32"}
        )
        with pytest.raises(
            DeviceError, match=r"inductor does not compile this graph.*without the plan"
        ):
            planned(x)
        unplanned = torch.compile(Perceptron().bfloat16(), backend="qsync")
        with pytest.warns(UserWarning, match="it runs uncompiled"):
            assert unplanned(x).dtype is torch.bfloat16


def test_kernels_are_queried_for_the_formats_of_the_device() -> None:
    """Kernel problems come from tensors without data, whose device does not name the target."""
    model, x = nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True)
    for target, gradient in (("t4", "fp16"), ("a100", "bf16")):
        explanation = qsync_fx.explain(
            model, x, options={"precision": "int8", "target": target, "skip_unprofitable": False}
        )
        with explanation.on_target():
            formats = [
                (problem.a, problem.b) for problem in problems_of(explanation.lowered_graphs)
            ]
        assert formats == [("int8", "int8"), (gradient, gradient), (gradient, gradient)]


def test_support_names_the_emulation_dtype_of_old_devices() -> None:
    with on_a("v100"):
        assert "computed in fp16" in support(CPU, FORMATS["int8"]).reason
        assert "computed in fp32" in support(CPU, FORMATS["fp8"]).reason
