"""All-reduces between ranks: measured on two of them."""

from __future__ import annotations

import json
from pathlib import Path

import tiers
import torch.multiprocessing as mp
from torch import distributed

from qsync_fx.profiling.measuring.collectives import collectives


def test_alone_there_is_nothing_to_measure() -> None:
    assert collectives() == []


def rank(at: int, file: str, out: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=at, world_size=2)
    (found,) = collectives()
    Path(f"{out}.{at}").write_text(json.dumps([found.seconds, found.busy]))
    assert (found.backend, found.ranks) == ("gloo", 2)
    distributed.destroy_process_group()


@tiers.ALL
def test_every_rank_has_the_same_times(tmp_path: Path) -> None:
    mp.spawn(rank, (str(tmp_path / "rendezvous"), str(tmp_path / "out")), nprocs=2)
    texts = [(tmp_path / f"out.{at}").read_text() for at in (0, 1)]
    assert texts[0] == texts[1]
    measured, busy = json.loads(texts[0])
    assert len(measured) == 9 and all(seconds > 0 for _, seconds in measured)
    assert 0 <= busy <= 1
