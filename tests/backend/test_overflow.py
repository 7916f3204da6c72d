"""Overflow warnings of FP16 training: once without loss scaling, none with a GradScaler or in other
formats.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import qsync_fx
from qsync_fx.backend import numeric_guards

X = torch.randn(8, 16)


def trained(
    precision: str, *, loss: float, steps: int = 1, scaler: Any = None, fused: bool = False
) -> list[str]:
    """Return the overflow warnings of training with a loss multiplied by a number."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    compiled = torch.compile(
        model,
        backend="qsync",
        options={"precision": precision, "inner_backend": "aot_eager", "emulate_unsupported": True},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            value = compiled(X).float().square().sum() * loss
            (value if scaler is None else scaler.scale(value)).backward()
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
    return [
        str(w.message)
        for w in caught
        if issubclass(w.category, qsync_fx.PlanWarning) and "not finite" in str(w.message)
    ]


def test_overflow_is_reported_once() -> None:
    [text] = trained("fp16", loss=1e9, steps=4)
    assert (
        "gradients of Sequential are not finite in step 1" in text
        and "fp16" in text
        and "GradScaler" in text
    )


def test_gradients_that_fit_are_not() -> None:
    assert trained("fp16", loss=1.0, steps=2) == []


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_skips_overflow_steps(fused: bool) -> None:
    assert trained("fp16", loss=1e9, steps=2, scaler=torch.amp.GradScaler("cpu"), fused=fused) == []


def test_other_formats_are_not_checked() -> None:
    assert trained("bf16", loss=1e39) == [] and not [
        m for m in numeric_guards._watched if isinstance(m, nn.Sequential)
    ]


def test_int8_is_watched_where_fp16_carries_it() -> None:
    """INT8 layers output FP16 on GPUs before Ampere, which a user may not know."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    for target, formats in (("a100", None), ("t4", "fp16 (whose range ends at 65504)")):
        [part] = qsync_fx.explain(
            model,
            torch.randn(8, 64),
            options={"precision": "int8", "target": target, "skip_unprofitable": False},
        ).graphs
        numeric_guards.watch(part.graph, model)
        assert numeric_guards._watched.pop(model, None) == formats


def test_it_looks_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(
        numeric_guards, "_finite", lambda gradients: looked.append(len(gradients)) or True
    )
    assert trained("fp16", loss=1.0, steps=9) == []
    assert looked == [4] * 4, "gradients are checked in steps 1, 2, 4 and 8"
