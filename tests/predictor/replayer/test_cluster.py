"""Files of clusters come from anyone: each is read, or an error says what is wrong, and where."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from qsync_fx.errors import ProfileError
from qsync_fx.predictor.replayer.cluster import (
    CLUSTER,
    Cluster,
    ClusterDevice,
    Network,
    NodeGroup,
    Size,
    memory_size,
)
from qsync_fx.predictor.replayer.collectives import CollectiveLink, Levels, MeasuredCollectives

GOOD = """
[devices.v100]
count = 2
device = "v100"
batch = 32

[devices.t4]
profile = "profiles/t4.json"
batch = 16
memory = 15.8e9
bandwidth = 1.25e9
slowdown = 1.1

[network]
bandwidth = 12.5e9
latency = 30e-6

[buckets]
bytes = 52_428_800

[compression]
ratio = 0.25
each = 1e-11
"""


def test_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD)
    cluster = Cluster.load(path)
    assert cluster.ranks == 3
    assert cluster.devices["t4"] == ClusterDevice(
        profile=str(tmp_path / "profiles/t4.json"),
        batch=16,
        memory=15.8e9,
        bandwidth=1.25e9,
        slowdown=1.1,
    )
    assert cluster.all_reduce == CollectiveLink(1.25e9, 30e-6), (
        "a ring is as fast as its slowest link"
    )
    assert (cluster.buckets.first_bytes, cluster.buckets.bytes) == (2**20, 50 * 2**20)
    assert cluster.compression is not None and cluster.compression.ratio == 0.25


@pytest.mark.parametrize(
    ("memory", "size"),
    [
        (1, Size(1.0)),
        (15.8e9, Size(15.8e9)),
        ("16 GB", Size(16e9)),
        ("1.5GiB", Size(1.5 * 2**30)),
        (" 12 b ", Size(12.0)),
        (".5 kB", Size(500.0)),
        ("30%", Size(0.3, share=True)),
        *(
            (wrong, None)
            for wrong in (
                "",
                "30",
                "GB",
                "1 TB",
                "-3%",
                "1e3 B",
                "1..5 GB",
                "nan%",
                "4 ib",
                0,
                -1,
                math.nan,
                math.inf,
            )
        ),
    ],
)
def test_memory_as_people_write_it(memory: float | str, size: Size | None) -> None:
    assert memory_size(memory) == size


def test_cluster_file_accepts_memory_with_units(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        "[devices.t4]\nmemory = '30%'\n[devices.v100]\nmemory = 4\n[network]\nbandwidth = 1e9"
    )
    cluster = Cluster.load(path)
    assert (cluster.devices["t4"].memory, cluster.devices["v100"].memory) == ("30%", 4.0)


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("", "lacks the field 'devices'", ""),
        ("[devices]", "has no devices", ""),
        ("[devices.a]\ncount = 0", "has the count 0, which must be above 0", "devices.a"),
        ("[devices.a]\ncount = -3", "has the count -3, which must be above 0", "devices.a"),
        (
            "[devices.a]\ncount = 2.0",
            "the number 2.0 instead of an integer",
            "devices.a.count",
        ),
        ("[devices.a]\ncount = '2'", "has text instead of an integer", "devices.a.count"),
        ("[devices.a]\nbatch = true", "has true instead of an integer", "devices.a.batch"),
        (
            "[devices.a]\nslowdown = nan",
            "the number nan instead of a number",
            "devices.a.slowdown",
        ),
        (
            "[devices.a]\nslowdown = inf",
            "the number inf instead of a number",
            "devices.a.slowdown",
        ),
        ("[devices.a]\ndelay = -0.1", "has the delay -0.1, which must be at least 0", "devices.a"),
        (
            "[devices.a]\ndevice = 'a'\nprofile = 'b'",
            "has both a device of the catalog and a profile",
            "devices.a",
        ),
        ("[devices.a]\nmemory = 'much'", "has the memory 'much', which is none", "devices.a"),
        ("[devices.a]\nmemory = '0%'", "has the memory '0%', which is none", "devices.a"),
        ("[devices.a]\nmemory = true", "has true instead of a number or text", "devices.a.memory"),
        ("[devices.a]\nmemory = -1", "has the memory -1.0, which must be above 0", "devices.a"),
        ("[devices.a]\nprofil = 'b'", "has an unknown field 'profil'", "devices.a"),
        ("[device.a]", "has an unknown field 'device'", ""),
        ("devices = 3", "has the number 3 instead of an object", "devices"),
        ("devices = 1979-05-27", "a value of type date instead of an object", "devices"),
        (
            "[devices.a]\n[network]\nbandwidth = 0",
            "has the bandwidth 0.0, which must be above 0",
            "network",
        ),
        (
            "[devices.a]\n[network]\nall_reduce = [[1]]",
            "has a list instead of a list of 2",
            "network.all_reduce[0]",
        ),
        (
            "[devices.a]\n[network]\nall_reduce = [[0, 1]]",
            "has a point in all_reduce that is not above 0",
            "network",
        ),
        (
            "[devices.a]\n[network]\nall_reduce = [[1, 1], [1, 2]]",
            "has two points of the same bytes",
            "network",
        ),
        (
            "[devices.a]\n[network]\nall_reduce = [[1, 1]]\nbandwidth = 3",
            "both a bandwidth and all_reduce",
            "network",
        ),
        (
            "[devices.a]\n[network]\nall_reduce = [[1, 1]]\nranks = 1",
            "all_reduce of fewer than 2 ranks",
            "network",
        ),
        (
            "[devices.a]\n[network]\nbusy = -0.5",
            "has the busy -0.5, which must be at least 0",
            "network",
        ),
        (
            "[devices.a]\n[network]\ncoding = -0.5",
            "has the coding -0.5, which must be at least 0",
            "network",
        ),
        ("[devices.a]\n[buckets]\nbytes = 0", "has the bytes 0", "buckets"),
        ("[devices.a]\n[compression]\nratio = 0", "has the ratio 0", "compression"),
        ("[devices.a]\n[nodes]\nranks = 0", "has the ranks 0, which must be above 0", "nodes"),
        (
            "[devices.a]\ncount = 4\n[nodes]\nranks = 2",
            "without a bandwidth of the links inside",
            "nodes",
        ),
        (
            "[devices.a]\ncount = 4\n[nodes]\nranks = 3\nbandwidth = 1",
            "4 devices, which do not make nodes",
            "nodes",
        ),
        (
            "[devices.a]\ncount = 4\n[network]\nall_reduce = [[1, 1]]\n[nodes]\nranks = 2\n"
            "bandwidth = 1",
            "does not separate nodes",
            "nodes",
        ),
        (
            "[devices.a]\ncount = 3\n[nodes]\nranks = 2\ninside = [[1, 1]]\nacross = [[1, 1]]",
            "has 3 devices, which do not",
            "nodes",
        ),
        (
            "[devices.a]\n[nodes]\ninside = [[1, 1]]\nbandwidth = 1",
            "both a bandwidth and a table",
            "nodes",
        ),
        (
            "[devices.a]\n[nodes]\nacross = [[1, 0]]",
            "has a point in across that is not above 0",
            "nodes",
        ),
        (
            "[devices.a]\n[nodes]\ninside = [[1, 1], [1, 2]]",
            "has two points of the same bytes in inside",
            "nodes",
        ),
        (
            "[devices.a]\n[nodes]\nacross = [[1, 1]]\ncount = 1",
            "across fewer than 2 nodes",
            "nodes",
        ),
        ("[devices.a]\n[devices.a]", "is not valid TOML", "line 2"),
        ("[devices.a\n", "is not valid TOML", "line 1"),
        ("x = " + "[" * 5000, "is nested too deeply", ""),
        ("x = " + "9" * 5000, "is not valid TOML", ""),
        (b"\xff\xfe", "is not valid UTF-8", "byte 0"),
        ("#" * 2**21, "is larger than", ""),
    ],
)
def test_bad_files(text: str | bytes, what: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ProfileError) as caught:
        Cluster.load(path)
    assert what in caught.value.what
    assert (
        caught.value.where is not None
        and str(path) in caught.value.where
        and where in caught.value.where
    )
    assert caught.value.do


def test_nodes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        "[devices.a]\ncount = 8\n[network]\nbandwidth = 1e9\n[nodes]\nranks = 4\nbandwidth = 1e11\n"
    )
    cluster = Cluster.load(path)
    assert cluster.nodes == NodeGroup(4, 1e11)
    assert (
        cluster.all_reduce
        == cluster.exchange
        == Levels(CollectiveLink(1e9), CollectiveLink(1e11), 4)
    )
    assert replace(cluster, nodes=replace(cluster.nodes, ring=True)).all_reduce == CollectiveLink(
        1e9
    )
    assert replace(cluster, nodes=NodeGroup()).all_reduce == CollectiveLink(1e9), (
        "by default each device is a node of its own"
    )


def test_tables_of_nodes_are_met(tmp_path: Path) -> None:
    """What was measured of all ranks is what DistributedDataParallel takes, and what was measured
    of nodes is for what is coded.
    """
    path = tmp_path / "cluster.toml"
    tables = "[nodes]\nranks = 2\ninside = [[1000, 0.25]]\nacross = [[2000, 4]]\ncount = 2\n"
    path.write_text(
        "[devices.a]\ncount = 3\n[devices.b]\n[network]\nall_reduce = [[1000, 3]]\n" + tables
    )
    cluster = Cluster.load(path)
    assert cluster.all_reduce == MeasuredCollectives(((1000, 3),), 4)
    assert cluster.exchange == Levels(
        MeasuredCollectives(((2000, 4),), 2), MeasuredCollectives(((1000, 0.25),), 2), 2
    )
    assert cluster.exchange.seconds([1000, 2000], 4).tolist() == [0.25 + 4, 0.5 + 4]
    assert cluster.exchange.seconds([1000, 2000], 8).tolist() == [0.25 + 6, 0.5 + 6], (
        "of four nodes, 3/2 for 2/2"
    )
    linked = replace(cluster, network=Network(1e3), nodes=replace(cluster.nodes, ring=True))
    assert linked.all_reduce == CollectiveLink(1e3)
    assert replace(
        linked, nodes=NodeGroup(2, 1e9, ring=True), devices={"a": ClusterDevice(4)}
    ).exchange.across == CollectiveLink(1e3)
    whole = replace(cluster, devices={"a": ClusterDevice(2)}, nodes=NodeGroup(2, 1e9))
    assert whole.all_reduce == MeasuredCollectives(((1000, 3),), 2), (
        "all ranks share one node, of which the table is, then"
    )


def test_an_unknown_key_gets_the_nearest_name(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[devices.a]\nprofil = 'b'")
    with pytest.raises(ProfileError, match=r"did you mean 'profile'\?"):
        Cluster.load(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="the cluster cannot be read"):
        Cluster.load(tmp_path / "none.toml")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet="[]{}=.\n\"' devicsntwork019-+e_", max_size=100))
def test_any_text_ends_in_a_cluster_or_an_error(text: bytes | str) -> None:
    with suppress(ProfileError):
        assert isinstance(CLUSTER.decode(text), Cluster)


def test_python_is_checked_like_files() -> None:
    with pytest.raises(ProfileError, match="has no devices"):
        Cluster({})
    for devices, network, says in (
        ({"a": ClusterDevice(count=0)}, None, "has the count 0, which must be above 0"),
        ({"a": ClusterDevice(slowdown=float("nan"))}, None, "has the slowdown nan"),
        ({"a": ClusterDevice()}, Network(bandwidth=-1.0), "has the bandwidth -1.0"),
    ):
        with pytest.raises(ProfileError, match=says) as caught:
            Cluster(devices, network)
        assert caught.value.where in ("devices.a", "network")
    with pytest.raises(ProfileError, match="neither the link of 'a' nor"):
        _ = Cluster({"a": ClusterDevice(count=2)}).all_reduce


def test_table_is_interpolated_and_extrapolated() -> None:
    table = MeasuredCollectives([(2.0**20, 1e-3), (2.0**10, 2e-5), (2.0**26, 0.05)], ranks=4)
    sizes = np.array([1.0, 2**10, 2**15, 2**20, 2**26, 2**27])
    seconds = table.seconds(sizes, ranks=4)
    assert seconds[[0, 1, 3, 4, 5]].tolist() == pytest.approx([2e-5, 2e-5, 1e-3, 0.05, 0.1])
    assert seconds[2] == pytest.approx((2e-5 * 1e-3) ** 0.5)
    assert table.seconds(sizes, ranks=2).tolist() == pytest.approx((seconds / 1.5).tolist())
    assert table.seconds(np.zeros(1), ranks=4) == 0
    assert not table.seconds(sizes, ranks=1).any()


def test_a_ring() -> None:
    assert CollectiveLink(1e9, 1e-5).seconds([0, 4e6], ranks=4).tolist() == pytest.approx(
        [0, 1e-5 + 1.5 * 4e-3]
    )
    assert Cluster(
        {"a": ClusterDevice(count=8)}, Network(all_reduce=[(4, 1e-5)])
    ).all_reduce == MeasuredCollectives(((4, 1e-5),), 8)
