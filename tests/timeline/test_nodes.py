"""Ranks that share nodes: bytes and times inside and between nodes, and the gain of codecs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from qsync_fx import Cluster
from qsync_fx.communication.codec_cost_model import Rate, Rates, by_bucket, coded, of_copy, uniform
from qsync_fx.communication.codecs import codec_named
from qsync_fx.communication.message_header import HEADER
from qsync_fx.plan.cluster_plan import INSIDE_CODECS, two_levels
from qsync_fx.predictor.cost_mapper.times import Entry, Parameter, Part, Schedule
from qsync_fx.predictor.replayer.cluster import Buckets, ClusterDevice, Exchange, Network, Node
from qsync_fx.predictor.replayer.cluster_step import SimulatedBucket, sent, simulate, travel
from qsync_fx.predictor.replayer.collectives import (
    AllReduce,
    CollectiveLink,
    InnerLinks,
    Levels,
    MeasuredCollectives,
    MeasuredExchange,
)
from qsync_fx.timeline.replay_plans import paying

RATES = Rates("given", {"fp32": Rate(1e9, 2e9), "qsgd8": Rate(2e9, 4e9)})
SIZES = st.lists(st.floats(0, 1e9), min_size=1, max_size=5)
SPEEDS = st.floats(1e3, 1e12)
LATENCIES = st.floats(0, 1e-2)


def cluster(node: Node, ranks: int = 8, bandwidth: float = 1e8, ring: bool = False) -> Cluster:
    network = Network(bandwidth, 1e-5, ring=ring)
    return Cluster({"all": ClusterDevice(ranks, node=node)}, network, Buckets(1, 1))


def levels(across: AllReduce, inside: AllReduce, size: int, nodes: int) -> Levels:
    return Levels(across, (InnerLinks(size, inside),), nodes)


@given(
    sizes=SIZES,
    ranks=st.integers(1, 64),
    across=SPEEDS,
    inside=SPEEDS,
    latency=LATENCIES,
    phases=st.integers(1, 2),
)
def test_nodes_of_one_rank_equal_a_ring(
    sizes: list[float], ranks: int, across: float, inside: float, latency: float, phases: int
) -> None:
    flat = CollectiveLink(across, latency)
    two = levels(flat, CollectiveLink(inside, latency), 1, ranks)
    assert np.array_equal(two.seconds(sizes, ranks, phases), flat.seconds(sizes, ranks, phases))
    table = MeasuredCollectives(((1e3, 1e-4), (1e6, 1e-2)), 4)
    two = levels(table, flat, 1, ranks)
    assert np.array_equal(two.seconds(sizes, ranks), table.seconds(sizes, ranks))


@given(
    sizes=SIZES, nodes=st.integers(1, 16), size=st.integers(1, 16), across=SPEEDS, latency=LATENCIES
)
def test_instant_inner_links_make_nodes_a_ring(
    sizes: list[float], nodes: int, size: int, across: float, latency: float
) -> None:
    flat = CollectiveLink(across, latency)
    two = levels(flat, CollectiveLink(math.inf), size, nodes)
    for phases in (1, 2):
        assert np.array_equal(
            two.seconds(sizes, nodes * size, phases), flat.seconds(sizes, nodes, phases)
        )


@given(
    nodes=st.integers(1, 16),
    size=st.integers(2, 16),
    across=SPEEDS,
    inside=SPEEDS,
    latency=LATENCIES,
)
def test_two_level_time_is_the_sum_of_its_messages(
    nodes: int, size: int, across: float, inside: float, latency: float
) -> None:
    """Reduce-scatter inside nodes, all-reduce of shards between nodes, all-gather inside nodes."""
    nbytes = 4.2e6
    part = nbytes / size
    within = 2 * (size - 1) * part / inside + latency
    between = size * 2 * (nodes - 1) * (part / nodes) / across + 1e-5 if nodes > 1 else 0.0
    two = levels(CollectiveLink(across, 1e-5), CollectiveLink(inside, latency), size, nodes)
    assert two.seconds([nbytes], nodes * size)[0] == pytest.approx(within + between)


@given(
    nodes=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 8), SPEEDS, LATENCIES, SPEEDS, LATENCIES),
        min_size=1,
        max_size=4,
    ),
    nbytes=st.floats(1, 1e9),
)
def test_all_nodes_wait_for_the_slowest_class(
    nodes: list[tuple[int, int, float, float, float, float]], nbytes: float
) -> None:
    """Closed form: the slowest collectives inside a node, and the slowest link between nodes."""
    devices = {
        str(index): ClusterDevice(
            count * size, bandwidth=link, latency=wait, node=Node(size, inside, latency)
        )
        for index, (count, size, inside, latency, link, wait) in enumerate(nodes)
    }
    fleet = Cluster(devices, Network(1.0))
    within = max(
        2 * (size - 1) / size * nbytes / inside + latency if size > 1 else 0.0
        for _, size, inside, latency, _, _ in nodes
    )
    total, between = sum(count for count, *_ in nodes), 0.0
    if total > 1:
        slowest, longest = min(link for *_, link, _ in nodes), max(wait for *_, wait in nodes)
        between = 2 * (total - 1) / total * nbytes / slowest + longest
    assert fleet.nodes == total
    if fleet.ranks > 1:
        (seconds,) = fleet.all_reduce.seconds([nbytes], fleet.ranks)
        assert seconds == pytest.approx(within + between)
        (across, inside_bytes) = sent(fleet, SimulatedBucket(("w",), 4, nbytes))
        assert across == pytest.approx(2 * (total - 1) / total * nbytes)
        largest = max(size for _, size, *_ in nodes)
        assert inside_bytes == pytest.approx(2 * (largest - 1) / largest * nbytes)


@given(
    ranks=st.integers(2, 16),
    groups=st.integers(1, 8),
    phases=st.integers(1, 2),
    bandwidth=SPEEDS,
    sizes=st.lists(st.floats(1, 1e8), min_size=1, max_size=5),
)
def test_a_measured_exchange_has_the_time_of_its_phases(
    ranks: int, groups: int, phases: int, bandwidth: float, sizes: list[float]
) -> None:
    """A table of a link without latency gives the times of the link, for all groups of ranks."""
    table = [(2.0**power, 2.0**power / bandwidth) for power in range(-8, 30)]
    measured = MeasuredExchange(table, groups).seconds(sizes, ranks, phases)
    link = CollectiveLink(bandwidth).seconds(sizes, ranks, phases) / groups
    assert measured == pytest.approx(link)
    least = MeasuredExchange([(1e9, 0.5)], groups).seconds(sizes, ranks, phases)
    assert least.tolist() == [0.5 * phases] * len(sizes), (
        "sizes below the table take its first duration"
    )
    assert not MeasuredExchange(table).seconds(sizes, 1, phases).any()


@pytest.mark.parametrize("ring", [False, True])
def test_ddp_all_reduce_uses_a_ring_or_two_levels(ring: bool) -> None:
    bucket = SimulatedBucket(("w",), 4_000_000, 4e6)
    for ranks, size in ((8, 4), (8, 2), (4, 4)):
        fleet, several = cluster(Node(size, 1e9, 1e-6), ranks, ring=ring), ranks > size
        (seconds,) = travel(fleet, [bucket])
        across, inside = sent(fleet, bucket)
        nodes = ranks // size
        if ring:
            ring_bytes = 2 * (ranks - 1) / ranks * 4e6
            assert seconds == pytest.approx(
                ring_bytes / 1e8 + 1e-5 if several else ring_bytes / 1e9 + 1e-6
            )
            assert (across, inside) == (ring_bytes if several else 0, ring_bytes)
        else:
            assert across == pytest.approx(2 * (nodes - 1) / nodes * 4e6)
            assert inside == pytest.approx(2 * (size - 1) / size * 4e6)
            assert seconds == pytest.approx(inside / 1e9 + 1e-6 + (across / 1e8 + 1e-5) * several)
        flat = cluster(Node(), ranks, ring=ring)
        assert flat.all_reduce == CollectiveLink(1e8, 1e-5)
        assert sent(flat, bucket) == (pytest.approx(2 * (ranks - 1) / ranks * 4e6), 0)


@pytest.mark.parametrize(("ranks", "size"), [(4, 2), (8, 2), (12, 4), (4, 4), (6, 1)])
def test_bucket_is_encoded_between_nodes_only(ranks: int, size: int) -> None:
    parameters = [Parameter("a", 10_000), Parameter("b", 1_000)]
    coded_bucket, nodes = coded(parameters, {"a": "qsgd8"}, ranks, RATES, size=size), ranks // size
    assert coded_bucket.phases == (1 if nodes == 2 else 2)
    encoded_bytes = codec_named("qsgd8").nbytes(10_000) + 4_000
    assert coded_bucket.nbytes == encoded_bytes + HEADER * size * (1 if nodes == 2 else nodes)
    assert coded_bucket.inside == (44_000 + HEADER * size if size > 1 else 0)
    encoded, decoded = (0, 0) if nodes == 1 else (1, 2) if nodes == 2 else (1 + 1 / nodes, 2)
    seconds = (
        40_000 * (encoded / 2e9 + decoded / 4e9) + 4_000 * (encoded / 1e9 + decoded / 2e9)
    ) / size
    copying = 44_000 * ((1 + 1 / size) / 1e9 + 2 / 2e9) if size > 1 else 0
    assert (coded_bucket.seconds, coded_bucket.inside_seconds) == (
        pytest.approx(seconds),
        pytest.approx(copying),
    )
    fleet = cluster(Node(size, 1e9 if size > 1 else None, 1e-6), ranks)
    bucket = SimulatedBucket(("a", "b"), 44_000, coded_bucket.nbytes, coded_bucket)
    across, inside = sent(fleet, bucket)
    expected = coded_bucket.coding
    expected += inside / 1e9 + 1e-6 if size > 1 else 0
    expected += across / 1e8 + 1e-5 * coded_bucket.phases / 2 if nodes > 1 else 0
    assert travel(fleet, [bucket])[0] == pytest.approx(expected)


@given(
    numel=st.integers(1, 10**6),
    size=st.integers(2, 8),
    nodes=st.integers(2, 4),
    inside=st.sampled_from(INSIDE_CODECS),
)
def test_codec_inside_nodes_changes_the_exchange_inside_only(
    numel: int, size: int, nodes: int, inside: str
) -> None:
    """Bytes of one reduce-scatter and one all-gather; FP32 parameters are FP32 on both levels."""
    rates, parameters = of_copy(1e9, "drawn"), [Parameter("a", numel), Parameter("b", 1_000)]
    plain, both = (
        coded(parameters, {"a": codec}, nodes * size, rates, size=size)
        for codec in ("qsgd4", two_levels("qsgd4", inside))
    )
    assert (plain.nbytes, plain.seconds, plain.phases) == (both.nbytes, both.seconds, both.phases)
    nbytes = codec_named(inside).nbytes(numel)
    assert both.inside == nbytes + 4_000 + HEADER * size
    rate, fp32 = rates.of(inside), rates.of("fp32")
    expected = 4 * numel * ((1 + 1 / size) / rate.encode + 2 / rate.decode)
    expected += 4_000 * ((1 + 1 / size) / fp32.encode + 2 / fp32.decode)
    assert both.inside_seconds == pytest.approx(expected)
    table = [(1.0, 1e-6), (1e9, 1e3)]
    exchanges = [
        Exchange("point_to_point", "inside", size, table),
        Exchange("point_to_point", "between", nodes, [(1.0, 1e-7), (1e9, 1e2)]),
    ]
    network = Network(all_reduce=table, exchanges=exchanges)
    fleet = Cluster({"all": ClusterDevice(nodes * size, node=Node(size))}, network)
    seconds = [
        travel(fleet, [SimulatedBucket(("a", "b"), 4 * numel, item.nbytes, item)])[0]
        for item in (plain, both)
    ]
    levels = fleet.exchange.inside_seconds([plain.inside, both.inside])
    expected = levels[1] - levels[0] + both.inside_seconds - plain.inside_seconds
    assert seconds[1] - seconds[0] == pytest.approx(expected, abs=1e-12 + 1e-9 * seconds[0])


def test_large_bucket_overlaps_encoding_and_transfer() -> None:
    numel = 16 * 2**20
    for ranks, size, cuts in ((4, 2, 8), (8, 4, 4), (8, 2, 2)):
        coded_bucket = coded([Parameter("a", numel)], {"a": "qsgd8"}, ranks, RATES, size=size)
        assert coded_bucket.stretches == cuts
        for bandwidth in (1e7, 1e13):
            fleet = cluster(Node(size, 1e9, 1e-6), ranks, bandwidth)
            bucket = SimulatedBucket(("a",), 4 * numel, coded_bucket.nbytes, coded_bucket)
            across, inside = sent(fleet, bucket)
            between = across / bandwidth + 1e-5 * coded_bucket.phases / 2
            longer, shorter = sorted((between, coded_bucket.seconds), reverse=True)
            (duration,) = travel(fleet, [bucket])
            assert duration == pytest.approx(
                longer + shorter / cuts + inside / 1e9 + 1e-6 + coded_bucket.inside_seconds
            )


def test_links_inside_nodes_let_codecs_pay_less() -> None:
    """With two levels a node sends its gradients once instead of once per rank, so a codec saves
    less.
    """
    parameters = (Parameter("first", 300_000), Parameter("second", 100))
    entries = (Entry("linear", Part.BACKWARD, 1e-3),)
    schedules = {"all": Schedule((), entries, 0.0, parameters, {"first": 0, "second": 0})}
    rates, limits = of_copy(1e9, "given"), []
    for node in (Node(), Node(4, 1e15)):
        fleet = cluster(node, 16, 1e4)
        without, (compressed,) = paying(schedules, fleet, ["qsgd8"], rates)
        assert compressed.seconds < without.seconds
        buckets = by_bucket(schedules, fleet, uniform(parameters, "qsgd8"), rates)
        assert float(simulate(schedules, fleet, buckets).step.seconds) == compressed.seconds
        raw, count = 4 * 300_100, 16 // node.ranks
        assert without.sent == pytest.approx(2 * (count - 1) / count * raw)
        assert without.inside == pytest.approx(1.5 * raw if node.ranks > 1 else 0)
        assert compressed.inside == pytest.approx(without.inside, rel=0.01)
        limits.append(compressed.until)
    assert limits[1] is not None and limits[0] is not None and limits[1] < limits[0]
