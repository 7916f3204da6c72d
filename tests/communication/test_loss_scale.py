"""Real processes over gloo: what codecs leave of gradients under a GradScaler whose scale changes,
and which leaves steps out.
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
    ("how", "world", "codecs"),
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
    how: str, world: int, codecs: list[str], tmp_path: Path
) -> None:
    """A training whose scale changes is that of the steps that were taken, without a scaler, to the
    last bit.
    """
    for found in run("without", world, tmp_path, how=how, codecs=codecs):
        assert len(found) == 3 * len(codecs)
        for name, one in found.items():
            left_out = [step for step in range(10) if step not in one["taken"]]
            assert left_out if "beyond" in name else left_out == [2, 5]
            assert one["finite"], name
            assert (one["ends"][0] == one["ends"][1]) == ("not told" not in name), name
            assert one["left"] == ("not told" not in name), name


@tiers.ALL
def test_residual_is_rescaled(tmp_path: Path) -> None:
    first, second = run("resumed", 2, tmp_path)
    assert first["ends"][0] == first["ends"][1] == second["ends"][0]
    for found in (first, second):
        assert (
            "a scaler must have get_scale and is_enabled, but float does not"
            in found["type"]["text"]
        )
        assert "another gradient codec than" in found["some"]["text"]
        assert "GradScaler" in found["some"]["text"]


@given(
    steps=st.lists(st.tuples(st.integers(-60, 60), st.booleans(), st.booleans()), max_size=8),
    last=st.integers(-60, 60),
)
def test_reverted_step_leaves_no_state(steps: list[tuple[int, bool, bool]], last: int) -> None:
    """Against what is left in a training whose loss is not scaled; steps are (scale, taken, all of
    it used).
    """
    kept, plain = Residuals(undone=True), torch.zeros(10)
    for power, taken, whole in steps:
        kept.scale = 2.0**power
        parts = [slice(0, 4), slice(4, 10)] if whole else [slice(0, 10)]
        for part in parts:
            found = kept.part("weight", 10, part)
            assert torch.equal(found, plain[part] * kept.scale)
            found += torch.arange(part.start, part.stop) * kept.scale
            if not taken:
                found[0] = torch.inf
        kept.settle(used=taken)
        plain += torch.arange(10) if taken else 0
    kept.scale = 2.0**last
    assert torch.equal(kept.part("weight", 10, slice(0, 10)), plain * kept.scale)


def test_single_nonfinite_value_is_detected() -> None:
    assert finite(torch.zeros(0)) and finite(torch.tensor([3.4e38, -3.4e38]))
    for bad in (torch.nan, torch.inf, -torch.inf):
        for at in range(70):
            values = torch.ones(70)
            values[at] = bad
            assert not finite(values)


def test_residual_is_fp32_for_any_default_dtype() -> None:
    """Kernels read it by its address."""
    torch.set_default_dtype(torch.float64)
    try:
        assert Residuals(undone=True).part("weight", 4, slice(0, 2)).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
