"""Models that compile within a second, and functions to compile and compare them.

Invariant: a model depends only on its seed, so two calls return equal models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qsync_fx.backend.entry import qsync


class Convolutional(nn.Module):
    """Convolutional network with batch norm, layer norm, pooling and an in-place operator.

    Input [N, 1, 8, 8], output [N, 10].
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8 * 16, 16)
        self.layer_norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.norm(self.conv(x)))
        x = F.max_pool2d(x, 2).flatten(1)
        return self.head(self.layer_norm(F.gelu(self.hidden(x))))


class Perceptron(nn.Module):
    """MLP of three layers with optional dropout: [N, 16] to [N, 10]."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 32), nn.Tanh()
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def compiled(model: Any, **options: Any) -> Any:
    """Compile the model with the backend and aot_eager as the inner compiler."""
    return torch.compile(model, backend="qsync", options={"inner_backend": "aot_eager", **options})


class Counting:
    """Backend that records the graphs that it compiles."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        options: dict[str, object] | None = None,
    ) -> Callable[..., Any]:
        self.graphs.append(module)
        return qsync(module, inputs, options=options)

    def compile(self, model: Any, **options: Any) -> Any:
        return torch.compile(model, backend=self, options={"inner_backend": "aot_eager", **options})


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_equal(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Assert that two state dicts, or sets of gradients, are equal bit for bit."""
    assert actual.keys() == wanted.keys()
    assert actual, "there are no tensors to compare"
    for name in wanted:
        assert torch.equal(actual[name], wanted[name]), (
            f"{name} differs by {(actual[name] - wanted[name]).abs().max()}"
        )


def relative_error(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the norm of the difference of all tensors, relative to the norm of `wanted`."""
    assert actual.keys() == wanted.keys()
    difference = sum(
        float((actual[name].double() - wanted[name].double()).square().sum()) for name in wanted
    )
    return (difference / sum(float(t.double().square().sum()) for t in wanted.values())) ** 0.5
