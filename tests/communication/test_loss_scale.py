"""Error feedback of codecs in processes over gloo, with a GradScaler that changes its scale and
skips steps.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from qsync_fx.communication.compressor_state import Residuals, finite
from tests.support import tiers
from tests.support.processes import ranks

run = functools.partial(ranks.results, script="scaled_rank.py")


@pytest.mark.parametrize(
    ("parallelism", "world", "codecs"),
    tiers.chosen(
        [("parallel", 2, ["1bit*"])],
        [
            ("parallel", 2, ["1bit*", "1bit", "aqgb12"]),
            ("parallel", 3, ["1bit*"]),
            ("sharded", 2, ["1bit*", "aqgb12"]),
        ],
    ),
)
def test_skipped_steps_leave_no_state(
    parallelism: str, world: int, codecs: list[str], tmp_path: Path
) -> None:
    """Training with a changing scale is bit-identical to its executed steps without a scaler."""
    for results in run("without", world, tmp_path, how=parallelism, codecs=codecs):
        assert len(results) == 3 * len(codecs)
        for name, result in results.items():
            skipped = [step for step in range(10) if step not in result["taken"]]
            assert skipped if "beyond" in name else skipped == [2, 5]
            assert result["finite"], name
            assert (result["ends"][0] == result["ends"][1]) == ("not told" not in name), name
            assert result["left"] == ("not told" not in name), name


@tiers.ALL
def test_residual_is_rescaled(tmp_path: Path) -> None:
    first, second = run("resumed", 2, tmp_path)
    assert first["ends"][0] == first["ends"][1] == second["ends"][0]
    for errors in (first, second):
        assert (
            "a scaler must have get_scale and is_enabled, but float does not"
            in errors["type"]["text"]
        )
        assert "another gradient codec than" in errors["some"]["text"]
        assert "GradScaler" in errors["some"]["text"]


@given(
    steps=st.lists(st.tuples(st.integers(-60, 60), st.booleans(), st.booleans()), max_size=8),
    last=st.integers(-60, 60),
)
def test_reverted_step_leaves_no_state(steps: list[tuple[int, bool, bool]], last: int) -> None:
    """The reference is the error feedback without loss scaling. A step is (log2 of the scale,
    whether it is executed, whether it is split into two parts).
    """
    residuals, plain = Residuals(undone=True), torch.zeros(10)
    for power, executed, split in steps:
        residuals.scale = 2.0**power
        parts = [slice(0, 4), slice(4, 10)] if split else [slice(0, 10)]
        for part in parts:
            residual = residuals.part("weight", 10, part)
            assert torch.equal(residual, plain[part] * residuals.scale)
            residual += torch.arange(part.start, part.stop) * residuals.scale
            if not executed:
                residual[0] = torch.inf
        residuals.settle(used=executed)
        plain += torch.arange(10) if executed else 0
    residuals.scale = 2.0**last
    assert torch.equal(residuals.part("weight", 10, slice(0, 10)), plain * residuals.scale)


def test_single_nonfinite_value_is_detected() -> None:
    assert finite(torch.zeros(0)) and finite(torch.tensor([3.4e38, -3.4e38]))
    for bad in (torch.nan, torch.inf, -torch.inf):
        for index in range(70):
            values = torch.ones(70)
            values[index] = bad
            assert not finite(values)


def test_residual_is_fp32_for_any_default_dtype() -> None:
    """Kernels read the residual as FP32 by its address."""
    torch.set_default_dtype(torch.float64)
    try:
        assert Residuals(undone=True).part("weight", 4, slice(0, 2)).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
