"""QSync's Table VI: a BERT that was trained on text before is fine-tuned: full precision, dynamic batch sizing, uniform precision and ours.

The text is real and ships with packages (`support.text`): descriptions of functions and classes, to be told apart by the package that they
are from. The BERT is small, of two layers; before, it has learned in FP32 to fill in words that are left out of the texts that it is to
learn from. Clusters, ways of training and steps a second are those of table4.py, the latter of two layers of BERT-base's width. Accuracy is
that of training on a CPU, where FP16 is BF16: the mean over seeds, and its deviation.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qsync_fx import Plan
from qsync_fx.predictor.memory import ADAM
from qsync_fx.profiler.progress import progress

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paper.support.devices import looked, trained
from benchmarks.paper.support.experiment import LOOKED, OPTIONS, Experiment
from benchmarks.paper.support.pair import Inputs, Pair
from benchmarks.paper.support.text import (
    FEW,
    FILES,
    LENGTH,
    MASK,
    PACKAGES,
    PADDING,
    SPECIAL,
    Texts,
    load,
)
from benchmarks.paper.table4 import rows
from benchmarks.support.harness import arguments, show


@dataclass(frozen=True)
class Size:
    """How much is trained.

    Attributes:
        before, epochs: over the texts, to fill in words and then to tell packages apart.
        together: texts of a step before.
        batch: texts of a rank in a step, where both have as many.
        rate_before, rate: of learning, the second for two ranks with `batch` texts each.
        each: texts of a package.
    """

    before: int = 10
    epochs: int = 3
    together: int = 64
    batch: int = 32
    rate_before: float = 2e-3
    rate: float = 8e-4
    each: int = 1400


QUICK = Size(before=1, epochs=1, each=40)
NARROW, WIDE = (64, 2), (768, 12)
"""Widths and heads of what is trained, and of what is planned for: BERT-base's."""


class Classifier(nn.Module):
    """BERT with a head for packages, and one for words that are left out."""

    def __init__(self, words: int, shape: tuple[int, int] = NARROW) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        width, heads = shape

        sizes: dict[str, Any] = {
            "vocab_size": words,
            "hidden_size": width,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "intermediate_size": 4 * width,
            "max_position_embeddings": LENGTH,
            "pad_token_id": PADDING,
        }
        self.bert = BertModel(BertConfig(**sizes), add_pooling_layer=False)
        self.word, self.head = nn.Linear(width, words), nn.Linear(width, len(PACKAGES))

    def encoded(self, texts: Tensor) -> Tensor:
        found: Tensor = self.bert(
            input_ids=texts, attention_mask=(texts != PADDING).long()
        ).last_hidden_state
        return found

    def forward(self, texts: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoded(texts)[:, 0])
        return logits


def loss(model: Any, part: Inputs) -> Tensor:
    return F.cross_entropy(model(part[0]), part[1])


def shuffled(texts: Texts, batch: int, seed: int) -> Iterator[Inputs]:
    order = torch.randperm(len(texts.train[1]), generator=torch.Generator().manual_seed(seed))
    for chosen in torch.split(order, batch):
        if len(chosen) == batch:
            yield texts.train[0][chosen], texts.train[1][chosen]


def trained_before(texts: Texts, size: Size) -> Classifier:
    """Returns the model after it has learned to fill in words: the same weights each time."""
    torch.manual_seed(0)
    model = Classifier(texts.words)
    optimizer = torch.optim.AdamW(model.parameters(), size.rate_before)
    with progress("training on words", size.before) as advance:
        for epoch in range(size.before):
            for given, _ in shuffled(texts, min(size.together, len(texts.train[1])), epoch):
                hidden = (torch.rand(given.shape) < 0.15) & (given >= SPECIAL)
                guessed = model.word(model.encoded(given.masked_fill(hidden, MASK))[hidden])
                F.cross_entropy(guessed, given[hidden]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            advance(f"epoch {epoch + 1}")
    return model


class Tuner:
    """Fine-tunes a model under a plan of the T4 beside a V100 in FP32, seed after seed; it is compiled once."""

    def __init__(
        self, model: Classifier, texts: Texts, plan: Plan, batches: Sequence[int], size: Size
    ) -> None:
        torch._dynamo.reset()
        self.model, self.texts, self.batches, self.size = model, texts, batches, size
        self.pair = Pair(copy.deepcopy(model), (Plan.uniform("fp32"), plan), loss)

    def accuracy(self, seed: int, advance: Callable[[], None] = lambda: None) -> float:
        """Returns the share of test texts that are right, in FP32."""
        torch.manual_seed(seed)
        fresh = copy.deepcopy(self.model)
        nn.init.normal_(fresh.head.weight, std=0.02)
        self.pair.restart(fresh)
        own, size = self.pair.model.train(), self.size
        optimizer = torch.optim.AdamW(
            own.parameters(), size.rate * sum(self.batches) / (2 * size.batch)
        )
        # To nothing, as BERT's authors have it: what is left at the end is less by chance.
        steps = size.epochs * (len(self.texts.train[1]) // sum(self.batches))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, max(1, steps))
        for epoch in range(size.epochs):
            for texts, labels in shuffled(self.texts, sum(self.batches), 100 * seed + epoch):
                parts = zip(
                    torch.split(texts, list(self.batches)),
                    torch.split(labels, list(self.batches)),
                    strict=True,
                )
                self.pair.backward(list(parts))
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            advance()
        own.eval()
        with torch.no_grad():
            return float((own(self.texts.test[0]).argmax(1) == self.texts.test[1]).float().mean())


def main() -> None:
    options = arguments(
        __doc__, None, **{name: more for name, more in OPTIONS.items() if name != "only"}
    )
    size = QUICK if options.quick else Size()
    texts = load(size.each, FEW if options.quick else FILES)
    experiment = Experiment(options, "text", size.epochs, texts=texts.name)
    model = trained_before(texts, size)
    steps = 1 if experiment.quick else LOOKED
    parts = [part for part, _ in zip(shuffled(texts, size.batch, 0), range(steps), strict=False)]
    wide = Classifier(texts.words, WIDE)
    known = looked(copy.deepcopy(model), wide, loss, parts, [parts[0][0][:2]], ("second_order",))

    def train(what: str, plan: Mapping[str, str], batches: Sequence[int]) -> Mapping[str, Any]:
        low = trained(plan)
        settings = {
            "texts": texts.name,
            "size": asdict(size),
            "batches": list(batches),
            "plan": low.to_json(),
        }
        return experiment.accuracy(what, settings, lambda: Tuner(model, texts, low, batches, size))

    for row in rows(known, size.batch, train, ADAM):
        experiment.add({"network": "BERT, 2 layers", **row})
    show(experiment.rows)


if __name__ == "__main__":
    main()
