"""Models of the simulated fleets, at the sizes of QSync's Table IV, with real data to train them.

The convolutional networks classify Fashion-MNIST (scikit-learn's digits without Debian's package),
resized to three channels. BERT finds a sentence in a passage: an input is a sentence with some
masked words, and a passage of docstrings that contains it; the answer is its position.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from data import Data, load

from benchmarks.paper.support import text
from benchmarks.support.models import initialize_convolutions, vgg_layers

Inputs = dict[str, Tensor]
Draw = Callable[[int, int, torch.Generator], Inputs]
"""Function of a number of samples and of their size (image side, or words) to random samples."""
IMAGES, WORDS = 224, 384
"""Sizes of a sample in a fleet: side of an image, and words of a text."""


@dataclass(frozen=True)
class Case:
    """Model, its training data, and its sizes.

    Attributes:
        build: creates the model, whose forward returns the loss.
        draw: draws training samples.
        size: size of a sample in a fleet.
        batch: samples per device and step in a fleet.
        small: size of a sample in training here, for which a step takes about a second.
        rate: learning rate of AdamW.
        probed: samples of a step of the sensitivity's measurement; one image of VGG-16 needs 15 GB.
    """

    build: Callable[[], nn.Module]
    draw: Draw
    size: int
    batch: int
    small: int
    rate: float
    probed: int = 2

    def inputs(self, samples: int, seed: int = 0) -> Inputs:
        """Return samples of the fleet's size."""
        return self.draw(samples, self.size, torch.Generator().manual_seed(seed))


class Vgg(nn.Module):
    """VGG-16 (configuration D) with or without batch norm, with its three linear layers."""

    def __init__(self, norms: bool) -> None:
        super().__init__()
        widths = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
        self.features = nn.Sequential(*vgg_layers(*widths, batch_norm=norms))
        heads = [
            nn.Linear(512 * 49, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(),
        ]
        # The pooling, as torchvision has it, changes nothing for images of 224 pixels.
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(7), nn.Flatten(), *heads, nn.Linear(4096, 1000)
        )
        initialize_convolutions(self)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(images)), labels)


class Loss(nn.Module):
    """Model of transformers that returns only its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        loss: Tensor = self.model(**inputs).loss
        return loss


def resnet(depths: list[int], widths: list[int], kind: str) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=depths, hidden_sizes=widths, layer_type=kind, num_labels=1000)
    return Loss(ResNetForImageClassification(config))


def bert(layers: int, width: int = 768) -> nn.Module:
    from transformers import BertConfig, BertForQuestionAnswering

    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
    )
    return Loss(BertForQuestionAnswering(config))


@functools.cache
def _images() -> Data:
    return load(None)


def images(name: str) -> Draw:
    """Return a function that draws images as the argument `name` and their classes as labels."""

    def draw(samples: int, size: int, generator: torch.Generator) -> Inputs:
        data = _images()
        chosen = torch.randint(len(data.train[1]), (samples,), generator=generator)
        gray = data.normalized(data.train[0][chosen])
        resized = F.interpolate(gray, (size, size), mode="bilinear")
        return {name: resized.repeat(1, 3, 1, 1), "labels": data.train[1][chosen]}

    return draw


@functools.cache
def _texts() -> Tensor:
    return text.load(200, 60).train[0]


def questions(samples: int, size: int, generator: torch.Generator) -> Inputs:
    """Draw passages of `size` words that each begin with a sentence of the passage."""
    rows = _texts()
    ids = torch.full((samples, size), text.PADDING)
    first, last = torch.zeros(2, samples, dtype=torch.int64)
    for sample in range(samples):
        order = torch.randperm(len(rows), generator=generator)[: size // text.LEAST]
        sentences = [row[row != text.PADDING] for row in rows[order]]
        passage, begins = [], []
        position = text.LENGTH
        for sentence in sentences:
            if position + len(sentence) > size:
                break
            passage.append(sentence)
            begins.append(position)
            position += len(sentence)
        answer = int(torch.randint(len(passage), (1,), generator=generator))
        question = passage[answer].clone()
        question[torch.rand(len(question), generator=generator) < 0.15] = text.MASK
        ids[sample, : len(question)] = question
        ids[sample, text.LENGTH : position] = torch.cat(passage)
        first[sample] = begins[answer]
        last[sample] = begins[answer] + len(question) - 1
    return {"input_ids": ids, "start_positions": first, "end_positions": last}


CASES = {
    "resnet50": Case(
        lambda: resnet([3, 4, 6, 3], [256, 512, 1024, 2048], "bottleneck"),
        images("pixel_values"),
        size=IMAGES,
        batch=128,
        small=64,
        rate=1e-3,
    ),
    **{
        name: Case(
            functools.partial(Vgg, norms),
            images("images"),
            size=IMAGES,
            batch=128,
            small=32,
            rate=1e-4,
            probed=1,
        )
        for name, norms in {"vgg16": False, "vgg16bn": True}.items()
    },
    "bert": Case(lambda: bert(12), questions, size=WORDS, batch=12, small=64, rate=1e-4),
}
QUICK = {
    "resnet": Case(
        lambda: resnet([1, 1], [64, 128], "basic"),
        images("pixel_values"),
        size=64,
        batch=128,
        small=32,
        rate=1e-3,
    ),
    "bert": Case(lambda: bert(1), questions, size=64, batch=12, small=64, rate=1e-4),
}
