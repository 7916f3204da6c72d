"""QSync's Table VI: accuracy and throughput of fine-tuning a pretrained BERT.
The texts are docstrings of installed packages, to be classified by package. The BERT has two layers
of width 256 and is pretrained in FP32 by masked language modeling on the training texts. Clusters,
training methods and columns are as in table4.py. The planned network is the one that is trained:
with the catalog's times, its T4 in FP16 waits for a V100 in FP32. "accuracy" is the mean over seeds
of training on a CPU, with BF16 for FP16, and "deviation" its standard deviation.
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
from qsync_fx.progress import progress

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paper.support.devices import analyze, trained
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
from benchmarks.support.harness import arguments, by_size, show


@dataclass(frozen=True)
class Size:
    """Size of the trainings.

    Attributes:
        shape: width and heads of the network.
        before, epochs: epochs of pretraining and of fine-tuning.
        together: texts per step of pretraining.
        batch: texts per rank and step of fine-tuning, if both ranks have equal batches.
        rate_before, rate: learning rates; the second is for two ranks with `batch` texts each.
        each: texts per package.
    """

    shape: tuple[int, int] = (256, 4)
    before: int = 10
    epochs: int = 3
    together: int = 64
    batch: int = 64
    rate_before: float = 5e-4
    rate: float = 2e-4
    each: int = 1400


QUICK = Size(before=1, epochs=1, each=40)


class Classifier(nn.Module):
    """BERT with a classification head and a masked-word head."""

    def __init__(self, words: int, shape: tuple[int, int]) -> None:
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
        result: Tensor = self.bert(
            input_ids=texts, attention_mask=(texts != PADDING).long()
        ).last_hidden_state
        return result

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
    """Return the pretrained model; its weights are reproducible."""
    torch.manual_seed(0)
    model = Classifier(texts.words, size.shape)
    optimizer = torch.optim.AdamW(model.parameters(), size.rate_before)
    with progress("training on words", size.before) as advance:
        for epoch in range(size.before):
            for batch, _ in shuffled(texts, min(size.together, len(texts.train[1])), epoch):
                hidden = (torch.rand(batch.shape) < 0.15) & (batch >= SPECIAL)
                guessed = model.word(model.encoded(batch.masked_fill(hidden, MASK))[hidden])
                F.cross_entropy(guessed, batch[hidden]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            advance(f"epoch {epoch + 1}")
    return model


class Tuner:
    """Fine-tuning on a T4 with a plan and a V100 in FP32; compiles once for all seeds."""

    def __init__(
        self, model: Classifier, texts: Texts, plan: Plan, batches: Sequence[int], size: Size
    ) -> None:
        torch._dynamo.reset()
        self.model, self.texts, self.batches, self.size = model, texts, batches, size
        self.pair = Pair(copy.deepcopy(model), (Plan.uniform("fp32"), plan), loss)

    def accuracy(self, seed: int, advance: Callable[[], None] = lambda: None) -> float:
        """Fine-tune with a seed, and return the test accuracy in FP32."""
        torch.manual_seed(seed)
        fresh = copy.deepcopy(self.model)
        nn.init.normal_(fresh.head.weight, std=0.02)
        self.pair.restart(fresh)
        module, size = self.pair.model.train(), self.size
        optimizer = torch.optim.AdamW(
            module.parameters(), size.rate * sum(self.batches) / (2 * size.batch)
        )
        # Linear decay to zero, as in BERT, makes the final accuracy less noisy.
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
        module.eval()
        with torch.no_grad():
            return float(
                (module(self.texts.test[0]).argmax(1) == self.texts.test[1]).float().mean()
            )


def main() -> None:
    options = arguments(
        __doc__, None, **{name: more for name, more in OPTIONS.items() if name != "only"}
    )
    size = by_size(options.quick, QUICK, Size())
    texts = load(size.each, by_size(options.quick, FEW, FILES))
    experiment = Experiment(options, "text", size.epochs, texts=texts.name)
    model = trained_before(texts, size)
    steps = by_size(experiment.quick, 1, LOOKED)
    parts = [part for part, _ in zip(shuffled(texts, size.batch, 0), range(steps), strict=False)]
    planned = Classifier(texts.words, size.shape)
    analyzed = analyze(
        copy.deepcopy(model), planned, loss, parts, [parts[0][0][:2]], ("second_order",)
    )

    def train(label: str, plan: Mapping[str, str], batches: Sequence[int]) -> Mapping[str, Any]:
        low = trained(plan)
        settings = {
            "texts": texts.name,
            "size": asdict(size),
            "batches": list(batches),
            "plan": low.to_json(),
        }
        return experiment.accuracy(label, settings, lambda: Tuner(model, texts, low, batches, size))

    for row in rows(analyzed, size.batch, train, ADAM):
        experiment.add({"network": "BERT, 2 layers", "size": described(size), **row})
    show(experiment.rows)


def described(size: Size) -> str:
    """Return the size of the trainings as text."""
    return (
        f"width {size.shape[0]}, {size.each:,} texts of each of {len(PACKAGES)} packages, "
        f"{size.before} epochs before and {size.epochs} of fine-tuning"
    )


if __name__ == "__main__":
    main()
