"""Decision whether a quantized layer is faster: tuned and shipped layer times, and the estimate for
other layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import qsync_fx
from benchmarks.gpu import layer_table
from qsync_fx.backend.cuda.kernel_config import TYPICAL, Arch
from qsync_fx.backend.cuda.layer_times import LayerTimes, Part, layer_problem
from qsync_fx.backend.cuda.problem import ConvProblem, GemmProblem, Problem
from qsync_fx.backend.cuda.runtime import layer_timer
from qsync_fx.backend.cuda.runtime.device_state import DeviceState, assumed, shipped
from qsync_fx.backend.cuda.selection.estimate import estimate
from qsync_fx.backend.cuda.tuning import (
    Environment,
    TuningError,
    TuningTable,
    load_table,
    save_table,
)
from qsync_fx.devices.device_catalog import device_called, get

HERE = Environment("", "", "", "", "", 1)
GRADIENTS = {"int8": "bf16", "int8_grad": "int8", "fp8": "fp8_e5m2"}
"""Format of the gradients of each precision."""


def measured() -> list[LayerTimes]:
    return list(layer_table.layers(json.loads(layer_table.RESULTS.read_text())))


def products(m: int, n: int, k: int, precision: str) -> dict[Part, Problem]:
    """Return the products of a linear layer."""
    narrow, gradient = precision.removesuffix("_grad"), GRADIENTS[precision]
    saved = gradient if gradient == "bf16" else narrow
    scaled: Any = {"a_scale": "tensor", "b_scale": "tensor"}
    return {
        "forward": GemmProblem(m, n, k, narrow, narrow, "bf16", **scaled),
        "input_gradient": GemmProblem(m, k, n, gradient, saved, "bf16", "row", "row"),
        "weight_gradient": GemmProblem(n, k, m, gradient, saved, "bf16", "column", "row"),
    }


def test_shipped_table_has_the_measured_rows() -> None:
    """Check the table of the H200, the only measured GPU: three cubic sizes in three formats."""
    table = shipped("h200")
    assert table is not None and table.environment.gpu == "NVIDIA H200"
    assert list(table.layers.values()) == measured() and len(table.layers) == 9
    assert {times.problem.shapes[0] for times in measured()} == {(n, n) for n in (1024, 2048, 8192)}
    assert {path.stem for path in layer_table.TABLE.parent.glob("*.json")} == {"h200"}
    assert shipped("h100") is None


def test_estimate_is_conservative() -> None:
    """Check that no layer is estimated to be faster but measured to be slower, and that estimated
    speeds exceed measured speeds by at most 8 %.
    """
    for times in measured():
        m, n, k = times.problem.m, times.problem.n, times.problem.k  # type: ignore[union-attr]
        parts = products(m, n, k, times.precision)
        estimated = estimate(parts, frozenset(parts), times.precision, "bf16", get("h200"))
        assert estimated.problem == times.problem
        for some in (("forward",), tuple(parts)):
            assert estimated.speed(some) <= 1.08 * times.speed(some)
            assert times.speed(some) >= 1 or estimated.speed(some) < 1
    large = products(8192, 8192, 8192, "int8_grad")
    assert estimate(large, frozenset(large), "int8_grad", "bf16", get("h200")).speed() > 1.3


def test_quantization_and_conversions_count() -> None:
    device, parts = get("a100"), products(4096, 4096, 4096, "int8")
    by_kernel = frozenset(parts)
    int8 = estimate(parts, by_kernel, "int8", "bf16", device)
    # Products with BF16 gradients first convert the saved 8-bit operands.
    assert int8.speed(["input_gradient"]) < 1 and int8.speed(["weight_gradient"]) < 1
    without = estimate(parts, frozenset(), "int8", "bf16", device)
    assert without.speed() < 1 and without.speed(["forward"]) < 1
    fp8 = products(4096, 4096, 4096, "fp8")
    assert estimate(fp8, by_kernel, "fp8", "bf16", device).speed() < 1, "the A100 has no FP8 unit"


def layer(m: int, n: int, k: int, target: str, **options: Any) -> tuple[str, str]:
    with torch.device("meta"):
        model, x = nn.Linear(k, n), torch.empty(m, k)
    model, x = model.to_empty(device="cpu"), torch.empty(m, k)
    settings = {"precision": "int8", "target": target, **options}
    (operator,) = qsync_fx.explain(model, x, options=settings).operators
    return str(operator.precision), operator.reason


def test_measured_layers_decide() -> None:
    fmt, reason = layer(2048, 2048, 2048, "h200")
    assert fmt == "bf16"
    assert (
        reason == "plan: uniform int8; int8 was measured to reach 0.67 of bf16's speed at "
        "2048 x 2048 x 2048, with quantization, so it runs in bf16"
    )
    # An H100 has less bandwidth, and was not measured.
    assert "int8 is estimated to reach 0." in layer(2048, 2048, 2048, "h100")[1]


def rows(m: int, n: int, k: int, seconds: float) -> Iterator[LayerTimes]:
    problem = layer_problem(GemmProblem(m, n, k, "bf16", "bf16", "bf16"), "bf16")
    parts = {"forward": 1.0, "input_gradient": 1.0, "weight_gradient": 1.0}
    yield LayerTimes(problem, "int8", {**parts, "weight_gradient": seconds}, parts)


def test_tuned_layers_decide_first(tmp_path: Path) -> None:
    """Check that a table of `qsync tune` has priority over estimates for sizes of its bucket."""
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    x = torch.randn(31, 64, requires_grad=True)
    for seconds, fmt in ((0.5, "int8"), (2.0, "bf16")):
        path = tmp_path / f"{fmt}.json"
        save_table(path, HERE, [], rows(32, 96, 64, seconds))
        with assumed("sm_80", load_table(path), on="cpu"):
            first, _, second = qsync_fx.explain(model, x, options={"precision": "int8"}).operators
        assert str(first.precision) == fmt and str(second.precision) == "bf16"
    assert "int8 was measured to reach 0.75 of bf16's speed at 31 x 96 x 64" in first.reason
    assert "int8 is estimated to reach 0." in second.reason


def test_gradients_that_nobody_needs_do_not_count() -> None:
    """Exclude the input gradient, which the first layer of a model does not compute."""
    (times,) = rows(32, 96, 64, 2.0)
    slow = replace(times, seconds={**times.seconds, "input_gradient": 9.0})
    assert slow.speed(["forward", "weight_gradient"]) == 2 / 3
    together = replace(times, seconds={"forward": 1.0, "backward": 3.0},
                       wide_seconds={"forward": 1.0, "backward": 1.0})  # fmt: skip
    assert together.speed(["forward"]) == 1.0
    assert together.speed(["forward", "weight_gradient"]) == 0.5 == together.speed()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": {}}, "the parts of its two formats differ"),
        ({"wide_seconds": {"forward": 1.0}}, "the parts of its two formats differ"),
        ({"seconds": {"x": 1.0}, "wide_seconds": {"x": 1.0}}, "an unknown part 'x'"),
        ({"seconds": {"forward": 0.0}, "wide_seconds": {"forward": 1.0}}, "not positive"),
        ({"problem": GemmProblem(33, 96, 64, "bf16", "bf16", "bf16")}, "not the key of a layer"),
    ],
)
def test_invalid_rows_are_errors(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    save_table(path, HERE, [], [replace(next(rows(32, 96, 64, 1.0)), **changes)])
    with pytest.raises(TuningError, match=message):
        load_table(path)


def test_devices_are_recognized_by_the_names_of_their_drivers() -> None:
    for name, capability, expected in (
        ("NVIDIA H200", (9, 0), "h200"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "a100"),
        ("Tesla T4", (7, 5), "t4"),
        ("NVIDIA A100-SXM4-80GB", (9, 0), None),
        ("NVIDIA Something 9", (9, 0), None),
    ):
        assert str(device_called(name, capability)) == str(expected)
    for arch in get_args(Arch):
        assert get(TYPICAL[arch]).kind == "gpu"
    row = next(iter(measured()))
    state = DeviceState("sm_90a", "", TuningTable(HERE), model=get("h200"))
    assert state.layer(replace(row.problem, bias=True), "int8") == row  # type: ignore[call-arg]
    assert replace(state, model=None).layer(row.problem, "int8") is None


@pytest.mark.parametrize(
    "problem",
    [
        GemmProblem(256, 256, 256, "bf16", "bf16", "bf16"),
        ConvProblem(
            "fprop", 8, 16, 16, 32, 32, 3, 3, (1, 1), (1, 1), (1, 1), "bf16", "bf16", "bf16"
        ),
    ],
)
def test_layers_are_timed_in_both_formats(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the measurement of `qsync tune` on the CPU."""
    ran: list[tuple[str, bool, bool]] = []
    step = layer_timer._step

    def recorded(problem: Problem, fmt: str, part: Part, *rest: Any) -> Any:
        ran.append((fmt, *layer_timer._TRAINED[part]))
        return step(problem, fmt, part, *rest)

    monkeypatch.setattr(layer_timer, "_step", recorded)
    options = {"inner_backend": "aot_eager"}
    times = layer_timer.time_layer(problem, "int8", torch.device("cpu"), 5, options)
    assert times.problem == layer_problem(problem, "bf16") and times.precision == "int8"
    assert times.seconds.keys() == times.wide_seconds.keys() == layer_timer._TRAINED.keys()
    assert times.speed() > 0 and len(ran) == 6 and {fmt for fmt, *_ in ran} == {"int8", "bf16"}
