"""Saved tensors have the quantized format: one byte per value in INT8, two in BF16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qsync_fx.backend.cuda.problem import Problem
from qsync_fx.backend.cuda.runtime.device_state import assumed
from qsync_fx.backend.operators.layer_kernels import problems_of
from qsync_fx.diagnostics import explain
from tests.gpu import kit, models

WIDTH, BATCH, LAYERS = 1024, 8192, 6


def stack() -> nn.Module:
    """Return consecutive linear layers. An activation in between would be saved too, or recomputed
    from saved tensors.
    """
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def asked(precision: str = "int8") -> list[Problem]:
    """Return the problems of these layers, to compile their kernels in advance."""
    with assumed(kit.arch(), on="cpu"):
        return problems_of(
            explain(
                stack(),
                torch.randn(BATCH, WIDTH),
                options={"precision": precision, "skip_unprofitable": False},
            ).lowered_graphs
        )


def held_and_peak(model: nn.Module, x: Tensor, precision: str) -> tuple[int, int]:
    """Return the bytes saved for backward and the peak bytes of a step, without parameters."""
    torch.compiler.reset()
    fast = torch.compile(
        model, backend="qsync", options={"precision": precision, "skip_unprofitable": False}
    )

    def loss_of(output: Any) -> Tensor:
        states: Tensor = getattr(output, "last_hidden_state", output)
        return states.float().square().mean()

    for _ in range(2):
        loss_of(fast(x)).backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = loss_of(fast(x))
    saved = torch.cuda.memory_allocated() - before
    loss.backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return saved, torch.cuda.max_memory_allocated() - before


@pytest.mark.skipif(bool(kit.lacks("bf16")), reason=kit.lacks("bf16"))
def test_quantized_activation_is_saved_in_one_byte_per_value(tmp_path: Path) -> None:
    x = torch.randn(BATCH, WIDTH, device=kit.DEVICE)
    with models.kernels_win(asked(), kit.arch(), tmp_path):
        (int8, int8_peak), (bf16, bf16_peak) = (
            held_and_peak(stack().to(kit.DEVICE), x, name) for name in ("int8", "bf16")
        )
    values = LAYERS * BATCH * WIDTH
    # Both include the last output. INT8 needs half of BF16's bytes for the saved inputs.
    assert bf16 - int8 > 0.8 * values, (
        f"{int8} bytes are live in INT8, {bf16} in BF16, for {values} values"
    )
    assert int8_peak < bf16_peak


@pytest.mark.skipif(bool(kit.lacks("bf16")), reason=kit.lacks("bf16"))
def test_bert_trains_in_less_memory_than_in_bf16() -> None:
    x = torch.randint(500, (64, 256), device=kit.DEVICE)
    peaks = {
        name: held_and_peak(models.build("bert", kit.DEVICE), x, name)[1]
        for name in ("int8", "bf16")
    }
    assert peaks["int8"] < peaks["bf16"], peaks


def test_workspace_and_operands_are_released() -> None:
    """A thousand calls reserve no more memory than ten."""
    from qsync_fx.backend.operators.gemm.gemm import gemm
    from qsync_fx.backend.operators.quantize import quantize

    x, seed = (
        torch.randn(1000, 770, device=kit.DEVICE),
        torch.zeros(1, dtype=torch.int64, device=kit.DEVICE),
    )

    def call() -> None:
        q, scale = quantize(x, seed, 0, "int8", "stochastic", ())
        gemm(q, q.t(), scale, scale, None)

    for _ in range(10):
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(1000):
        call()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == before
