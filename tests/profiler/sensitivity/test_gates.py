"""Error from ReLU and max-pooling gates that noise flips."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn


@pytest.mark.parametrize("kind", ["relu", "max_pool2d"])
def test_gates_flip_as_often_as_noise_flips_them(kind: str) -> None:
    """The predicted error of the passed gradient is compared with real noise at the input."""
    from torch.fx import symbolic_trace

    from qsync_fx.profiler.tensor_capture.nonsmooth_ops import (
        NonsmoothOperator,
        flip_error,
        gate,
    )

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, 16, 16, generator=generator)
    aten = torch.ops.aten
    target, args = (
        (aten.relu.default, ()) if kind == "relu" else (aten.max_pool2d.default, ([2, 2],))
    )
    graph = symbolic_trace(nn.Identity()).graph
    node = graph.call_function(target, (next(iter(graph.nodes)), *args))

    def passed(value: Tensor) -> Tensor:
        leaf = value.clone().requires_grad_()
        y = target(leaf, *args)
        return torch.autograd.grad(y, leaf, incoming)[0]

    incoming = torch.randn(target(x, *args).shape, generator=generator)
    slope = torch.randn(x.shape, generator=generator)
    gates = gate(node, (x.requires_grad_(), *args), {})
    assert gates is not None
    _, places, rivals = gates
    x = x.detach()
    made = NonsmoothOperator("a", None, None, x.numel(), places, rivals)  # type: ignore[arg-type]
    flips = made.histogram(made.weights(slope, incoming))
    exact = passed(x)
    for deviation in (0.3, 0.03):
        noisy = [
            passed(x + deviation * torch.randn(x.shape, generator=generator)) - exact
            for _ in range(60)
        ]
        # Gates are independent: the mean square of a sum with random signs is the sum of squares.
        if kind == "relu":
            wanted = sum(float((n * slope).square().sum()) for n in noisy) / 60
        else:
            windows = [(n * slope).unfold(2, 2, 2).unfold(3, 2, 2).sum((-1, -2)) for n in noisy]
            wanted = sum(float(w.square().sum()) for w in windows) / 60
        assert flip_error(flips, deviation) / wanted == pytest.approx(
            1, abs=0.2
        )  # a window may have a third rival
    assert flip_error(flips, 0.0) == 0
    assert flip_error(flips, 0.02) / flip_error(flips, 0.01) == pytest.approx(2, rel=0.2)
