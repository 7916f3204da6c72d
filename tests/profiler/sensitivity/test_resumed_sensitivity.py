"""Sensitivity runs that resume after an interruption: equal results without repeated work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.errors import ProfileError
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.profiler.sensitivity.checkpoint import INTERRUPTED
from qsync_fx.profiler.sensitivity.estimate import several
from tests.support import tiers
from tests.support.planning.looked_models import Batch, batches, step, wide


class Counted:
    """A step that counts its calls and raises KeyboardInterrupt at one of them."""

    def __init__(self, interrupted_at: int = -1) -> None:
        self.calls, self.interrupted_at = 0, interrupted_at

    def __call__(self, model: Any, batch: Batch) -> Tensor:
        self.calls += 1
        if self.calls == self.interrupted_at:
            raise KeyboardInterrupt
        return step(model, batch)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return wide(nn.ReLU)


def found(
    counted: Counted, path: Path | None, of: nn.Module | None = None, **arguments: Any
) -> Sensitivity:
    precisions: Sequence[str] = ("int8",)
    return qsync_fx.sensitivity(
        of or model(), counted, batches(), precisions=precisions, steps=3, path=path, **arguments
    )


@pytest.mark.parametrize("train", [False, True])
def test_interrupted_sensitivity_resumes(tmp_path: Path, train: bool) -> None:
    """The resumed run repeats the training between finished steps, so that weights are the same."""
    arguments: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.5)} if train else {}
    path, uninterrupted = tmp_path / "sensitivity.json", Counted()
    wanted = found(uninterrupted, None, **arguments)
    with pytest.raises(KeyboardInterrupt):
        # The last passes of a step measure the gradient noise and run the optimizer.
        found(Counted(interrupted_at=uninterrupted.calls - train - 1), path, **arguments)
    (partial,) = tmp_path.iterdir()
    assert INTERRUPTED.load(partial).steps == 2
    again = Counted()
    result = found(again, path, **arguments)
    assert (result.variance, result.trace) == (wanted.variance, wanted.trace)
    assert result.noise == wanted.noise
    assert not partial.exists() and Sensitivity.load(path) == result.finite()
    assert (
        again.calls <= uninterrupted.calls + 2
    )  # each finished step runs once, to capture its graphs


def test_methods_restore_their_state(tmp_path: Path) -> None:
    partial, names = tmp_path / "partial", ["second_order", "paper"]
    wanted = several(model(), step, batches(), names, ["int8"], steps=3)
    uninterrupted = Counted()
    several(model(), uninterrupted, batches(), names, ["int8"], steps=3)
    with pytest.raises(KeyboardInterrupt):
        several(
            model(),
            Counted(interrupted_at=uninterrupted.calls),
            batches(),
            names,
            ["int8"],
            steps=3,
            partial=partial,
        )
    result = several(model(), step, batches(), names, ["int8"], steps=3, partial=partial)
    assert [item.trace for item in result] == [item.trace for item in wanted]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"of": model(1)}, "other weights"),
        ({"of": model().eval()}, "other weights or another mode"),
        ({"seed": 3}, "seed 3"),
        ({"fraction": 1.0}, "1.0 of a batch"),
        ({"options": {"rounding": "nearest"}}, "rounding=nearest"),
    ],
)
def test_partial_file_of_another_run_is_an_error(
    tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    path = tmp_path / "sensitivity.json"
    with pytest.raises(KeyboardInterrupt):
        found(Counted(interrupted_at=3), path)
    with pytest.raises(ProfileError, match="does not belong to this run") as raised:
        found(Counted(), path, **other)
    assert message in raised.value.what and "remove it" in raised.value.do


def test_truncated_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "sensitivity.json"
    with pytest.raises(KeyboardInterrupt):
        found(Counted(interrupted_at=3), path)
    partial = Path(f"{path}.partial")
    partial.write_text(partial.read_text()[:-40])
    with pytest.raises(ProfileError, match="interrupted sensitivity"):
        found(Counted(), path)


def test_invalid_variance_is_reported_in_its_step(tmp_path: Path) -> None:
    steps: list[int] = []

    def without(called: Any, batch: Batch) -> Tensor:
        steps.append(1)
        return (called(batch[0]) * 0).abs().sqrt().sum()

    with pytest.raises(ProfileError, match="is no variance"):
        qsync_fx.sensitivity(
            model(), without, batches(), "paper", ["int8"], steps=40, path=tmp_path / "s.json"
        )
    assert len(steps) <= 2


@tiers.ALL
def test_measure_resumes_its_sensitivity(tmp_path: Path) -> None:
    path, uninterrupted = tmp_path / "profile.json", Counted()

    def measured(counted: Counted, path: Path | None) -> qsync_fx.Profile:
        return qsync_fx.measure(
            model(),
            counted,
            batches(),
            ("bf16",),
            repeats=1,
            path=path,
            sensitivity="paper",
            progress=False,
        )

    wanted = measured(uninterrupted, None).sensitivity
    with pytest.raises(KeyboardInterrupt):
        measured(Counted(interrupted_at=uninterrupted.calls - 1), path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "profile.json.partial",
        "profile.json.sensitivity.partial",
    ]
    again = Counted()
    profile = measured(again, path)
    assert profile.sensitivity is not None and wanted is not None
    assert profile.sensitivity.variance == wanted.variance and again.calls < uninterrupted.calls
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]
