"""Accuracy of sensitivity indicators, compared with Monte Carlo and quantized training steps.
Twelve small networks train on scikit-learn's digits. Each is trained for a few steps before the
measurement and between measured steps: with rounding to nearest, constant weights would have the
same error in every step. The reference is the mean squared error of the gradients if one operator
at a time runs in the precision, as lowered by the backend. Columns: "floor" is the rank correlation
of the reference between odd and even steps; a column named after a method is its rank correlation
with the reference, "METHOD/truth" its geometric mean ratio to it, and "METHOD s" its duration in
seconds. "spread" is the ratio of the largest to the smallest reference value. "formula/Monte Carlo"
and "paper/Monte Carlo" are ratios of variances (the latter of QSync's Eq. (4)).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from qsync_fx.formats import FORMATS, Precision
from qsync_fx.predictor.indicator import formulas as paper
from qsync_fx.predictor.indicator.rounding_variance import (
    noise,
    product_noise,
    scale,
    step as grid_step,
)
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity, agreement, spearman
from qsync_fx.profiler.sensitivity.estimate import several

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import Row, arguments, by_size, show, write_json
from benchmarks.support.indicators import gradient_products  # also registers further methods

Batch = tuple[Tensor, Tensor]
DRAWN = ("second_order", "injected", "paper", "monte_carlo")
"""Methods whose values are recorded for each operator."""
STEPS = {"bf16": 24, "int8": 12}
"""Steps by precision; rounding to nearest (BF16) needs more, one sample per error and step."""
FLOOR, MORE = 0.95, (4, 8, 16)
"""If the floor is below `FLOOR`, the network is measured again with the next multiple of the steps.
"""
METHODS = ("second_order", "injected", "depth", "paper", "fisher", "random", "monte_carlo")


def digits(count: int, size: int) -> list[Batch]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16 - 0.3, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return [(x[index], y[index]) for index in torch.split(order, size)[:count]]


def perceptron(activation: Callable[[], nn.Module]) -> nn.Module:
    widths = (64, 128, 32, 256, 64, 64, 16, 128, 10)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.activation = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
            activation,
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.activation(self.up(x)))
        return result


def residual(activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 48), *(Block(48, activation()) for _ in range(4)), nn.Linear(48, 10)
    )


class Attention(nn.Module):
    """torch.nn's transformer encoder over the eight rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", batch_first=True, norm_first=first)
            for first in (True, False)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rows(x.view(-1, 8, 8))
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x.mean(1))
        return result


def convolutional(activation: Callable[[], nn.Module], norm: bool) -> nn.Module:
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    channels = 1
    for width, stride in ((16, 1), (16, 1), (32, 2), (32, 1), (64, 2)):
        layers.append(nn.Conv2d(channels, width, 3, stride, 1))
        if norm:
            layers.append(nn.BatchNorm2d(width))
        layers.append(activation())
        channels = width
    head = (
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 32),
        activation(),
        nn.Linear(32, 10),
    )
    return nn.Sequential(*layers, *head)


def pooling() -> nn.Module:
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    for a, b, pool in ((1, 16, False), (16, 32, True), (32, 32, False), (32, 64, True)):
        layers += [nn.Conv2d(a, b, 3, 1, 1), nn.ReLU(True)]
        if pool:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        sizes: dict[str, Any] = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 8,
            "patch_size": 2,
            "num_channels": 1,
        }
        config = ViTConfig(**sizes, num_labels=10, attn_implementation="eager")
        self.vit = ViTForImageClassification(config)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.vit(pixel_values=x.view(-1, 1, 8, 8)).logits
        return result


