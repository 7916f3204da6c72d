"""Rank process of the AQGB tests, started by tests/communication."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from qsync_fx.communication import aqgb
from qsync_fx.communication.codecs.truncation import Adaptive, Truncated
from qsync_fx.distributed import check_replicas, compress
from tests.support.communication.compressed_training import parallel, sgd, train, weights
from tests.support.processes import ranks


class Clock:
    """Simulated clock that advances by `gap` seconds per call; the link sends `rate` bytes/s."""

    def __init__(self, gap: float, rate: float) -> None:
        self.gap, self.rate, self.now, self.link = gap, rate, 0.0, 0.0
        clock, sent = self, aqgb.PendingTransfers

        class Timed(sent):  # type: ignore[misc, valid-type]
            """Transfers that add the time of a segment on the link to its last receive."""

            def __init__(self, group: Any, about: str) -> None:
                super().__init__(group, about)
                self.sizes: dict[int, tuple[list[int], list[int]]] = {}

            def expect(self, rank: int, message: torch.Tensor, number: int = 0) -> None:
                super().expect(rank, message, number)
                self.sizes.setdefault(number, ([], []))[0].append(message.numel())

            def send(self, rank: int, message: torch.Tensor, number: int = 0) -> None:
                super().send(rank, message, number)
                self.sizes[number][1].append(message.numel())

            def wait_received(self, rank: int, number: int = 0) -> None:
                super().wait_received(rank, number)
                theirs, mine = self.sizes[number]
                if number % 2 and not any(tag == number for _, tag in self._coming):  # a payload
                    clock.link += max(mine[0], sum(theirs) / len(theirs)) / clock.rate

        aqgb.PendingTransfers = Timed

    def __call__(self) -> float:
        if threading.current_thread().name == "qsync communication":
            return self.link
        self.now += self.gap
        return self.now


def adapting(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train with AQGB over sockets and simulated links of different bandwidth per rank."""
    codec = Adaptive(feedback=job["feedback"], segment=2**14)
    model = parallel()
    handle, optimizer = compress(model, codec, check_every=100), sgd(model)
    handle.controller.clock = Clock(gap=1.0, rate=job["rates"][rank])
    for parameter in model.parameters():
        # Wait for earlier messages, so that decisions do not depend on thread scheduling.
        parameter.register_hook(lambda gradient: handle._worker.wait())
    list(train(model, optimizer, range(6)))
    check_replicas(model)
    tally = handle.report().tally
    saved = handle.state_dict()
    again = compress(parallel(), codec)
    again.load_state_dict(saved)
    return {
        "weights": weights(model),
        "entries": [
            (entry.step, entry.size, entry.gap, entry.ratio) for entry in handle.decisions()
        ],
        "wire": tally.wire,
        "theory": tally.theory,
        "raw": tally.raw,
        "buckets": tally.buckets,
        "variance": handle.report().variance,
        "checks": tally.checks,
        "printed": str(handle.report()),
        "sent": sorted(saved["sent"]),
        "learnt": again.state_dict()["control"] == saved["control"],
    }


def feedback(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the error of 20 summed constant gradients with and without error feedback."""
    errors = {}
    values = torch.randn(3000, generator=torch.Generator().manual_seed(rank))
    mean = torch.stack(
        [torch.randn(3000, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    ).mean(0)
    for name, codec in (
        ("without", Truncated(12)),
        ("with", Truncated(12, feedback=True)),
        ("adaptive", Adaptive(feedback=True, segment=2**12)),
    ):
        model = nn.Linear(3000, 1, bias=False)
        nn.init.zeros_(model.weight)
        ddp = DistributedDataParallel(model)
        handle = compress(ddp, codec)
        if handle.controller is not None:
            handle.controller.clock = Clock(gap=1.0, rate=5000.0)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        for _ in range(20):
            optimizer.zero_grad()
            ddp(values).sum().backward()
            optimizer.step()
        check_replicas(ddp)
        left = handle.state_dict()["sent"].get("weight", torch.zeros(3000))
        distributed.all_reduce(left)
        total = -model.weight.detach().view(-1)
        errors[name] = {
            "lost": float((20 * mean - total).abs().max()),
            "unexplained": float((20 * mean - total - left / world).abs().max()),
            "bits": sorted(handle.controller.adapted().levels)
            if handle.controller is not None
            else [12],
        }
    return errors


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:], meet=lambda name: True)
