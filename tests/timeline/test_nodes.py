"""Ranks that share nodes: what travels inside and between these, in which time, and which codecs
pay there.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from qsync_fx import Cluster
from qsync_fx.communication.codec_cost_model import Rate, Rates, by_bucket, coded, of_copy, uniform
from qsync_fx.communication.codecs import codec_named
from qsync_fx.communication.message_header import HEADER
from qsync_fx.predictor.cost_mapper.times import Entry, Parameter, Part, Schedule
from qsync_fx.predictor.replayer.cluster import Buckets, ClusterDevice, Network, NodeGroup
from qsync_fx.predictor.replayer.cluster_step import SimulatedBucket, sent, simulate, travel
from qsync_fx.predictor.replayer.collectives import CollectiveLink, Levels, MeasuredCollectives
from qsync_fx.timeline.replay_plans import paying

RATES = Rates("given", {"fp32": Rate(1e9, 2e9), "qsgd8": Rate(2e9, 4e9)})
SIZES = st.lists(st.floats(0, 1e9), min_size=1, max_size=5)
SPEEDS = st.floats(1e3, 1e12)
LATENCIES = st.floats(0, 1e-2)


def cluster(nodes: NodeGroup, ranks: int = 8, bandwidth: float = 1e8) -> Cluster:
    return Cluster(
        {"all": ClusterDevice(ranks)}, Network(bandwidth, 1e-5), Buckets(1, 1), nodes=nodes
    )


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
    levels = Levels(flat, CollectiveLink(inside, latency), 1)
    assert np.array_equal(levels.seconds(sizes, ranks, phases), flat.seconds(sizes, ranks, phases))
    table = MeasuredCollectives(((1e3, 1e-4), (1e6, 1e-2)), 4)
    assert np.array_equal(Levels(table, flat, 1).seconds(sizes, ranks), table.seconds(sizes, ranks))


@given(
    sizes=SIZES, nodes=st.integers(1, 16), size=st.integers(1, 16), across=SPEEDS, latency=LATENCIES
)
def test_instant_inner_links_make_nodes_a_ring(
    sizes: list[float], nodes: int, size: int, across: float, latency: float
) -> None:
    flat = CollectiveLink(across, latency)
    levels = Levels(flat, CollectiveLink(math.inf), size)
    for phases in (1, 2):
        assert np.array_equal(
            levels.seconds(sizes, nodes * size, phases), flat.seconds(sizes, nodes, phases)
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
    """Every rank sends the others of its node its part of theirs, then the others with its part on
    other nodes, then again its node.
    """
    nbytes = 4.2e6
    part = nbytes / size
    within = 2 * (size - 1) * part / inside + latency
    between = size * 2 * (nodes - 1) * (part / nodes) / across + 1e-5 if nodes > 1 else 0.0
    found = Levels(CollectiveLink(across, 1e-5), CollectiveLink(inside, latency), size).seconds(
        [nbytes], nodes * size
    )
    assert found[0] == pytest.approx(within + between)


@pytest.mark.parametrize("ring", [False, True])
def test_ddp_all_reduce_uses_a_ring_or_two_levels(ring: bool) -> None:
    bucket = SimulatedBucket(("w",), 4_000_000, 4e6)
    for ranks, size in ((8, 4), (8, 2), (4, 4)):
        fleet, several = cluster(NodeGroup(size, 1e9, 1e-6, ring), ranks), ranks > size
        (seconds,) = travel(fleet, [bucket])
        across, inside = sent(fleet, bucket)
        nodes = ranks // size
        if ring:
            whole = 2 * (ranks - 1) / ranks * 4e6
            assert seconds == pytest.approx(whole / 1e8 + 1e-5 if several else whole / 1e9 + 1e-6)
            assert (across, inside) == (whole if several else 0, whole)
        else:
            assert across == pytest.approx(2 * (nodes - 1) / nodes * 4e6)
            assert inside == pytest.approx(2 * (size - 1) / size * 4e6)
            assert seconds == pytest.approx(inside / 1e9 + 1e-6 + (across / 1e8 + 1e-5) * several)
        flat = cluster(NodeGroup(ring=ring), ranks)
        assert flat.all_reduce == CollectiveLink(1e8, 1e-5)
        assert sent(flat, bucket) == (pytest.approx(2 * (ranks - 1) / ranks * 4e6), 0)


@pytest.mark.parametrize(("ranks", "size"), [(4, 2), (8, 2), (12, 4), (4, 4), (6, 1)])
def test_bucket_is_encoded_between_nodes_only(ranks: int, size: int) -> None:
    parameters = [Parameter("a", 10_000), Parameter("b", 1_000)]
    found, nodes = coded(parameters, {"a": "qsgd8"}, ranks, RATES, size=size), ranks // size
    assert found.phases == (1 if nodes == 2 else 2)
    given = codec_named("qsgd8").nbytes(10_000) + 4_000
    assert found.nbytes == given + HEADER * size * (1 if nodes == 2 else nodes)
    assert found.inside == (44_000 + HEADER * size if size > 1 else 0)
    encoded, decoded = (0, 0) if nodes == 1 else (1, 2) if nodes == 2 else (1 + 1 / nodes, 2)
    seconds = (
        40_000 * (encoded / 2e9 + decoded / 4e9) + 4_000 * (encoded / 1e9 + decoded / 2e9)
    ) / size
    copying = 44_000 * ((1 + 1 / size) / 1e9 + (2 - 1 / size) / 2e9) if size > 1 else 0
    assert (found.seconds, found.inside_seconds) == (pytest.approx(seconds), pytest.approx(copying))
    fleet = cluster(NodeGroup(size, 1e9 if size > 1 else None, 1e-6), ranks)
    bucket = SimulatedBucket(("a", "b"), 44_000, found.nbytes, found)
    across, inside = sent(fleet, bucket)
    taken = found.coding
    taken += inside / 1e9 + 1e-6 if size > 1 else 0
    taken += across / 1e8 + 1e-5 * found.phases / 2 if nodes > 1 else 0
    assert travel(fleet, [bucket])[0] == pytest.approx(taken)


def test_large_bucket_overlaps_encoding_and_transfer() -> None:
    numel = 16 * 2**20
    for ranks, size, cuts in ((4, 2, 8), (8, 4, 4), (8, 2, 2)):
        found = coded([Parameter("a", numel)], {"a": "qsgd8"}, ranks, RATES, size=size)
        assert found.stretches == cuts
        for bandwidth in (1e7, 1e13):
            fleet = cluster(NodeGroup(size, 1e9, 1e-6), ranks, bandwidth)
            bucket = SimulatedBucket(("a",), 4 * numel, found.nbytes, found)
            across, inside = sent(fleet, bucket)
            between = across / bandwidth + 1e-5 * found.phases / 2
            longer, shorter = sorted((between, found.seconds), reverse=True)
            (taken,) = travel(fleet, [bucket])
            assert taken == pytest.approx(
                longer + shorter / cuts + inside / 1e9 + 1e-6 + found.inside_seconds
            )


def test_links_inside_nodes_let_codecs_pay_less() -> None:
    """In two levels each node sends once what all of its ranks would, so that there is less for a
    codec to win.
    """
    parameters = (Parameter("first", 300_000), Parameter("second", 100))
    entries = (Entry("linear", Part.BACKWARD, 1e-3),)
    schedules = {"all": Schedule((), entries, 0.0, parameters, {"first": 0, "second": 0})}
    rates, limits = of_copy(1e9, "given"), []
    for nodes in (NodeGroup(), NodeGroup(4, 1e15)):
        fleet = cluster(nodes, 16, 1e4)
        without, (one,) = paying(schedules, fleet, ["qsgd8"], rates)
        assert one.seconds < without.seconds
        how = by_bucket(schedules, fleet, uniform(parameters, "qsgd8"), rates)
        assert float(simulate(schedules, fleet, how).step.seconds) == one.seconds
        raw, count = 4 * 300_100, 16 // nodes.ranks
        assert without.sent == pytest.approx(2 * (count - 1) / count * raw)
        assert without.inside == pytest.approx(1.5 * raw if nodes.ranks > 1 else 0)
        assert one.inside == pytest.approx(without.inside, rel=0.01)
        limits.append(one.until)
    assert limits[1] is not None and limits[0] is not None and limits[1] < limits[0]
    assert replace(fleet, nodes=NodeGroup()) == cluster(NodeGroup(), 16, 1e4)