class Gpt2(nn.Module):
    """GPT-2 that reads an image by pixels (17 gray levels) and classifies it at the last one."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2Model

        sizes: dict[str, Any] = {
            "n_embd": 32,
            "n_layer": 1,
            "n_head": 4,
            "n_positions": 64,
            "vocab_size": 17,
        }
        dropouts: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.gpt2 = GPT2Model(GPT2Config(**sizes, **dropouts, use_cache=False))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        shades = ((x + 0.3) * 16).round().long().clamp(0, 16)
        result: Tensor = self.head(self.gpt2(input_ids=shades).last_hidden_state[:, -1])
        return result


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "perceptron, ReLU": lambda: perceptron(nn.ReLU),
    "perceptron, GELU": lambda: perceptron(nn.GELU),
    "perceptron, tanh": lambda: perceptron(nn.Tanh),
    "residual, ReLU": lambda: residual(nn.ReLU),
    "residual, GELU": lambda: residual(nn.GELU),
    "attention, GELU": Attention,
    "convolutions, ReLU": lambda: convolutional(nn.ReLU, norm=False),
    "convolutions, GELU": lambda: convolutional(nn.GELU, norm=False),
    "convolutions, batch norm, ReLU": lambda: convolutional(nn.ReLU, norm=True),
    "convolutions, max pooling": pooling,
    "ViT": Vit,
    "GPT-2": Gpt2,
}


def loss(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(model: nn.Module, batches: list[Batch]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def floor(truth: Sensitivity, precision: str) -> float:
    """Return the rank correlation of the reference between odd and even steps."""
    halves = [
        [
            statistics.fmean(values[name][precision] for values in truth.trace[first::2])
            for name in truth.operators
        ]
        for first in (0, 1)
    ]
    return spearman(*halves)


def network(name: str, precision: str, steps: int) -> Row:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = NETWORKS[name]()
    # activations rarely change sign: with a small batch, the result would be mostly noise
    batches = digits(18, 96)
    train(model, batches)

    def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    return {
        "case": name,
        **compared(model, loss, batches, METHODS, precision, steps=steps, optimizer=optimizer),
    }


def compared(
    model: nn.Module,
    step: Callable[[Any, Any], Tensor],
    batches: Sequence[Any],
    methods: Sequence[str],
    precision: str,
    **settings: Any,
) -> Row:
    """Return the agreement of methods with the last one, which is the reference.

    `settings` are options of `several`.
    """
    estimates = several(model, step, batches, methods, [precision], fraction=1.0, **settings)
    *compared_methods, truth = estimates
    agreements = {
        estimate.method: agreement(estimate, truth, precision) for estimate in compared_methods
    }
    row: Row = {
        "precision": precision,
        "steps": settings["steps"],
        "operators": agreements["second_order"].operators,
        "spread": agreements["second_order"].spread,
        "floor": floor(truth, precision),
        **{method: a.spearman for method, a in agreements.items()},
        **{
            f"{method}/truth": agreements[method].ratio
            for method in ("second_order", "injected", "depth", "paper")
            if method in agreements
        },
        **{
            f"{estimate.method} s": estimate.seconds
            for estimate in estimates
            if estimate.method in ("second_order", "injected", "monte_carlo")
        },
        "each": {
            estimate.method: rounded(estimate, precision)
            for estimate in estimates
            if estimate.method in DRAWN
        },
    }
    return {key: None if value != value else value for key, value in row.items()}


def rounded(sensitivity: Sensitivity, precision: str) -> list[float | None]:
    """Return the variance of each operator, for `benchmarks/plots.py`."""
    values = [sensitivity.variance[name].get(precision) for name in sensitivity.operators]
    return [None if value is None else float(f"{value:.4g}") for value in values]


# Variance formulas against Monte Carlo.

PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (F.linear, (64, 96), (48, 96)),
    "attention scores": (lambda q, k: q @ k.transpose(-1, -2), (4, 4, 16, 16), (4, 4, 16, 16)),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1, stride=2), (4, 8, 12, 12), (16, 8, 3, 3)),
    "conv2d in groups": (lambda x, w: F.conv2d(x, w, groups=4), (4, 16, 10, 10), (16, 4, 3, 3)),
    "conv_transpose2d": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        (4, 8, 6, 6),
        (8, 12, 3, 3),
    ),
    "experts": (torch.bmm, (4, 32, 32), (4, 32, 24)),
}


def drawn(x: Tensor, fmt: Precision, generator: torch.Generator) -> Tensor:
    """Return `x` rounded stochastically to `fmt`, computed in FP64 from the definition."""
    factor = scale(x, fmt)
    units = x.double() / factor
    size = grid_step(units, fmt)
    below = (units / size).floor()
    random = torch.rand(x.shape, generator=generator, dtype=torch.float64)
    return (below + (random < units / size - below)) * size * factor


def formulas(draws: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    rows: list[Row] = []

    def row(
        case: str,
        label: str,
        fmt: Precision,
        sample: Callable[[], Tensor],
        exact: Tensor,
        variance: Tensor,
    ) -> None:
        measured = sum(float((sample() - exact).square().sum()) for _ in range(draws)) / draws
        rows.append(
            {
                "case": case,
                "what": label,
                "precision": fmt.name,
                "formula/Monte Carlo": float(variance.sum()) / measured,
            }
        )

    for name, (product, of_x, of_w) in PRODUCTS.items():
        x, w = (
            torch.relu(torch.randn(of_x, generator=generator)),
            torch.randn(of_w, generator=generator),
        )
        g = torch.randn(product(x, w).shape, generator=generator)
        to_x, to_w = gradient_products(product, x, w)
        for fmt in (FORMATS["int8"], FORMATS["fp16"], FORMATS["fp8"]):
            vx, vw, vg = (noise(t, fmt) for t in (x, w, g))
            row(name, "tensor", fmt, lambda x=x, f=fmt: drawn(x, f, generator), x.double(), vx)  # type: ignore[misc]
            cases = (
                ("output", product, x, w, vx, vw),
                ("weight gradient", to_w, g, x, vg, vx),
                ("input gradient", to_x, g, w, vg, vw),
            )
            for label, computed, a, b, va, vb in cases:

                def sample(
                    c: Any = computed, a: Tensor = a, b: Tensor = b, fmt: Precision = fmt
                ) -> Tensor:
                    product: Tensor = c(drawn(a, fmt, generator), drawn(b, fmt, generator))
                    return product

                row(
                    name,
                    label,
                    fmt,
                    sample,
                    computed(a.double(), b.double()),
                    product_noise(computed, a, b, va, vb),
                )
            if name == "linear":
                bound = paper.forward(paper.moments(x, fmt), paper.moments(w, fmt))
                of_paper = {
                    "paper/Monte Carlo": bound / float(product_noise(product, x, w, vx, vw).sum())
                }
                rows.append(
                    {"case": name, "what": "output, equation 4", "precision": fmt.name, **of_paper}
                )
    return rows


def main() -> None:
    options = arguments(
        __doc__, only={"nargs": "*", "metavar": "NETWORK", "help": "these networks alone"}
    )
    rows = formulas(by_size(options.quick, 20, 400))
    names = options.only or (by_size(options.quick, list(NETWORKS)[:1], list(NETWORKS)))
    for name in names:
        for precision in by_size(options.quick, ("int8",), STEPS):
            steps = by_size(options.quick, 2, STEPS[precision])
            row = network(name, precision, steps)
            for more in by_size(options.quick, (), MORE):
                if float(row["floor"]) < FLOOR:
                    row = network(name, precision, more * steps)
            rows.append(row)
            if options.json:
                write_json(
                    options.json, rows, options.quick
                )  # Save intermediate results, because each network takes long.
            print(
                {
                    k: round(v, 3) if isinstance(v, float) else v
                    for k, v in row.items()
                    if k != "each"
                },
                flush=True,
            )
    show([{key: value for key, value in row.items() if key != "each"} for row in rows])


if __name__ == "__main__":
    main()
