"""Norms of narrow activations with FP32 parameters on a GPU, compared with norms in FP64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qsync_fx.profiler.tensor_capture.graph_capture import called

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["layer", "group"])
def test_a_norm_is_widened(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(6, 8, 32).to(dtype), torch.randn(32), torch.randn(32)
    target: Any = aten.layer_norm.default if kind == "layer" else aten.group_norm.default
    args = (x, [32], weight, bias) if kind == "layer" else (x, 4, weight[:8], bias[:8])
    result = called(target, args, {}, device="cuda")
    assert result.dtype is dtype
    expected = target(
        x.double(), *(a.double() if isinstance(a, torch.Tensor) else a for a in args[1:])
    )
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2**-7, "atol": 1e-2}
    torch.testing.assert_close(result.double(), expected, **near)
