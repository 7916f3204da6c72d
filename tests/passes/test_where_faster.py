"""The option "where_faster": what is as fast in a wider format runs in it and says why; what a plan names does not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.backend.operators.multiplying import conv_on_cpu, on_cpu
from qsync_fx.devices import offers
from qsync_fx.errors import OptionError, PlanWarning
from qsync_fx.plan import Plan

ROWS = 512


class Net(nn.Module):
    """Layers that are large enough for INT8, for BF16 and for neither, and convolutions that are for INT8 and are not."""

    def __init__(self) -> None:
        super().__init__()
        self.thin, self.wide = nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3)
        self.step, self.grouped = nn.Conv2d(64, 64, 1, stride=2), nn.Conv2d(64, 64, 3, groups=2)
        self.large, self.middle, self.small = nn.Linear(1024, 1024), nn.Linear(1024, 16), nn.Linear(1024, 2)

    def forward(self, images: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        large = self.large(rows)
        return self.grouped(self.step(self.wide(self.thin(images)))), self.middle(large), self.small(large)


def found(unit: bool, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, tuple[str, str]]:
    """The precision and the reason of each layer, on a CPU with a unit for INT8 and BF16 or without."""
    for name in ("native_integer_unit", "cpu_multiplies_integers", "native_bf16_unit"):
        monkeypatch.setattr(offers, name, lambda: unit)
    offers.forget()
    try:
        inputs = torch.randn(2, 3, 16, 16), torch.randn(ROWS, 1024)
        with warnings.catch_warnings():
            warnings.simplefilter("error", PlanWarning)
            explained = qsync_fx.explain(Net(), *inputs, options=options)
    finally:
        monkeypatch.undo()
        offers.forget()
    layers = [op for op in explained.operators if op.kind == "adjustable"]
    return {op.id.module: (str(op.precision), op.reason) for op in layers}


def test_what_is_as_fast_in_bf16_runs_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ROWS * 1024 * 2 < on_cpu.ENOUGH_WORK[16] <= ROWS * 1024 * 16 < on_cpu.ENOUGH_WORK[8]
    layers = found(True, monkeypatch, precision="int8_grad", where_faster=True)
    assert {name: fmt for name, (fmt, _) in layers.items()} == {
        **dict.fromkeys(("wide", "large"), "int8_grad"),
        **dict.fromkeys(("thin", "step", "grouped", "middle"), "bf16"),
        "small": "fp32",
    }
    because = f"{ROWS} x 16 x 1024 is too small for int8 to pay, so it runs in bf16"
    assert layers["middle"][1] == f"plan: uniform int8_grad; {because}"
    assert layers["small"][1].endswith(f"in bf16; {ROWS} x 2 x 1024 is too small for bf16 to pay, so it runs in fp32")
    assert f"from {conv_on_cpu.CHANNELS} on it does, so it runs in bf16" in layers["thin"][1]
    assert "of one value" in layers["step"][1] and "groups" in layers["grouped"][1]


def test_without_a_unit_it_is_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in ("bf16", "int8", "fp8", "tf32"):
        layers = found(False, monkeypatch, precision=precision, where_faster=True)
        assert {fmt for fmt, _ in layers.values()} == {"fp32"}, precision
        assert all("so it runs in fp32" in reason for _, reason in layers.values())


def test_what_is_named_is_obeyed_and_so_is_all_without_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan("int8", patterns=[("thin", "int8")], operators={"small/linear": "int8"})
    layers = found(True, monkeypatch, plan=plan, where_faster=True)
    assert layers["thin"][0] == layers["small"][0] == "int8"
    assert layers["step"][0] == layers["middle"][0] == "bf16"
    for unit in (True, False):
        assert {fmt for fmt, _ in found(unit, monkeypatch, precision="int8").values()} == {"int8"}


def test_what_the_model_holds_stays() -> None:
    """Of two formats that it could run in, one is that of the model, which is not to be converted."""
    held = nn.Linear(8, 8).bfloat16()
    with torch.no_grad():
        explained = qsync_fx.explain(
            held, torch.randn(2, 8).bfloat16(), options={"precision": "int8", "where_faster": True}
        )
    (layer,) = explained.operators
    assert str(layer.precision) == "bf16"
    assert "so it runs in bf16" in layer.reason


def test_it_trains() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(4, 8)
    options = {"precision": "int8_grad", "where_faster": True, "inner": "aot_eager"}
    torch.compile(model, backend="qsync", options=options)(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.compile(model, backend="qsync", options={"precision": "fp32", "inner": "aot_eager"})(x).sum().backward()
    for gradient, wanted in zip((p.grad for p in model.parameters()), expected, strict=True):
        assert gradient is not None and wanted is not None and torch.equal(gradient, wanted)


def test_elsewhere_it_is_said_that_it_has_no_effect() -> None:
    with pytest.warns(PlanWarning, match="no effect on t4"):
        qsync_fx.explain(
            nn.Linear(8, 8),
            torch.randn(2, 8),
            options={"precision": "int8", "where_faster": True, "target": "t4"},
        )


def test_nothing_is_measured_with_it() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum()

    with pytest.raises(OptionError, match="measured in every format"):
        qsync_fx.measure(nn.Linear(8, 8), step, [torch.randn(2, 8)], ["fp32"], options={"where_faster": True})
