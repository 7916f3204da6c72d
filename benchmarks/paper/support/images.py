"""Convolutional networks of the experiments, small enough to train in seconds on one core.

The images are Fashion-MNIST if Debian's package is installed, else scikit-learn's digits. The seed
selects a subset of the training images.

Invariant: with the same seed, all plans start from the same weights and read the same images in the
same order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from data import Data, load
from models import ResNet

from benchmarks.paper.support.pair import Inputs, Pair
from benchmarks.support.models import vgg_layers
from qsync_fx import Plan


@dataclass(frozen=True)
class Size:
    """Size of a training.

    Attributes:
        samples, tests: number of training and test images.
        epochs: number of passes over the training images.
        batch: images per rank and step, if both ranks have equal batches.
    """

    samples: int = 16_000
    tests: int = 10_000
    epochs: int = 4
    batch: int = 64


@dataclass(frozen=True)
class Network:
    """Network and its learning rate.

    Attributes:
        build: creates the network for a number of classes.
        rate: learning rate for a global batch of 256.
        planned: creates the network that plans are made for: with the same operators and enough
            channels to occupy a GPU. None if it is the trained network.
        size: of a training.
    """

    build: Callable[[int], nn.Module]
    rate: float
    planned: Callable[[int], nn.Module] | None = None
    size: Size = Size()


QUICK = Size(256, 128, 1, 32)


def resnet(classes: int, width: int = 8) -> nn.Module:
    """Return the ResNet of the examples, for images of one channel."""
    return ResNet(classes, width=width)


def vgg(classes: int, width: int = 8, batch_norm: bool = True) -> nn.Module:
    """Return a VGG (Simonyan and Zisserman) for images of one channel.

    It has six convolutions, three max poolings and one linear layer.
    """
    first, second, third = width, 2 * width, 4 * width
    widths = (first, first, 0, second, second, 0, third, third, 0)
    layers = vgg_layers(*widths, channels=1, batch_norm=batch_norm)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(third, classes))


NETWORKS = {
    "ResNet-8": Network(resnet, 0.2, lambda classes: resnet(classes, width=128)),
    "VGG-6-BN": Network(vgg, 0.1, lambda classes: vgg(classes, width=128)),
}


def loss(model: Any, part: Inputs) -> Tensor:
    return F.cross_entropy(model(part[0]), part[1])


@functools.cache
def _loaded(source: str | None) -> Data:
    return load(source)


class Images:
    """Normalized images; each seed trains on a subset."""

    def __init__(self, size: Size, source: str | None = None) -> None:
        self.size, self._data = size, _loaded(source)
        self.classes, self.name = self._data.classes, self._data.name

    def subset(self, seed: int) -> Data:
        return self._data.subset(min(self.size.samples, len(self._data.train[1])), seed)

    def parts(
        self, data: Data, batches: Sequence[int], seed: int, epoch: int
    ) -> Iterator[list[Inputs]]:
        """Yield, for each step of an epoch, the inputs of each rank."""
        order = torch.randperm(
            len(data.train[1]), generator=torch.Generator().manual_seed(1000 * seed + epoch)
        )
        for chosen in torch.split(order, sum(batches)):
            if len(chosen) == sum(batches):
                yield [
                    (data.normalized(data.train[0][part]), data.train[1][part])
                    for part in torch.split(chosen, list(batches))
                ]


def built(build: Callable[[int], nn.Module], classes: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = build(classes)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


class Trainer:
    """Trainer of a network under one plan per rank; compiles once for all seeds.

    Args:
        network, images: network and data.
        plans: one per rank.
        batches: images per step, one number per rank.
        options: of the backend.
    """

    def __init__(
        self,
        network: Network,
        images: Images,
        plans: Sequence[Plan],
        batches: Sequence[int],
        **options: Any,
    ) -> None:
        torch._dynamo.reset()
        self.network, self.images, self.batches = network, images, batches
        self.pair = Pair(built(network.build, images.classes, 0), plans, loss, **options)

    def accuracy(self, seed: int, advance: Callable[[], None] = lambda: None) -> float:
        """Train from new weights and return the accuracy on the test images, evaluated in FP32."""
        images, pair, size = self.images, self.pair, self.images.size
        pair.restart(built(self.network.build, images.classes, seed))
        data, model = images.subset(seed), pair.model.train()
        rate = self.network.rate * sum(self.batches) / 256
        steps = len(data.train[1]) // sum(self.batches)
        optimizer = torch.optim.SGD(
            model.parameters(), rate, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, rate, total_steps=size.epochs * steps + 1
        )
        for epoch in range(size.epochs):
            for parts in images.parts(data, self.batches, seed, epoch):
                pair.backward(parts)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            pair.average_buffers()
            advance()
        return evaluated(model, data, size.tests)


@torch.no_grad()
def evaluated(model: nn.Module, data: Data, tests: int) -> float:
    model.eval()
    images, labels = data.test[0][:tests], data.test[1][:tests]
    pairs = zip(torch.split(images, 500), torch.split(labels, 500), strict=True)
    return sum(int((model(data.normalized(x)).argmax(1) == y).sum()) for x, y in pairs) / len(
        labels
    )
