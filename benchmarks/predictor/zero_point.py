"""Symmetric INT8 compared with INT8 with a zero point, on activations after ReLU of a ResNet.
A ResNet-8 trains on Fashion-MNIST in FP32. Then operands of its convolutions and its linear layer
are quantized with stochastic rounding: symmetric, with one scale per tensor (127 levels above zero)
or per channel, and with a zero point for tensors without negative values (255 levels). Rows "layer"
are sums of variances over a batch, by the exact formula: "product" of the output, "weight_gradient"
of the gradient, with incoming gradients in FP32. Rows "model" are the mean squared error of all
gradients of the model, over passes with quantized operands in all layers; "noise" is the variance
of the exact gradient between batches. "ratio" is a value divided by the symmetric one per tensor.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paper.support.images import NETWORKS, Images, Size, built
from benchmarks.paper.support.pair import Inputs
from benchmarks.support.harness import Row, arguments, by_size, show, write_json
from qsync_fx.predictor.indicator.rounding_variance import product_noise

Layer = nn.Conv2d | nn.Linear
SYMMETRIC, ZERO_POINT, CHANNEL = "symmetric", "zero point", "symmetric, per channel"
SCHEMES = (SYMMETRIC, ZERO_POINT, CHANNEL)


def scale_of(x: Tensor, scheme: str) -> Tensor:
    """Return the scale of a tensor; a zero point helps only tensors without negative values.

    `CHANNEL` has a scale per sample of an activation and per output channel of a weight, as the
    option scaling="channel".
    """
    levels = 255 if scheme == ZERO_POINT and bool((x >= 0).all()) else 127
    largest = x.abs().amax()
    if scheme == CHANNEL:
        largest = x.abs().amax(list(range(1, x.dim())), keepdim=True)
    return largest.clamp(min=2.0**-126) / levels


def rounded(x: Tensor, scheme: str) -> Tensor:
    """Return `x` on the grid, rounded stochastically, with the gradient of `x`."""
    scale = scale_of(x.detach(), scheme)
    units = x.detach() / scale
    return x + ((units + torch.rand_like(units)).floor() * scale - x.detach())


def variance(x: Tensor, scheme: str) -> Tensor:
    """Return the variance of each element from stochastic rounding: QSync, Proposition 2."""
    scale = scale_of(x, scheme).double()
    fraction = x.double() / scale
    fraction = fraction - fraction.floor()
    return fraction * (1 - fraction) * scale.square()


def product(layer: Layer) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of input and weight of a layer, without bias."""
    if isinstance(layer, nn.Linear):
        return F.linear
    settings: dict[str, Any] = {
        "stride": layer.stride,
        "padding": layer.padding,
        "dilation": layer.dilation,
        "groups": layer.groups,
    }
    return lambda x, weight: F.conv2d(x, weight, **settings)


@dataclass
class Observed:
    """Input and output gradient of each layer in one pass."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def layers_of(model: nn.Module) -> dict[str, Layer]:
    return {name: part for name, part in model.named_modules() if isinstance(part, Layer)}


@contextmanager
def observing(model: nn.Module) -> Iterator[Observed]:
    result, handles = Observed(), []

    def watch(name: str, layer: nn.Module) -> None:
        def see(part: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            result.inputs[name] = args[0].detach()
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: result.gradients.update({name: gradient})
            )

        handles.append(layer.register_forward_hook(see))

    for name, layer in layers_of(model).items():
        watch(name, layer)
    try:
        yield result
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def quantizing(model: nn.Module, scheme: str) -> Iterator[None]:
    """Quantize the input of each layer."""
    handles = [
        layer.register_forward_pre_hook(lambda part, args: (rounded(args[0], scheme),))
        for layer in layers_of(model).values()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gradient(model: nn.Module, batch: Inputs, scheme: str | None = None) -> Tensor:
    """Return all gradients of a batch, with quantized operands if a scheme is given."""
    parameters: Mapping[str, Tensor] = dict(model.named_parameters())
    weights = {f"{name}.weight" for name in layers_of(model)}
    used = dict(parameters)
    if scheme is None:
        loss = F.cross_entropy(model(batch[0]), batch[1])
    else:
        used |= {name: rounded(parameters[name], scheme) for name in weights}
        with quantizing(model, scheme):
            loss = F.cross_entropy(functional_call(model, used, (batch[0],)), batch[1])
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return torch.cat([part.flatten() for part in gradients]).double()


def layer_rows(seed: int, model: nn.Module, batch: Inputs) -> Iterator[Row]:
    with observing(model) as observed:
        F.cross_entropy(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
    for name, layer in layers_of(model).items():
        x, weight = observed.inputs[name], layer.weight.detach()
        if bool((x < 0).any()):
            continue
        row: dict[str, Any] = {
            "what": "layer",
            "seed": seed,
            "name": name,
            "zeros": float((x == 0).float().mean()),
        }
        by = product(layer)
        for scheme in SCHEMES:
            noise = variance(x, scheme)
            outputs = product_noise(by, x, weight, noise, variance(weight, scheme))
            row[f"product, {scheme}"] = float(outputs.sum())
            # The weight gradient is the derivative of a product, so its variance is one of squares.
            square = weight.double().requires_grad_()
            (summed,) = torch.autograd.grad(
                by(noise, square), square, observed.gradients[name].double().square()
            )
            row[f"weight_gradient, {scheme}"] = float(summed.sum())
        for value in ("product", "weight_gradient"):
            for scheme in SCHEMES[1:]:
                ratio = row[f"{value}, {scheme}"] / row[f"{value}, {SYMMETRIC}"]
                row[f"{value} ratio, {scheme}"] = ratio
        yield row


def model_row(seed: int, model: nn.Module, batches: list[Inputs], draws: int) -> Row:
    exact = [gradient(model, batch) for batch in batches]
    row: dict[str, Any] = {"what": "model", "seed": seed, "draws": draws * len(batches)}
    row["noise"] = float(torch.stack(exact).var(0).sum())
    for scheme in SCHEMES:
        errors = [
            float((gradient(model, batch, scheme) - reference).square().sum())
            for batch, reference in zip(batches, exact, strict=True)
            for _ in range(draws)
        ]
        row[scheme] = statistics.fmean(errors)
    for scheme in SCHEMES[1:]:
        row[f"ratio, {scheme}"] = row[scheme] / row[SYMMETRIC]
    return row


def trained(images: Images, data: Any, seed: int, rate: float) -> nn.Module:
    model = built(NETWORKS["ResNet-8"].build, images.classes, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for epoch in range(images.size.epochs):
        for ((x, y),) in images.parts(data, [images.size.batch], seed, epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


def main() -> None:
    options = arguments(__doc__)
    size = by_size(options.quick, Size(256, 128, 1, 64), Size(16_000, 128, 1, 128))
    seeds, draws, count = by_size(options.quick, (1, 1, 2), (3, 8, 8))
    images, rows = Images(size), list[Row]()
    for seed in range(seeds):
        data = images.subset(seed)
        model = trained(images, data, seed, 0.05)
        steps = images.parts(data, [size.batch], seed, epoch=99)
        batches = [part for (part,), _ in zip(steps, range(count), strict=False)]
        rows += layer_rows(seed, model, batches[0])
        rows.append(model_row(seed, model, batches, draws))
    show(rows)
    if options.json:
        write_json(options.json, rows, options.quick, images=images.name)


if __name__ == "__main__":
    main()
