"""Rank process of the tests of delayed gradients in DUO, started by tests/communication."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qsync_fx.communication.duo.sign_codecs import Duo, ZeroBit
from qsync_fx.distributed import compress
from tests.support.processes import ranks

WORDS, WIDTH, LENGTH = 64, 32, 8
LAGS, BEGIN = 26, 80


def compressed(model: nn.Module, method: str, optimizer: torch.optim.Optimizer) -> Any:
    if method == "fp32":
        return None
    duo = Duo(ZeroBit(), ahead=False) if method == "stays" else method
    return compress(model, duo, optimizer=optimizer)


def stability(rank: int, world: int, job: dict[str, Any]) -> list[bool]:
    """Return for each method and learning rate whether SGD with momentum converges on a quadratic.

    The curvature is 1, so the learning rate equals its product with the curvature.
    """
    converges = []
    for method, rate in job["ways"]:
        layer = nn.Linear(8, 1, bias=False)
        nn.init.ones_(layer.weight)
        model = DistributedDataParallel(layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=job["momentum"])
        handle = compressed(model, method, optimizer)
        norms = []
        for _ in range(job["steps"]):
            optimizer.zero_grad()
            # The gradient of each rank is the parameter itself.
            (model(torch.eye(8)).square().sum() / 2).backward()
            optimizer.step()
            norms.append(float(layer.weight.norm()))
        if handle is not None:
            handle.flush()
        middle, period = len(norms) // 2, 40
        last = max(norms[-period:])
        converges.append(last < 1e-6 or last < max(norms[middle : middle + period]))
    return converges


class Gpt(nn.Module):
    """Causal language model of one block: [texts, words], int64, to [texts, words, WORDS]."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.place = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, texts: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(texts.shape[1])
        states = self.block(self.word(texts) + self.place, src_mask=mask, is_causal=True)
        result: Tensor = self.head(states)
        return result


def texts(n: int = 64) -> Tensor:
    """Return `n` texts of LENGTH + 1 words from a random Markov chain."""
    generator = torch.Generator().manual_seed(0)
    chances = torch.softmax(2 * torch.randn(WORDS, WORDS, generator=generator), 1)
    words = [torch.randint(0, WORDS, (n,), generator=generator)]
    for _ in range(LENGTH):
        words.append(torch.multinomial(chances[words[-1]], 1, generator=generator)[:, 0])
    return torch.stack(words, 1)


def oscillation(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train a GPT on the same texts in each step, and correlate the FP32 mean gradients.

    Return for each method the mean cosine of gradients by lag in steps, and the final mean loss.
    """
    results = {}
    rows = torch.chunk(texts(), world)[rank]
    for method in ("fp32", "duo0", "stays"):
        torch.manual_seed(0)
        model = DistributedDataParallel(Gpt())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        handle = compressed(model, method, optimizer)
        history, cosines, losses = deque[Tensor](maxlen=LAGS), [], []
        for _ in range(200):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            gradients = {index: p.grad for index, p in enumerate(model.parameters())}
            optimizer.step()
            losses.append(loss.item())
            if handle is not None:
                handle.wait()  # until the means in FP32 are complete
                gradients = handle._steps.pending.gradients
            flat = torch.cat([gradients[index].flatten() for index in sorted(gradients)])
            history.appendleft(flat / flat.norm())
            if len(losses) > BEGIN:
                cosines.append(torch.stack(list(history)) @ history[0])
        if handle is not None:
            handle.flush()
        results[method] = {
            "cosines": torch.stack(cosines).mean(0).tolist(),
            "loss": sum(losses[-20:]) / 20,
        }
    return results


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:], meet=lambda name: True)
