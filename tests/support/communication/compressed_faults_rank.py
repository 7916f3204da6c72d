"""Rank process of the fault tests of compressed gradients, started by tests/communication."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

import torch

import qsync_fx
from qsync_fx.communication import aqgb, collective, point_to_point
from qsync_fx.communication.message_header import HEADER
from qsync_fx.distributed import compress, guard
from tests.support.communication import compressed_training, sharded_training
from tests.support.communication.compressed_training import parallel, said, sgd, train
from tests.support.processes import ranks


def faults(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Corrupt a message to rank 0 or kill rank 1, and return the error."""
    model = parallel()
    handle, optimizer, fault = (
        compress(model, job.get("codec", "qsgd8"), check_every=1),
        sgd(model),
        job["how"],
    )
    list(train(model, optimizer, range(2)))

    def harm(message: torch.Tensor, about: str) -> None:
        if rank == 0 and "bucket 1" in about and fault in ("magic", "length", "late"):
            message[{"magic": 0, "length": 24, "late": 16}[fault]] ^= 5
        if rank == 0 and "bucket 1" in about and fault == "payload":
            message[60:90] ^= 5

    class Harmed(point_to_point.PendingTransfers):
        """Transfers that corrupt messages 0 and 1 of rank 1 (AQGB: header, payload) on receipt."""

        def __init__(self, group: Any, about: str) -> None:
            super().__init__(group, about)
            self.first: dict[tuple[int, int], torch.Tensor] = {}

        def expect(self, rank: int, message: torch.Tensor, number: int = 0) -> None:
            super().expect(rank, message, number)
            if (rank, number) in ((1, 0), (1, 1)):
                self.first[rank, number] = message

        def wait_received(self, rank: int, number: int = 0) -> None:
            super().wait_received(rank, number)
            if (rank, number) in self.first:
                harm(self.first[rank, number], self._about)

    corrupt_collectives(rank, world, fault)
    aqgb.PendingTransfers = point_to_point.PendingTransfers = Harmed
    if fault == "kill" and rank == 1:
        model.module.first.weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    try:
        list(train(model, optimizer, range(2, 4)))
    except qsync_fx.RankError as error:
        with contextlib.suppress(qsync_fx.RankError):
            handle.wait()
        return said(error)
    return {}


def corrupt_collectives(rank: int, world: int, fault: str) -> None:
    """Corrupt on rank 0 the received bucket 1 of rank 1, or its header at the end of a step."""
    sound = collective.exchange
    row = 1 if world == 2 else 2  # two exchanges per bucket with more ranks

    def harmed(group: Any, outgoing: Any, incoming: Any, about: str) -> None:
        sound(group, outgoing, incoming, about)
        if rank == 0 and fault in ("magic", "length", "late"):
            incoming[1].view(-1, HEADER)[row, {"magic": 0, "length": 24, "late": 16}[fault]] ^= 5

    class Harmed(collective.CollectiveTransfer):
        def wait(self, member: int, number: int) -> str | None:
            result = super().wait(member, number)
            is_harmed = (rank, member, number, fault) == (0, 1, 0, "payload")
            if is_harmed and "bucket 1" in self._about:
                self.incoming[1][0][24:54] ^= 5
            return result

    collective.exchange, collective.CollectiveTransfer = harmed, Harmed  # type: ignore[misc]


def guarded(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Fail on the last rank after two guarded steps, while the others wait for its gradients."""
    codec, last = job["codec"], rank == world - 1
    module: Any = sharded_training if job.get("fsdp") else compressed_training
    model = module.model() if job.get("fsdp") else parallel()
    optimizer = sgd(model)
    compress(model, codec, **({"optimizer": optimizer} if codec.startswith("duo") else {}))
    try:
        with guard(model):
            list(module.train(model, optimizer, range(2)) or ())
            if last and job["how"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if last:
                raise ValueError("this batch is broken")
            list(module.train(model, optimizer, range(2, 5)) or ())
    except qsync_fx.RankError as error:
        return said(error)
    return {}


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:])
