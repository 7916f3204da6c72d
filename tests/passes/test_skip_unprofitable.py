"""Option "skip_unprofitable": a layer that is not faster in the planned format runs in a wider one,
with a reason, unless the plan names it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.backend.cuda.runtime.device_state import assumed
from qsync_fx.backend.cuda.selection.select import dispatch_path
from qsync_fx.backend.cuda.tuning import Environment, TunedChoice, TuningTable, counterpart
from qsync_fx.backend.operators import convolution
from qsync_fx.backend.operators.gemm import cpu_kernels
from qsync_fx.backend.operators.layer_kernels import problems_of
from qsync_fx.devices import format_support
from qsync_fx.devices.cpu_features import Cpu
from qsync_fx.errors import OptionError, PlanWarning
from qsync_fx.plan import Plan

ROWS = 512


class Net(nn.Module):
    """Layers large enough for INT8, for BF16 and for neither, and convolutions for which INT8 pays
    and does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thin, self.wide = nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3)
        self.step, self.grouped = nn.Conv2d(64, 64, 1, stride=2), nn.Conv2d(64, 64, 3, groups=2)
        self.large, self.middle, self.small = (
            nn.Linear(1024, 1024),
            nn.Linear(1024, 16),
            nn.Linear(1024, 2),
        )

    def forward(self, images: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        large = self.large(rows)
        # A product of two activations has no weight, so no layer kernel computes it.
        product = torch.matmul(rows, large.t())
        return (
            self.grouped(self.step(self.wide(self.thin(images)))),
            self.middle(large),
            self.small(large),
            product,
        )


@contextmanager
def counting_as(
    native: bool, by_onednn: bool, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Patch the CPU to have an INT8 unit that the native module supports, one that oneDNN supports,
    and a BF16 unit, or not.
    """
    for where in (format_support, cpu_kernels, convolution):
        monkeypatch.setattr(where, "native_integer_products", lambda: native)
    monkeypatch.setattr(format_support, "native_integer_unit", lambda: native)
    monkeypatch.setattr(format_support, "cpu_multiplies_integers", lambda: by_onednn)
    monkeypatch.setattr(format_support, "native_bf16_unit", lambda: bf16)
    monkeypatch.setattr(format_support, "cpu", lambda: Cpu("", ("vnni",) * by_onednn, None, 1))
    format_support.forget()
    try:
        yield
    finally:
        monkeypatch.undo()
        format_support.forget()


def explained(**options: Any) -> qsync_fx.diagnostics.Explanation:
    inputs = torch.randn(8, 3, 32, 32), torch.randn(ROWS, 1024)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        return qsync_fx.explain(Net(), *inputs, options=options)


def layers_of(explanation: qsync_fx.diagnostics.Explanation) -> dict[str, tuple[str, str]]:
    """Return the precision and the reason of each layer."""
    layers = [op for op in explanation.operators if op.kind == "adjustable" and op.id.module]
    return {op.id.module: (str(op.precision), op.reason) for op in layers}


def found(
    unit: bool, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> dict[str, tuple[str, str]]:
    """Return the precision and the reason of each layer, on a CPU with or without units for INT8
    and BF16.
    """
    with counting_as(unit, unit, unit, monkeypatch):
        return layers_of(explained(**options))


def test_operators_without_a_gain_run_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        ROWS * 1024 * 2
        < cpu_kernels.ENOUGH_WORK[16]
        <= ROWS * 1024 * 16
        < cpu_kernels.ENOUGH_WORK[8]
    )
    layers = found(True, monkeypatch, precision="int8_grad", skip_unprofitable=True)
    assert {name: fmt for name, (fmt, _) in layers.items()} == {
        **dict.fromkeys(("wide", "large"), "int8_grad"),
        **dict.fromkeys(("thin", "step", "grouped", "middle"), "bf16"),
        "small": "fp32",
    }
    because = f"{ROWS} x 16 x 1024 is too small for int8 to pay, so it runs in bf16"
    assert layers["middle"][1] == f"plan: uniform int8_grad; {because}"
    assert layers["small"][1].endswith(
        f"in bf16; {ROWS} x 2 x 1024 is too small for bf16 to pay, so it runs in fp32"
    )
    assert f"from {cpu_kernels.CHANNELS} on it does, so it runs in bf16" in layers["thin"][1]
    assert "of one value" in layers["step"][1] and "grouped" in layers["grouped"][1]


def test_without_a_unit_it_is_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in ("bf16", "int8", "fp8", "tf32"):
        layers = found(False, monkeypatch, precision=precision, skip_unprofitable=True)
        assert {fmt for fmt, _ in layers.values()} == {"fp32"}, precision
        assert all("so it runs in fp32" in reason for _, reason in layers.values())


@pytest.mark.parametrize("precision", ["int8", "int8_grad"])
def test_exact_sums_are_no_unit(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native module's path has no unit, as with QSYNC_CPU_ISA=avx2, but oneDNN has one."""
    with counting_as(False, True, True, monkeypatch):
        layers, text = (
            layers_of(explained(precision=precision, skip_unprofitable=True)),
            str(explained(precision=precision)),
        )
    assert {fmt for fmt, _ in layers.values()} == {"bf16", "fp32"} and layers["large"][0] == layers[
        "wide"
    ][0] == "bf16"
    assert "the native module's path has no unit for int8" in layers["large"][1]
    assert "so its convolutions run in bf16" in layers["wide"][1]
    assert (
        "in a format that is not faster here: 7 operators, such as large/linear (the native "
        "module's path has no unit" in text
    )
    # Without a BF16 unit the wider format is FP32, and oneDNN's INT8 unit is faster than FP32.
    with counting_as(False, True, False, monkeypatch):
        layers = layers_of(explained(precision=precision, skip_unprofitable=True))
    assert {name for name, (fmt, _) in layers.items() if fmt == precision} == {"large"}
    assert {fmt for name, (fmt, _) in layers.items() if name != "large"} == {"fp32"}


def test_unprofitable_operators_are_reported_without_the_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = (
        "in a format that is not faster here: 5 operators, such as thin/conv2d (3 channels "
        "are too few for int8 to pay, from "
        f'{cpu_kernels.CHANNELS} on it does); the option "skip_unprofitable" uses a wider format '
        "instead"
    )
    with counting_as(True, True, True, monkeypatch):
        explanation = explained(precision="int8")
        assert line in str(explanation).splitlines()
        assert line in str(explanation.replanned(Plan("int8"))).splitlines()
        for options in ({"skip_unprofitable": True}, {"emulate_unsupported": True}):
            assert "not faster here" not in str(explained(precision="int8", **options))
        for none in (
            explained(),
            explained(precision="fp32"),
            explanation.replanned(Plan("fp32", patterns=[("*", "int8")])),
        ):
            assert "not faster here" not in str(none)
        plan = Plan("int8", patterns=[("*", "fp32")], operators={"small/linear": "int8"})
        assert "not faster here" not in str(explained(plan=plan)), (
            "an operator that the plan names is not reported"
        )
        text = str(
            explained(
                plan=Plan(
                    "int8",
                    patterns=[(name, "fp32") for name in ("thin", "step", "grouped", "small")],
                )
            )
        )
    assert (
        "in a format that is not faster here: 1 operator, such as middle/linear (512 x 16 x 1024 "
        "is too small for int8 to pay);" in text
    )
    model = nn.Linear(8, 8).bfloat16()
    with torch.no_grad():
        preserved = qsync_fx.explain(
            model, torch.randn(2, 8).bfloat16(), options={"precision": "bf16"}
        )
    assert "not faster here" not in str(preserved), "the model's own format is not reported"


def test_named_operators_follow_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Plan("int8", patterns=[("thin", "int8")], operators={"small/linear": "int8"})
    layers = found(True, monkeypatch, plan=plan, skip_unprofitable=True)
    assert layers["thin"][0] == layers["small"][0] == "int8"
    assert layers["step"][0] == layers["middle"][0] == "bf16"
    for unit in (True, False):
        assert {fmt for fmt, _ in found(unit, monkeypatch, precision="int8").values()} == {"int8"}


def test_dtype_of_the_model_is_preserved() -> None:
    """One of the two candidate formats is the dtype of the model, which is not to be converted."""
    model = nn.Linear(8, 8).bfloat16()
    with torch.no_grad():
        explained = qsync_fx.explain(
            model,
            torch.randn(2, 8).bfloat16(),
            options={"precision": "int8", "skip_unprofitable": True},
        )
    (layer,) = explained.operators
    assert str(layer.precision) == "bf16"
    assert "so it runs in bf16" in layer.reason


def test_it_trains() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(4, 8)
    options = {"precision": "int8_grad", "skip_unprofitable": True, "inner_backend": "aot_eager"}
    torch.compile(model, backend="qsync", options=options)(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.compile(
        model, backend="qsync", options={"precision": "fp32", "inner_backend": "aot_eager"}
    )(x).sum().backward()
    for gradient, wanted in zip((p.grad for p in model.parameters()), expected, strict=True):
        assert gradient is not None and wanted is not None and torch.equal(gradient, wanted)


SLOW_GPU = """
name = "slow"
title = "A GPU on which products take long and bytes move fast"
kind = "gpu"
capability = [8, 0]
processors = 1
clock = 1e9
source = "made up"
[memory]
bytes = 1
bandwidth = 1e12
fraction = 1
source = "made up"
[units.fp32]
peak = 1e10
source = "made up"
[units.bf16]
peak = 2e11
source = "made up"
[units.int8]
peak = 4e11
source = "made up"
"""
"""A device on which INT8 pays for smaller layers than on real devices."""


class OnGpu(nn.Module):
    """Layers for which INT8 does not pay on a GPU with BF16, one for which it does, and one that a
    plan names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small, self.named = (
            nn.Linear(256, 256),
            nn.Linear(256, 32),
            nn.Linear(256, 32),
        )
        self.image, self.groups = nn.Conv2d(32, 64, 3), nn.Conv2d(32, 64, 3, groups=2)

    def forward(self, rows: Tensor, images: Tensor) -> tuple[Tensor, ...]:
        large = self.large(rows)
        return self.small(large), self.named(large), self.image(images), self.groups(images)


@pytest.mark.parametrize("scaling", ["tensor", "channel"])
def test_wide_gpu_product_is_not_quantized(scaling: str, tmp_path: Path) -> None:
    """Layers that are estimated to be slower are not quantized, and the report says why."""
    gpu = tmp_path / "slow.toml"
    gpu.write_text(SLOW_GPU)
    model, inputs = OnGpu(), (torch.randn(256, 256), torch.randn(1, 32, 6, 6))
    settings = {"plan": Plan("int8_grad", patterns=[("named", "int8_grad")]), "scaling": scaling}
    explanations = {
        skip: qsync_fx.explain(
            model, *inputs, options={**settings, "skip_unprofitable": skip, "target": str(gpu)}
        )
        for skip in (True, False)
    }

    def layers(skip: bool) -> dict[str, tuple[str, str]]:
        explained = explanations[skip].operators
        return {
            op.id.module: (str(op.precision), op.reason)
            for op in explained
            if op.kind == "adjustable"
        }

    def quantized(skip: bool) -> int:
        nodes = explanations[skip].graph_module("lower").graph.nodes
        return sum(node.target is torch.ops.qsync.quantize.default for node in nodes)

    wide = layers(True)
    assert {name: fmt for name, (fmt, _) in wide.items()} == {
        **dict.fromkeys(("large", "named"), "int8_grad"),
        **dict.fromkeys(("small", "image", "groups"), "bf16"),
    }
    small = wide["small"][1]
    assert small.startswith("plan: default int8_grad; int8_grad is estimated to reach 0.")
    assert small.endswith(
        "of bf16's speed at 256 x 32 x 256, with quantization, so it runs in bf16"
    )
    none = "there are no kernels for layers like it, so it runs in bf16"
    assert wide["groups"][1] == f"plan: default int8_grad; {none}"
    # A convolution kernel supports one scale for all images.
    reason = {"channel": "sm_80 has no kernel for this", "tensor": "int8_grad is estimated"}[
        scaling
    ]
    assert reason in wide["image"][1]
    # The patterns of a plan are followed, and without the option its default, too.
    assert "CUTLASS sm_80 kernels for output" in wide["named"][1]
    assert {fmt for fmt, _ in layers(False).values()} == {"int8_grad"}
    assert (quantized(True), quantized(False)) == (4, 8)


@pytest.mark.parametrize("target", ["t4", "h200", "b200"])
def test_by_default_a_precision_is_only_used_on_gpus_where_it_pays(target: str) -> None:
    """A plan, `skip_unprofitable=False` and emulation override this default; on a CPU all layers
    are in the precision.
    """
    model, x = nn.Linear(64, 64), torch.randn(32, 64)

    def layer(**options: Any) -> tuple[str, str]:
        (operator,) = qsync_fx.explain(model, x, options=options).operators
        return str(operator.precision), operator.reason

    fmt, reason = layer(precision="int8", target=target)
    assert fmt == ("fp16" if target == "t4" else "bf16")
    why = {"b200": "kernels for sm_80 were not measured on compute capability 10.0"}
    assert why.get(target, "int8 is estimated to reach 0.") in reason
    for options in (
        {"precision": "int8", "skip_unprofitable": False},
        {"precision": "int8", "emulate_unsupported": True},
        {"plan": Plan("int8")},
    ):
        assert layer(target=target, **options)[0] == "int8"
    assert layer(precision="int8")[0] == "int8"


def test_tuning_table_decides_on_a_gpu() -> None:
    """A layer runs in BF16 if BF16 is as fast in the table, and in INT8 if INT8 is faster,
    regardless of its size.
    """
    # The reader of the layer allows it to output BF16.
    model, x = nn.Sequential(nn.Linear(64, 96), nn.ReLU()), torch.randn(32, 64)
    options = {"precision": "int8", "skip_unprofitable": True}
    (problem, *_) = problems_of(
        qsync_fx.explain(model, x, options={"precision": "int8"}).lowered_graphs
    )
    kernels = dispatch_path(problem, "sm_80")
    assert not isinstance(kernels, str)
    name = kernels.configs[0].name
    wide = counterpart(problem)
    assert wide is not None
    for pays, fmt in ((True, "int8"), (False, "bf16")):
        choice = TunedChoice(
            problem.bucket(), name, {"torch": 2.0, name: 1.0}, faster_than_bf16=pays
        )
        rival = TunedChoice(wide.bucket(), "torch", {"torch": 3.0 if pays else 0.5})
        choices = {item.problem: item for item in (choice, rival)}
        table = TuningTable(Environment("", "", "", "", "", 1), choices)
        with assumed("sm_80", table, on="cpu"):
            layer = qsync_fx.explain(model, x, options=options).operators[0]
        assert str(layer.precision) == fmt
    assert (
        layer.reason
        == "plan: uniform int8; int8 was measured to be no faster than bf16 on this device, so "
        "it runs in bf16"
    )


def test_measure_rejects_the_option() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum()

    with pytest.raises(OptionError, match="operators in every format"):
        qsync_fx.measure(
            nn.Linear(8, 8),
            step,
            [torch.randn(2, 8)],
            ["fp32"],
            options={"skip_unprofitable": True},
        )
