"""Measured all-reduces between ranks, and the communication overhead of training steps."""

from __future__ import annotations

import itertools
import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, strategies as st
from torch import distributed, nn

import qsync_fx
from qsync_fx.communication.allreduce import NodeGroups
from qsync_fx.distributed.drift import Hysteresis, LinkProbe, ProbedLinks
from qsync_fx.profiler.links.collective_times import buffers_seconds, collectives, rising
from qsync_fx.profiler.links.exchange_times import exchanges
from tests.support import tiers


def test_single_rank_measures_no_collective() -> None:
    assert collectives() == []


def rank(index: int, file: str, out: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=index, world_size=2)
    (measured,) = collectives()
    sent = exchanges()
    assert [(item.transport, item.group, item.ranks) for item in sent] == [
        ("point_to_point", "all", 2),
        ("collective", "all", 2),
    ]
    norm = nn.BatchNorm1d(64)
    norm.running_mean.fill_(index)  # type: ignore[union-attr]
    buffers = buffers_seconds(norm), buffers_seconds(nn.Linear(4, 4))
    assert all(norm.running_mean == index), "buffers are sent as copies"  # type: ignore[arg-type]
    tables = [measured.seconds, *(item.seconds for item in sent)]
    Path(f"{out}.{index}").write_text(json.dumps([tables, buffers]))
    assert (measured.backend, measured.ranks) == ("gloo", 2)
    distributed.destroy_process_group()


@tiers.ALL
def test_every_rank_has_the_same_times(tmp_path: Path) -> None:
    mp.spawn(rank, (str(tmp_path / "rendezvous"), str(tmp_path / "out")), nprocs=2)
    texts = [(tmp_path / f"out.{index}").read_text() for index in (0, 1)]
    assert texts[0] == texts[1]
    tables, (norm, none) = json.loads(texts[0])
    assert norm > 0 and none == 0
    assert [len(table) for table in tables] == [9, 8, 8]
    for table in tables:
        assert all(seconds > 0 for _, seconds in table)
    for _, *sent in tables[1:]:
        assert sent[-1][1] > sent[0][1], "16 MiB take longer than 4 KiB"


def grouped_rank(index: int, file: str, out: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=index, world_size=4)
    measured = exchanges(groups={"inside": [(0, 1), (2, 3)], "between": [(0, 2), (1, 3)]})
    (some,) = exchanges(transports=["collective"], largest=2**12)
    assert [nbytes for nbytes, _ in some.seconds] == [2**10, 2**12]
    links = ProbedLinks(LinkProbe(2**12, 1.0).notes(), Hysteresis())
    times = links.times(NodeGroups(((0, 1), (2, 3))))
    assert times is not None and [item.group for item in times.exchanges] == [
        "all",
        "inside",
        "between",
    ]
    assert {item.transport for item in times.exchanges} == {"point_to_point"}
    assert all(item.seconds[-1][0] == 2**12 for item in times.exchanges)
    Path(f"{out}.{index}").write_text(json.dumps([asdict(item) for item in measured]))
    distributed.destroy_process_group()


@tiers.ALL
def test_nodes_exchange_inside_and_between_them(tmp_path: Path) -> None:
    mp.spawn(grouped_rank, (str(tmp_path / "rendezvous"), str(tmp_path / "out")), nprocs=4)
    texts = [(tmp_path / f"out.{index}").read_text() for index in range(4)]
    assert len({*texts}) == 1
    measured = json.loads(texts[0])
    assert [(item["transport"], item["group"], item["ranks"]) for item in measured] == [
        (transport, group, 2)
        for transport in ("point_to_point", "collective")
        for group in ("inside", "between")
    ]


class Told(nn.Sequential):
    """A model with a method that the DDP wrapper lacks."""

    def told(self) -> float:
        return 0.5


def plain_step(model: Any, batch: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(batch).square().mean()
    return result


def told_step(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return plain_step(model, batch) * model.told()


def measuring_rank(index: int, file: str, out: str, reads_attribute: bool) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=index, world_size=2)
    if not reads_attribute:
        warnings.filterwarnings("error", message="no step could be trained")
    torch.manual_seed(index)
    model = Told(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    batch = torch.randn(16, 64)
    arguments: dict[str, Any] = {"repeats": 1, "sensitivity": None, "progress": False}
    profile = qsync_fx.measure(
        model, told_step if reads_attribute else plain_step, [batch], ["fp32"], **arguments
    )
    (collective,) = profile.collectives
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    if index == 0:
        # The DDP wrapper is removed, so that one rank can train without the other.
        plain_step(model, batch).backward()  # type: ignore[no-untyped-call]
    distributed.barrier()
    assert reads_attribute or collective.copies is not None
    assert {item.transport for item in collective.exchanges} == {"point_to_point", "collective"}
    Path(f"{out}.{index}").write_text(json.dumps([collective.seconds, collective.busy]))
    distributed.destroy_process_group()


@tiers.ALL
def test_measurement_finds_the_communication_overhead_of_steps(tmp_path: Path) -> None:
    mp.spawn(measuring_rank, (str(tmp_path / "rendezvous"), str(tmp_path / "out"), False), nprocs=2)
    texts = [(tmp_path / f"out.{index}").read_text() for index in (0, 1)]
    assert texts[0] == texts[1]
    assert 0 <= json.loads(texts[0])[1] <= 4


@tiers.ALL
def test_step_reading_model_attributes_is_measured_without_ddp(
    tmp_path: Path,
) -> None:
    mp.spawn(measuring_rank, (str(tmp_path / "rendezvous"), str(tmp_path / "out"), True), nprocs=2)
    assert json.loads((tmp_path / "out.0").read_text())[1] == 1


@given(st.lists(st.floats(1e-6, 1.0), max_size=12))
def test_a_table_rises_and_has_the_sum_that_was_measured(seconds: list[float]) -> None:
    table = [(2**power, duration) for power, duration in enumerate(seconds)]
    result = [duration for _, duration in rising(table)]
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(result))
    assert sum(result) == pytest.approx(sum(seconds))
    if seconds == sorted(seconds):
        assert result == pytest.approx(seconds)


def test_occasional_delays_count_for_all_sizes() -> None:
    result = rising([(1, 0.4), (2, 3.0), (4, 2.8), (8, 0.5), (16, 0.7), (32, 2.0), (64, 9.0)])
    assert [duration for _, duration in result] == pytest.approx(
        [0.4, 1.75, 1.75, 1.75, 1.75, 2.0, 9.0]
    )
