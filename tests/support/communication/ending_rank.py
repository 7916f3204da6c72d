"""Rank process that exits like a user's script, started by tests/communication."""

from __future__ import annotations

import sys
import threading

import torch
from torch import distributed

from qsync_fx.distributed import compress, guard
from tests.support.communication.compressed_training import parallel, sgd, train
from tests.support.processes import ranks


def main() -> None:
    torch.set_num_threads(1)
    rank, _, folder, job = ranks.join(sys.argv[1:])
    model = parallel()
    optimizer = sgd(model)
    if job["codec"].startswith("duo"):
        compress(model, job["codec"], optimizer=optimizer)
    else:
        compress(model, job["codec"])
    if job["ending"] == "in a guard":
        guard(model).__enter__()
    list(train(model, optimizer, range(6)))
    ranks.write(folder, rank, sorted(thread.name for thread in threading.enumerate()))
    match job["ending"]:
        case "exception":
            raise ValueError("an error of the user's script")
        case "interrupt":
            raise KeyboardInterrupt
        case "one fails" if rank:
            raise ValueError("an error of the user's script")
        case "destroy":
            distributed.destroy_process_group()
    # Threads that wait for the GIL acquire it only if the main thread releases it.
    sys.setswitchinterval(60)


main()
