"""What is kept for the backward pass is what was quantized: one byte a value in INT8, two in BF16."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from gpu import kit, models
from qsync_fx.backend.cuda.collect import problems_of
from qsync_fx.backend.cuda.device import assumed
from qsync_fx.explanation import explain

WIDTH, BATCH, LAYERS = 1024, 8192, 6


def stack() -> nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def held_and_peak(precision: str, folder: Path) -> tuple[int, int]:
    """Returns the bytes held between forward and backward pass, and the most that are held in a step; parameters left out."""
    x = torch.randn(BATCH, WIDTH)
    with assumed(kit.arch(), on="cpu"):
        asked = problems_of(explain(stack(), x[:BATCH], options={"precision": precision}))
    model, x = stack().to(kit.DEVICE), x.to(kit.DEVICE)
    with models.kernels_win(asked, kit.arch(), folder):
        torch.compiler.reset()
        fast = torch.compile(model, backend="qsync", options={"precision": precision})
        for _ in range(2):
            fast(x).float().square().mean().backward()
            model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = fast(x).float().square().mean()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        torch.cuda.synchronize()
        return held, torch.cuda.max_memory_allocated() - before


def test_int8_takes_less_memory_than_bf16(tmp_path: Path) -> None:
    (int8, int8_peak), (bf16, bf16_peak) = (held_and_peak(name, tmp_path / name) for name in ("int8", "bf16"))
    # GELU keeps its input in BF16 in both; the linear layers' inputs are half of what BF16 keeps, and half as large.
    assert int8 < bf16
    assert int8_peak < bf16_peak
    values = LAYERS * BATCH * WIDTH
    assert bf16 - int8 > 0.6 * values, f"{bf16 - int8} bytes saved, of {values} values kept"


def test_workspace_and_operands_are_given_back() -> None:
    """A thousand calls take no more memory than ten."""
    from qsync_fx.backend.operators.gemm import gemm
    from qsync_fx.backend.operators.quantize import quantize

    x, seed = torch.randn(1000, 770, device=kit.DEVICE), torch.zeros(1, dtype=torch.int64, device=kit.DEVICE)

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
