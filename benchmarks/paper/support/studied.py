"""Training tasks of the codec study: ResNet on images, LSTM text classifier, GPT language model.

Invariant: with the same seed, all gradient codecs start from the same weights, and each rank reads
the same batches in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.paper.support import text
from benchmarks.paper.support.images import NETWORKS, QUICK, Images, Size, evaluated
from benchmarks.support.harness import by_size

IMAGES = Size(samples=12_000, tests=10_000, epochs=5, batch=64)
ALL_IMAGES = Size(samples=60_000, tests=10_000, epochs=5, batch=64)
"""Five times the training images of `IMAGES`: the codec study trains its networks to convergence.
"""
TEXTS, EACH = 800, 32
"""Texts per package, and texts per rank and step."""
EPOCHS = {"LSTM": 8, "GPT": 12, "GPT, longer": 36}
WIDTH = 64
RATE = 3e-3
"""Maximum learning rate of AdamW on texts."""
LATE: Mapping[str, Mapping[str, float]] = {
    "GPT, rate 1e-3": {"rate": 1e-3},
    "GPT, rate 3e-4": {"rate": 3e-4},
    "GPT, β1 0.5": {"momentum": 0.5},
    "GPT, β1 0": {"momentum": 0.0},
    "GPT, rate 1e-3, β1 0": {"rate": 1e-3, "momentum": 0.0},
}
"""Settings of AdamW for late gradients (`duo0`, docs/duo.md) on the task "GPT, next word"."""


@dataclass(frozen=True)
class Training:
    """One training of a network.

    Attributes:
        model: with its initial weights.
        optimizer: creates the optimizer from parameters and a learning rate.
        rate: maximum learning rate.
        steps: total number of steps.
        batches: yields for each step the (inputs, labels) of each rank.
        loss: of a model and a rank's batch.
        accuracy: of the model in FP32, as the fraction of correct test predictions.
        cycles_momentum: whether the schedule lowers the momentum from 0.95 to 0.85 while the rate
            rises, and raises it again, as OneCycleLR does by default.
    """

    model: nn.Module
    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    rate: float
    steps: int
    batches: Callable[[], Iterator[list[tuple[Tensor, Tensor]]]]
    loss: Callable[[Any, tuple[Tensor, Tensor]], Tensor]
    accuracy: Callable[[nn.Module], float]
    cycles_momentum: bool = True


Task = Callable[[int, int, bool], Training]
"""Function of the number of ranks, a seed, and whether the run is quick."""


def resnet(ranks: int, seed: int, quick: bool, of: Size = IMAGES) -> Training:
    size = by_size(quick, QUICK, of)
    images = Images(size, by_size(quick, "digits", None))
    data, batches = images.subset(seed), [size.batch] * ranks
    torch.manual_seed(seed)

    def parts() -> Iterator[list[tuple[Tensor, Tensor]]]:
        for epoch in range(size.epochs):
            yield from images.parts(data, batches, seed, epoch)  # type: ignore[misc]

    return Training(
        NETWORKS["ResNet-8"].build(images.classes),
        lambda parameters, rate: torch.optim.SGD(
            parameters, rate, momentum=0.9, nesterov=True, weight_decay=5e-4
        ),
        0.2,
        size.epochs * (len(data.train[1]) // sum(batches)),
        parts,
        lambda model, part: F.cross_entropy(model(part[0]), part[1]),
        lambda model: evaluated(model, data, size.tests),
    )


class Lstm(nn.Module):
    """LSTM classifier of a text's package: int64 (texts, words) -> (texts, packages)."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.word = nn.Embedding(words, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, len(text.PACKAGES))

    def forward(self, texts: Tensor) -> Tensor:
        states, _ = self.lstm(self.word(texts))
        mask = (texts != text.PADDING).unsqueeze(-1)
        result: Tensor = self.head((states * mask).sum(1) / mask.sum(1))
        return result


