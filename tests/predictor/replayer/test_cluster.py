"""Cluster files: valid files are loaded; errors of other files name their cause and position."""

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
    Exchange,
    Network,
    Node,
    Size,
    memory_size,
)
from qsync_fx.predictor.replayer.collectives import (
    CollectiveLink,
    InnerLinks,
    Levels,
    MeasuredCollectives,
    MeasuredExchange,
)

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


MEASURED = """
[[network.exchanges]]
transport = "point_to_point"
group = "inside"
ranks = 2
seconds = [[1000, 0.25]]

[[network.exchanges]]
transport = "point_to_point"
group = "between"
seconds = [[500, 4]]
ranks = 2
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
    ("text", "message", "where"),
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
        (
            "[devices.a.node]\nranks = 0",
            "has the ranks 0, which must be above 0",
            "devices.a.node",
        ),
        (
            "[devices.a]\ncount = 4\n[devices.a.node]\nranks = 2\n[network]\nbandwidth = 1",
            "without a bandwidth of the links inside",
            "devices.a.node",
        ),
        (
            "[devices.a]\ncount = 4\n[devices.a.node]\nranks = 3\nbandwidth = 1",
            "4 devices, which do not make nodes",
            "devices.a.node",
        ),
        (
            "[devices.a]\ncount = 3\n[devices.a.node]\nranks = 2\n" + MEASURED,
            "has 3 devices, which do not",
            "devices.a.node",
        ),
        (
            "[devices.a]\n" + MEASURED.replace("ranks = 2", "ranks = 1"),
            "has an exchange of fewer than 2 ranks",
            "network.exchanges[0]",
        ),
        (
            "[devices.a]\n" + MEASURED + MEASURED,
            "has two exchanges of the same transport and group",
            "network",
        ),
        (
            "[devices.a]\n[[network.exchanges]]\ntransport = 'point_to_point'\ngroup = 'all'\n"
            "ranks = 2\nseconds = [[1, 0]]",
            "has a point in seconds that is not above 0",
            "network.exchanges[0]",
        ),
        (
            "[devices.a]\n[network]\ntransport = 'ipoac'",
            "has text instead of 'point_to_point' or 'collective'",
            "network.transport",
        ),
        ("[devices.a]\n[devices.a]", "is not valid TOML", "line 2"),
        ("[devices.a\n", "is not valid TOML", "line 1"),
        ("x = " + "[" * 5000, "is nested too deeply", ""),
        ("x = " + "9" * 5000, "is not valid TOML", ""),
        (b"\xff\xfe", "is not valid UTF-8", "byte 0"),
        ("#" * 2**21, "is larger than", ""),
    ],
)
def test_bad_files(text: str | bytes, message: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ProfileError) as caught:
        Cluster.load(path)
    assert message in caught.value.what
    assert (
        caught.value.where is not None
        and str(path) in caught.value.where
        and where in caught.value.where
    )
    assert caught.value.do


def test_nodes_of_each_class_are_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        "[devices.a]\ncount = 8\n[devices.a.node]\nranks = 4\nbandwidth = 1e11\n"
        "[devices.b]\ncount = 2\nbandwidth = 2e8\n[devices.b.node]\nranks = 2\nbandwidth = 1e9\n"
        "latency = 1e-3\n[network]\nbandwidth = 1e9"
    )
    cluster = Cluster.load(path)
    assert cluster.devices["a"].node == Node(4, 1e11)
    assert (cluster.ranks, cluster.nodes) == (10, 3)
    inside = InnerLinks(4, CollectiveLink(1e11)), InnerLinks(2, CollectiveLink(1e9, 1e-3))
    assert cluster.all_reduce == Levels(CollectiveLink(2e8), inside, 3)
    with pytest.raises(ProfileError, match="equal number of ranks, not of a: 4, b: 2"):
        _ = cluster.exchange
    ring = replace(cluster, network=Network(1e10, ring=True))
    assert ring.all_reduce == CollectiveLink(2e8), "a ring is as fast as its slowest link"
    flat = {name: replace(device, node=Node()) for name, device in cluster.devices.items()}
    assert replace(cluster, devices=flat).all_reduce == CollectiveLink(2e8), (
        "by default each device is a separate node"
    )


def test_former_tables_of_nodes_name_the_present_ones(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[devices.a]\n[nodes]\nranks = 2")
    with pytest.raises(ProfileError, match=r"in \[devices.NAME.node\]"):
        Cluster.load(path)


def test_compressed_gradients_take_the_times_of_their_transport(tmp_path: Path) -> None:
    """All-reduce times of the default group apply to uncompressed gradients only."""
    path = tmp_path / "cluster.toml"
    path.write_text(
        "[devices.a]\ncount = 3\n[devices.a.node]\nranks = 2\n[devices.b.node]\nranks = 2\n"
        "[network]\nall_reduce = [[1000, 3]]\n" + MEASURED
    )
    cluster = Cluster.load(path)
    assert cluster.all_reduce == MeasuredCollectives(((1000, 3),), 4)
    inside = (InnerLinks(2, MeasuredExchange(((1000, 0.25),))),)
    assert cluster.exchange == Levels(MeasuredExchange(((500, 4),), 2), inside, 2)
    assert cluster.exchange.seconds([2000, 4000], 4).tolist() == [0.5 + 8, 1 + 16]
    assert cluster.exchange.across.seconds([1000], 2, phases=1).tolist() == [4], (
        "two ranks of a node send 500 bytes each"
    )
    assert cluster.network is not None
    other = replace(cluster, network=replace(cluster.network, transport="collective"))
    with pytest.raises(ProfileError, match=r"no exchange .* with the transport collective"):
        _ = other.exchange
    linked = replace(cluster.network, all_reduce=[], bandwidth=1e3, transport="collective")
    with pytest.raises(ProfileError, match="without a bandwidth of the links inside"):
        replace(cluster, network=linked)
    assert cluster.without("a") is None
    flat = Cluster(
        {"a": ClusterDevice(4)},
        Network(
            all_reduce=[(8, 1e-6)],
            exchanges=[
                Exchange("point_to_point", "all", 4, [(1000, 2.0)]),
                Exchange("collective", "all", 4, [(1000, 1.0)]),
            ],
        ),
    )
    (seconds,) = flat.exchange.seconds([4000 / 3], 4)
    assert seconds == 2 * 2.0
    assert flat.network is not None
    other = replace(flat, network=replace(flat.network, transport="collective"))
    assert other.exchange.seconds([4000 / 3], 4).tolist() == [2 * 1.0]


@pytest.mark.parametrize(("name", "memory"), [("cluster-a", None), ("cluster-b", "30%")])
def test_clusters_of_the_paper(name: str, memory: str | None) -> None:
    """QSync, section VII-A: two servers of eight V100, and two of eight T4."""
    cluster = Cluster.load(name)
    assert {name: device.count for name, device in cluster.devices.items()} == {
        "v100": 16,
        "t4": 16,
    }
    nodes = {name: device.node for name, device in cluster.devices.items()}
    assert {name: (node.ranks, node.bandwidth) for name, node in nodes.items()} == {
        "v100": (8, 300e9),
        "t4": (8, 32e9),
    }
    assert (cluster.nodes, cluster.devices["t4"].memory) == (4, memory)
    nbytes = 1e8
    inside = 10e-6 + 2 * 7 / 8 * nbytes / 32e9
    between = 30e-6 + 2 * 3 / 4 * nbytes / 12.5e9
    assert cluster.all_reduce.seconds([nbytes], 32)[0] == pytest.approx(inside + between)


def test_an_unknown_cluster_gets_the_nearest_name() -> None:
    with pytest.raises(ProfileError, match="unknown cluster 'clustera'") as caught:
        Cluster.load("clustera")
    assert caught.value.do is not None and "did you mean 'cluster-a'?" in caught.value.do


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
