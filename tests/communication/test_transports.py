"""Both transports send the same values: processes over gloo, and tensors on the meta device."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from qsync_fx.communication.allreduce import Reducer
from qsync_fx.communication.bucket import Bucket, piece
from qsync_fx.communication.codecs import NAMES, codec_named
from qsync_fx.communication.compressor_state import CompressorState
from qsync_fx.communication.duo.sign_codecs import DUOS
from qsync_fx.communication.message_header import HEADER
from qsync_fx.communication.transport import COLLECTIVE, POINT_TO_POINT
from qsync_fx.predictor.replayer.cluster import TRANSPORTS
from tests.support import tiers
from tests.support.processes import ranks

FIXED = [name for name in NAMES if not name.startswith("aqgb")]
FAULTS = "compressed_faults_rank.py"


def of_both(part: str, world: int, folder: Path, **job: Any) -> list[list[Any]]:
    """Return the results of all ranks with each transport."""
    settings = job.pop("compress", {})
    return [
        ranks.results(part, world, folder / name, compress={"transport": name, **settings}, **job)
        for name in TRANSPORTS
    ]


compressed = functools.partial(of_both, script="compressed_rank.py")


@pytest.mark.parametrize(
    ("world", "codecs"),
    tiers.chosen(
        [(2, ["qsgd8", "1bit*"])],
        [(2, FIXED), (3, FIXED), (4, ["qsgd4", "1bit", "fp16"])],
    ),
)
def test_both_transports_train_the_same_replicas(
    world: int, codecs: list[str], tmp_path: Path
) -> None:
    pairwise, collective = compressed("codecs", world, tmp_path, codecs=codecs)
    for name in codecs:
        expected = pairwise[0][name]
        for rank in (*pairwise, *collective):
            assert rank[name]["weights"] == expected["weights"], name
            assert rank[name]["checks"] == 3
        for sender, receiver in zip(pairwise, collective, strict=True):
            headers = HEADER * (world - 1) * (1 if world == 2 else 2) * expected["buckets"]
            sent = sender[name]["wire"] - headers
            # All-gathers pad to the largest shard: up to a unit of each parameter.
            assert sent <= receiver[name]["wire"] <= 2 * sent, name
            if world == 2:  # an all-gather of one message needs no padding
                assert sent == receiver[name]["wire"]
        assert "seconds, point to point over gloo: encode" in expected["printed"]
        assert "seconds, collectives of gloo on cpu: encode" in collective[0][name]["printed"]


@tiers.one_in(2)
@tiers.ALL
@pytest.mark.parametrize("world", [2, 3])
def test_any_size_bucket_and_chunk_gives_the_same_values(world: int, tmp_path: Path) -> None:
    codecs = ["fp32", "fp16", "qsgd2", "qsgd16", "1bit*", "1bit"]
    pairwise, collective = compressed("sizes", world, tmp_path, codecs=codecs)
    assert collective == pairwise
    pairwise, collective = compressed("buckets", world, tmp_path)
    assert collective == pairwise


@tiers.ALL
def test_training_settings_give_the_same_values(tmp_path: Path) -> None:
    """The settings are accumulation, join, loss scaling, unused parameters and BF16."""
    pairwise, collective = compressed("cases", 2, tmp_path)
    assert collective == pairwise


@tiers.ALL
@pytest.mark.parametrize("world", [2, 3])
def test_sharded_models_get_the_same_gradients(world: int, tmp_path: Path) -> None:
    pairwise, collective = of_both(
        "resumed", world, tmp_path, script="sharded_rank.py", where=str(tmp_path)
    )
    assert collective == pairwise


@tiers.ALL
@pytest.mark.parametrize("world", [4, pytest.param(6, marks=tiers.EVERY)])
def test_nodes_send_the_same_values(world: int, tmp_path: Path) -> None:
    job = {"size": 2, "codecs": ["fp32", "1bit*", "qsgd4"]}
    pairwise, collective = of_both("codecs", world, tmp_path, script="hierarchy_rank.py", **job)
    for expected, result in zip(pairwise, collective, strict=True):
        for name in job["codecs"]:
            assert result[name]["weights"] == expected[name]["weights"], name
            assert result[name]["equal"] == expected[name]["equal"], name


@tiers.ALL
def test_duo_takes_the_same_steps(tmp_path: Path) -> None:
    pairwise, collective = of_both("transitions", 2, tmp_path, script="duo_rank.py")
    assert collective == pairwise
    for transport in (pairwise, collective):
        assert transport[0] == transport[1]
    pairwise, collective = compressed(
        "elsewhere", 2, tmp_path, codecs=["duo0", "duo1", "duo4"], buckets=0.02
    )
    assert [rank["duo4"]["kernels"] for rank in collective] == [
        rank["duo4"]["kernels"] for rank in pairwise
    ]
    for rank in collective:
        assert all(result["kernels"] == result["operators"] for result in rank.values())


@tiers.ALL
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("damage", ["magic", "length", "late", "payload"])
def test_corrupt_message_is_an_error_on_all_ranks(damage: str, world: int, tmp_path: Path) -> None:
    reason = "rank 0 cannot read the message of rank 1 for bucket 1 of step 2: its"
    if damage == "magic":
        reason = reason.removesuffix("its") + "it begins with"
    if damage == "payload":
        reason = "they must be bit-identical"
    job = {"script": FAULTS, "how": damage, "compress": {"transport": COLLECTIVE}}
    for result in ranks.results("faults", world, tmp_path, **job):
        assert result["kind"] == "RankError"
        assert reason in result["text"]


@tiers.ALL
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_is_killed_is_an_error_on_all_others(world: int, tmp_path: Path) -> None:
    ended = ranks.run(
        FAULTS,
        world,
        tmp_path,
        name="faults",
        how="kill",
        limit=30,
        compress={"transport": COLLECTIVE},
    )
    assert ended[1].code == -signal.SIGKILL
    others = [ended[rank] for rank in (0, *range(2, world))]
    for rank in others:
        assert rank.code == 0, rank.log
        assert rank.result["kind"] == "RankError"
        assert "no longer responds" in rank.result["text"]
    # A rank may name another rank that has ended because that rank detected the killed rank first.
    assert any("rank 1 no longer responds" in rank.result["text"] for rank in others)


def test_transport_follows_backend_and_codecs(tmp_path: Path) -> None:
    (result,) = ranks.results("choices", 1, tmp_path, script="transport_rank.py")
    assert result["gloo"] == [POINT_TO_POINT, POINT_TO_POINT, COLLECTIVE]
    assert result["device"] == [COLLECTIVE, POINT_TO_POINT, COLLECTIVE]
    assert result["aqgb"] == [POINT_TO_POINT, POINT_TO_POINT]
    assert "aqgb is encoded in host memory" in result["aqgb on device"]["text"]
    assert "no backend with collectives of bytes on cuda" in result["gloo on cuda"]["text"]
    assert "unknown transport 'colective'" in result["unknown"]["text"]
    assert "did you mean 'collective'?" in result["unknown"]["text"]


def test_ranks_agree_on_a_transport(tmp_path: Path) -> None:
    for result in ranks.results("agreement", 2, tmp_path, script="transport_rank.py"):
        assert "rank 1 has another transport than rank 0" in result["differ"]["text"]
        assert result["auto"] == [POINT_TO_POINT] * 3


class DeviceGroup(distributed.ProcessGroup):
    """Process group for tensors of the meta device, which rejects all others.

    No host can read a tensor of the meta device, so code that leaves the device fails.
    """

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.calls: list[str] = []

    def alltoall_base(
        self, output: Tensor, source: Tensor, received: Any, sent: Any, opts: Any = None
    ) -> distributed.Work:
        assert (sum(received), sum(sent)) == (output.numel(), source.numel())
        return self._called("all-to-all", output, source)

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> distributed.Work:
        assert output.numel() == self.size() * source.numel()
        return self._called("all-gather", output, source)

    all_gather_single = _allgather_base  # the name since torch 2.13

    def _called(self, name: str, *tensors: Tensor) -> distributed.Work:
        assert {tensor.device.type for tensor in tensors} == {"meta"}
        self.calls.append(name)
        return _Done()


class _Done(distributed.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


@tiers.one_in(3)
@pytest.mark.parametrize(("rank", "world"), [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)])
def test_collectives_leave_nothing_on_the_host(rank: int, world: int) -> None:
    """The reducer has no group on the CPU, which only the end of a step uses."""
    meta, shapes = torch.device("meta"), ((40, 300), (129,), (7, 5, 3, 3), (1,), (1031,))
    fast = [duo.fast for duo in DUOS.values()]
    for codec in (*map(codec_named, FIXED), *fast):
        group = DeviceGroup(rank, world)
        state = CompressorState(rank, world, codec.name, 0, meta)
        reducer: Any = Reducer(None, state, collective=group)
        pieces = [piece(str(i), i, shape, codec, world) for i, shape in enumerate(shapes)]
        values = torch.empty(sum(item.size for item in pieces), device=meta)
        gradients, begin = [], 0
        for item, shape in zip(pieces, shapes, strict=True):
            gradients.append(values[begin : begin + item.size].view(shape))
            begin += item.size
        for step in range(2):
            reducer.reduce(Bucket(0, step, values, pieces, gradients))
            reducer.require_finite(values)
        phases = ["all-to-all"] if world == 2 else ["all-to-all", "all-gather"]
        assert group.calls == phases * 2, codec.name
        assert reducer.tally.wire > 0


def test_a_transport_over_the_host_fails_without_a_host() -> None:
    """The meta device detects messages in host memory."""
    meta = torch.device("meta")
    reducer = Reducer(None, CompressorState(0, 3, "qsgd8", 0, meta))
    item = piece("w", 0, (40, 30), codec_named("qsgd8"), 3)
    values = torch.empty(1200, device=meta)
    with pytest.raises((NotImplementedError, ValueError, RuntimeError)):
        reducer.reduce(Bucket(0, 0, values, [item], [values.view(40, 30)]))