class Gpt(nn.Module):
    """GPT next-word predictor: int64 (texts, words) -> (texts, words, vocabulary)."""

    def __init__(self, words: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes: dict[str, Any] = {"vocab_size": words, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
        ends: dict[str, Any] = {"bos_token_id": text.FIRST, "eos_token_id": text.PADDING}
        self.gpt = GPT2LMHeadModel(GPT2Config(n_positions=text.LENGTH, **sizes, **ends))

    def forward(self, texts: Tensor) -> Tensor:
        result: Tensor = self.gpt(input_ids=texts, use_cache=False).logits
        return result


@functools.cache
def _loaded(quick: bool) -> text.Texts:
    """Return the texts; cached, because `text.load` parses many files."""
    return text.load(40, text.FEW) if quick else text.load(TEXTS)


def lstm(ranks: int, seed: int, quick: bool) -> Training:
    texts = _loaded(quick)

    def accuracy(model: nn.Module) -> float:
        rows, labels = texts.test
        return float((model(rows).argmax(1) == labels).float().mean())

    def loss(model: Any, part: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(part[0]), part[1])

    return _on_texts(texts, Lstm, EPOCHS["LSTM"], loss, accuracy, ranks, seed, quick)


def gpt(
    ranks: int,
    seed: int,
    quick: bool,
    epochs: int = EPOCHS["GPT"],
    rate: float = RATE,
    momentum: float | None = None,
) -> Training:
    texts = _loaded(quick)

    def loss(model: Any, part: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(part[0])[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, part[0][:, 1:].flatten(), ignore_index=text.PADDING)

    def accuracy(model: nn.Module) -> float:
        right = words = 0
        for rows in torch.split(texts.test[0], 100):
            predicted, expected = model(rows)[:, :-1].argmax(-1), rows[:, 1:]
            mask = expected != text.PADDING
            right, words = right + int((predicted == expected)[mask].sum()), words + int(mask.sum())
        return right / words

    result = _on_texts(texts, Gpt, epochs, loss, accuracy, ranks, seed, quick)
    result = replace(result, rate=rate)
    if momentum is None:
        return result
    optimizer = functools.partial(torch.optim.AdamW, betas=(momentum, 0.999), weight_decay=0.01)
    return replace(result, optimizer=optimizer, cycles_momentum=False)


def _on_texts(
    texts: text.Texts,
    build: Callable[[int], nn.Module],
    epochs: int,
    loss: Callable[[Any, tuple[Tensor, Tensor]], Tensor],
    accuracy: Callable[[nn.Module], float],
    ranks: int,
    seed: int,
    quick: bool,
) -> Training:
    batch, epochs = by_size(quick, (8, 1), (EACH, epochs))
    rows, labels = texts.train
    torch.manual_seed(seed)

    def parts() -> Iterator[list[tuple[Tensor, Tensor]]]:
        for epoch in range(epochs):
            order = torch.randperm(
                len(rows), generator=torch.Generator().manual_seed(1000 * seed + epoch)
            )
            for chosen in torch.split(order, batch * ranks):
                if len(chosen) == batch * ranks:
                    yield [(rows[part], labels[part]) for part in torch.split(chosen, batch)]

    return Training(
        build(texts.words),
        lambda parameters, rate: torch.optim.AdamW(parameters, rate, weight_decay=0.01),
        RATE,
        epochs * (len(rows) // (batch * ranks)),
        parts,
        loss,
        torch.no_grad()(accuracy),
    )


TASKS: Mapping[str, Task] = {
    "ResNet-8, images": resnet,
    "ResNet-8, all images": functools.partial(resnet, of=ALL_IMAGES),
    "LSTM, texts": lstm,
    "GPT, next word": gpt,
    "GPT, next word, longer": functools.partial(gpt, epochs=EPOCHS["GPT, longer"]),
    **{name: functools.partial(gpt, **setting) for name, setting in LATE.items()},  # type: ignore[arg-type]
}
METHODS: Mapping[str, Sequence[str]] = {
    "ResNet-8, all images": ("1bit*", "qsgd4", "qsgd8"),
    "GPT, next word, longer": ("1bit*", "qsgd8"),
    **dict.fromkeys(LATE, ("duo0",)),
}
"""Methods besides FP32 of tasks that are trained with few of them."""
_TEXTS = f"{TEXTS} texts of each of {len(text.PACKAGES)} packages, {EACH} of a rank in a step"


def _images(size: Size) -> str:
    return f"{size.epochs} epochs over {size.samples:,} images, {size.batch} of a rank in a step"


SIZES: Mapping[str, str] = {
    "ResNet-8, images": _images(IMAGES),
    "ResNet-8, all images": _images(ALL_IMAGES),
    "LSTM, texts": f"{EPOCHS['LSTM']} epochs over {_TEXTS}",
    "GPT, next word": f"{EPOCHS['GPT']} epochs over {_TEXTS}",
    "GPT, next word, longer": f"{EPOCHS['GPT, longer']} epochs over {_TEXTS}",
    **dict.fromkeys(LATE, f"{EPOCHS['GPT']} epochs over {_TEXTS}"),
}
"""Training size of each task without --quick."""
