"""Replay of steps with compressed gradients: bytes sent, and seconds of the communication model.
Uncompressed steps do not change.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import qsync_fx
from qsync_fx import Cluster, ClusterPlan, Plan, ProfileError
from qsync_fx.cli import main
from qsync_fx.communication.codec_benchmarks import measured
from qsync_fx.communication.codec_cost_model import (
    COPY,
    Rate,
    Rates,
    coded,
    of_copy,
    of_device,
    slowest,
    uniform,
)
from qsync_fx.communication.codecs import NAMES, codec_named
from qsync_fx.communication.message_header import HEADER
from qsync_fx.predictor.cost_mapper import CostMapper
from qsync_fx.predictor.cost_mapper.times import Parameter, Times
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.predictor.replayer.cluster import (
    Buckets,
    ClusterDevice,
    Compression,
    Exchange,
    Network,
)
from qsync_fx.predictor.replayer.cluster_step import SimulatedBucket, beside_computing, travel
from qsync_fx.profiler.links.link_measurement import coding_speeds
from qsync_fx.profiler.profile import CodecSpeed
from qsync_fx.timeline.replay_plans import best, paying, rates
from tests.support.planning.predicted_models import DrawnTimes, graph_of

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Known:
    graph: ModelGraph
    drawn: Times
    codecs: Sequence[CodecSpeed] = ()

    def times(self) -> Times:
        return self.drawn


MLP = Known(graph_of("mlp"), DrawnTimes())
PATHS = [parameter.path for parameter in MLP.graph.parameters]
RATES = Rates("given", {"fp32": Rate(1e9, 2e9), "qsgd8": Rate(2e9, 4e9), "qsgd4": Rate(2e9, 4e9)})


def cluster(bandwidth: float, count: int = 4) -> Cluster:
    return Cluster({"all": ClusterDevice(count)}, Network(bandwidth, 1e-5), Buckets(1, 1))


def test_bucket_time_equals_the_communication_model() -> None:
    parameters = [Parameter("a", 10_000), Parameter("b", 1_000)]
    for ranks in (2, 3, 16):
        bucket = coded(parameters, {"a": "qsgd8"}, ranks, RATES)
        sent = codec_named("qsgd8").nbytes(10_000) + 4_000
        assert (bucket.codec, bucket.phases) == ("qsgd8", 1 if ranks == 2 else 2)
        assert bucket.nbytes == sent + HEADER * (1 if ranks == 2 else ranks)
        encoded = 1 if ranks == 2 else 1 + 1 / ranks
        seconds = 40_000 * (encoded / 2e9 + 2 / 4e9) + 4_000 * (encoded / 1e9 + 2 / 2e9)
        assert bucket.seconds == pytest.approx(seconds)
        fleet, alpha, bandwidth = cluster(1e8, ranks), 1e-5 / (2 * (ranks - 1)), 1e8
        travel = fleet.all_reduce.seconds([bucket.nbytes], ranks, bucket.phases)[0]
        two_phases = 2 * ((ranks - 1) * alpha + (ranks - 1) / ranks * bucket.nbytes / bandwidth)
        expected = alpha + bucket.nbytes / bandwidth if ranks == 2 else two_phases
        assert travel == pytest.approx(expected)


@pytest.mark.parametrize(
    ("busy", "coding", "coding_share"),
    [(0.5, 0.9, 0.9), (0.5, None, 0.5), (1.5, None, 1.0), (0.0, 1.0, 1.0)],
)
def test_encoding_delays_computation(
    busy: float, coding: float | None, coding_share: float
) -> None:
    bucket = coded([Parameter("a", 10_000)], {"a": "qsgd8"}, 2, RATES)
    buckets = [
        SimulatedBucket(("a",), 40_000, bucket.nbytes, bucket),
        SimulatedBucket(("b",), 4_000, 4_000),
    ]
    for slowdown in (1.0, 2.0):
        fleet = Cluster(
            {"all": ClusterDevice(2, slowdown=slowdown)},
            Network(1e8, 1e-5, busy=busy, coding=coding),
        )
        seconds = travel(fleet, buckets)
        first, plain = beside_computing(fleet, buckets, seconds)
        assert first == pytest.approx(
            busy * (float(seconds[0]) - bucket.seconds) + coding_share * bucket.seconds / slowdown
        )
        assert plain == pytest.approx(busy * float(seconds[1]))
    alone = Cluster({"all": ClusterDevice(1)})
    assert beside_computing(alone, buckets, [1.0, 1.0]) == [0.0, 0.0]


def test_a_large_bucket_travels_while_it_is_coded() -> None:
    numel = 8 * 2**20
    for ranks, cuts in ((2, 8), (4, 2)):
        bucket = coded([Parameter("a", numel)], {"a": "qsgd8"}, ranks, RATES)
        assert bucket.stretches == cuts
        for bandwidth in (1e7, 1e13):
            fleet = cluster(bandwidth, ranks)
            alone = float(fleet.exchange.seconds([bucket.nbytes], ranks, bucket.phases)[0])
            (seconds,) = travel(fleet, [SimulatedBucket(("a",), 4 * numel, bucket.nbytes, bucket)])
            longer, shorter = sorted((alone, bucket.seconds), reverse=True)
            assert seconds == pytest.approx(longer + shorter / cuts)


def test_computed_rates_equal_the_benchmark() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "gradient_codecs.json").read_text())
    rows = {
        row["codec"]: row
        for row in results["rows"]
        if row["isa"] == "avx512" and row["codec"] in NAMES
    }
    computed = of_copy(1.0, "given").by_codec
    assert set(NAMES) >= set(computed) == {*rows, "1bit", "aqgb"}
    for name, row in rows.items():
        measured = [row["encode_to_copy"], row["decode_to_copy"]]
        within = 0.13 if name in ("fp16", "bf16") else 0.00501  # it is the mean of both conversions
        assert [computed[name].encode, computed[name].decode] == pytest.approx(
            measured, abs=within
        ), name
    assert computed["aqgb"] == computed["aqgb32"]


def test_a_codec_that_is_gathered_is_sent_to_all() -> None:
    rates = of_copy(1e9, "given")
    parameters, level = [Parameter("a", 100_000)], codec_named("aqgb12")
    for ranks in (2, 5):
        bucket, fleet = coded(parameters, {"a": "aqgb12"}, ranks, rates), cluster(1e8, ranks)
        assert bucket.phases == 1
        rate = rates.of("aqgb12")
        assert bucket.seconds == pytest.approx(4e5 / rate.encode + ranks * 4e5 / rate.decode)
        alpha = 1e-5 / (2 * (ranks - 1))
        expected = (ranks - 1) * (alpha + (level.nbytes(100_000) + HEADER) / 1e8)
        assert fleet.all_reduce.seconds([bucket.nbytes], ranks, bucket.phases)[0] == pytest.approx(
            expected
        )
    with pytest.raises(ProfileError, match="adapts its bits to the link"):
        coded(parameters, {"a": "aqgb"}, 2, rates)


def test_a_plan_with_codecs_is_replayed_as_it_will_run() -> None:
    slow, quick = cluster(1e5), cluster(1e15)
    weights = {path: "qsgd8" for path in PATHS if path.endswith("weight")}
    plan = ClusterPlan({"all": Plan.uniform("fp32")}, codecs=weights)
    plain = ClusterPlan({"all": Plan.uniform("fp32")}, codecs=dict.fromkeys(PATHS, "fp32"))
    for fleet in (slow, quick):
        without = qsync_fx.replay(Plan.uniform("fp32"), MLP, cluster=fleet)
        assert qsync_fx.replay(plain, MLP, cluster=fleet).seconds == without.seconds
        compressed = qsync_fx.replay(plan, MLP, cluster=fleet)
        assert (compressed.seconds < without.seconds) == (fleet is slow)
        rates = of_copy(COPY, "")
        for bucket in compressed.played.buckets:
            sized = [
                parameter
                for parameter in MLP.graph.parameters
                if parameter.path in bucket.parameters
            ]
            expected = coded(sized, weights, 4, rates)
            assert bucket.coded == expected
            assert bucket.travelling == expected.nbytes
        durations = compressed.played.step.arrived - compressed.played.step.sent
        for simulated, seconds in zip(compressed.played.buckets, durations.tolist(), strict=True):
            assert simulated.coded is not None
            assert simulated.coded.stretches == 1
            assert seconds == pytest.approx(
                fleet.all_reduce.seconds([simulated.travelling], 4)[0] + simulated.coded.seconds
            )
        assert "in qsgd8" in str(compressed)


def test_unsupported_replay_is_an_error() -> None:
    plan = ClusterPlan({"all": Plan.uniform("fp32")}, codecs={PATHS[0]: "qsgd8"})
    both = replace(cluster(1e6), compression=Compression(ratio=0.5))
    with pytest.raises(ProfileError, match="both the cluster and the plan"):
        qsync_fx.replay(plan, MLP, cluster=both)
    strange = ClusterPlan(plan.classes, codecs={"no.such": "qsgd8"})
    with pytest.raises(ProfileError, match=r"'no\.such', which is not a trained parameter"):
        qsync_fx.replay(strange, MLP, cluster=cluster(1e6))
    shaped = ClusterPlan(plan.classes, codecs={PATHS[0]: "1bit"})
    with pytest.raises(ProfileError, match="depends on the shapes of parameters"):
        qsync_fx.replay(shaped, MLP, cluster=cluster(1e6))
    with pytest.raises(ProfileError, match="the speed of the codec 'qsgd2' is unknown"):
        coded([Parameter("a", 100)], {"a": "qsgd2"}, 2, RATES)


def test_measured_rates_scale_with_the_device_slowdown() -> None:
    speeds = [CodecSpeed("qsgd8", 3e9, 5e9), CodecSpeed("fp32", 1e9, 2e9)]
    slow = Cluster({"all": ClusterDevice(4, slowdown=2.0)}, Network(1e6, 1e-5), Buckets(1, 1))
    for fleet, times in ((cluster(1e6), 1.0), (slow, 2.0)):
        device_rates = rates(fleet, {"all": Known(MLP.graph, MLP.drawn, speeds)})
        assert device_rates.source == "measured on all"
        assert device_rates.by_codec == {
            speed.codec: Rate(speed.encode / times, speed.decode / times) for speed in speeds
        }
        computed = rates(fleet, {"all": MLP})
        assert computed.of("qsgd8").encode == pytest.approx(
            of_copy(COPY, "").of("qsgd8").encode / times
        )
    plan = ClusterPlan({"all": Plan.uniform("fp32")}, codecs=dict.fromkeys(PATHS, "qsgd8"))
    ends = []
    for scale in (1.0, 1e-3):
        profile = Known(MLP.graph, MLP.drawn, [CodecSpeed("qsgd8", scale * 3e9, scale * 5e9)])
        ends.append(qsync_fx.replay(plan, profile, cluster=cluster(1e9)).played.buckets)
    for quick, slower in zip(*ends, strict=True):
        assert quick.coded is not None and slower.coded is not None
        assert slower.coded.seconds == pytest.approx(1e3 * quick.coded.seconds)
        assert slower.travelling == quick.travelling


def test_coded_buckets_use_the_link_of_their_transport() -> None:
    """64 MiB in 8 bits over gloo at 10 Gbit/s, next to all-reduces over NCCL at 100 GB/s."""
    numel = 16 * 2**20
    over_gloo = Exchange("point_to_point", "all", 2, [(2**10, 1e-4), (2**24, 2**24 / 1.25e9)])
    network = Network(all_reduce=[(2**10, 2e-5), (2**26, 2**26 / 1e11)], exchanges=[over_gloo])
    fleet = Cluster({"gpu": ClusterDevice(2)}, network)
    instant = Rates("given", {"fp32": Rate(1e15, 1e15), "qsgd8": Rate(1e15, 1e15)})
    item = coded([Parameter("a", numel)], {"a": "qsgd8"}, 2, instant)
    plain = SimulatedBucket(("a",), 4 * numel, 4.0 * numel)
    buckets = [plain, SimulatedBucket(("a",), 4 * numel, item.nbytes, item)]
    for transport, rate in (("point_to_point", 1.25e9), ("collective", 5e10)):
        seconds = [(2**10, 1e-6), (2**24, 2**24 / 5e10)]
        on_device = Exchange("collective", "all", 2, seconds)
        used = replace(network, exchanges=[over_gloo, on_device], transport=transport)
        for_ddp, for_codec = travel(replace(fleet, network=used), buckets)
        assert for_ddp == pytest.approx(2**26 / 1e11)
        assert for_codec == pytest.approx(item.nbytes / rate, rel=1e-3)
    with pytest.raises(ProfileError, match="with the transport collective"):
        travel(replace(fleet, network=replace(network, transport="collective")), buckets)


def test_bytes_that_stay_on_a_gpu_are_not_copied_to_the_host() -> None:
    t4 = qsync_fx.devices.get("t4")
    by_host, on_device = (of_device(t4, "all", on_device=stays) for stays in (False, True))
    assert "to the host" in by_host.source and "to the host" not in on_device.source
    for codec, nbytes in (("fp32", 4), ("fp16", 2), ("bf16", 2)):
        copied = nbytes / 4 / t4.memory.host  # type: ignore[operator]
        assert 1 / by_host.of(codec).encode == pytest.approx(
            1 / on_device.of(codec).encode + copied
        )
        assert 1 / by_host.of(codec).decode == pytest.approx(
            1 / on_device.of(codec).decode + copied
        )
    speeds = [CodecSpeed("qsgd8", 1e9, 2e9), CodecSpeed("qsgd8", 5e9, 6e9, on_device=True)]
    fleet = cluster(1e6)
    assert fleet.network is not None
    for transport, rate in (("point_to_point", Rate(1e9, 2e9)), ("collective", Rate(5e9, 6e9))):
        used = replace(fleet, network=replace(fleet.network, transport=transport))
        assert rates(used, {"all": Known(MLP.graph, MLP.drawn, speeds)}).of("qsgd8") == rate
        cpu = Known(MLP.graph, MLP.drawn, speeds[:1])
        assert rates(used, {"all": cpu}).of("qsgd8") == Rate(1e9, 2e9), (
            "gradients on a CPU are not copied to the host"
        )


def test_how_fast_this_processor_codes_is_measured_once() -> None:
    by_codec = {item.codec: item for item in coding_speeds()}
    assert coding_speeds() == list(by_codec.values())
    assert by_codec.keys() <= {*NAMES} - {"1bit", "aqgb"}
    assert by_codec.keys() >= {"fp32", "fp16", "bf16", "1bit*", "qsgd8", "aqgb12"}
    assert all(
        1e6 < speed < 1e13 for item in by_codec.values() for speed in (item.encode, item.decode)
    )
    assert not any(item.on_device for item in by_codec.values()), (
        "a CPU has no codec speeds in device memory"
    )
    (same,) = measured([codec_named("qsgd8")], 2**20, 3, on_device=True)
    assert 1e6 < same.encode < 1e13 and 1e6 < same.decode < 1e13


def test_rates_are_the_minimum_and_name_their_source() -> None:
    quick, slow = of_device(qsync_fx.devices.get("a100"), "all"), of_copy(1e9, "a slow one")
    both = slowest([quick, slow])
    assert both.of("qsgd8") == slow.of("qsgd8")
    assert both.source == f"{quick.source}; a slow one"
    assert "NVIDIA A100" in quick.source


def test_codec_break_even_bandwidth() -> None:
    schedule = {"all": CostMapper(MLP.graph, MLP.drawn, Plan.uniform("fp32")).schedule()}
    rates = of_copy(1e9, "given")
    without, candidates = paying(schedule, cluster(1e4), ["qsgd8", "qsgd4"], rates)
    assert best(without, candidates).codec == "qsgd4"
    assert without.sent == pytest.approx(
        1.5 * sum(4 * parameter.numel for parameter in MLP.graph.parameters)
    )
    assert without.coding == 0
    for candidate in candidates:
        assert candidate.seconds < without.seconds
        assert candidate.sent < without.sent
        assert 0 <= candidate.hidden < 1
        assert candidate.until is not None and candidate.until > 1e4
        for times, wins in ((0.99, True), (1.01, False)):
            plain, (repeated,) = paying(
                schedule, cluster(candidate.until * times), [candidate.codec], rates
            )
            assert repeated.seconds < plain.seconds, (
                "the codec shortens the step on both sides of its break-even bandwidth"
            )
            assert (best(plain, [repeated]) is repeated) == wins
    without, candidates = paying(schedule, cluster(1e15), ["qsgd8", "qsgd4"], rates)
    assert best(without, candidates) is without
    small = uniform([Parameter("large", 10**6), Parameter("small", 10)], "qsgd8")
    assert small == {"large": "qsgd8"}


def test_replay_of_a_plan_with_codecs_needs_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    ClusterPlan({"all": Plan.uniform("fp32")}, codecs={"no.such": "qsgd8"}).save(path)
    assert main(["replay", str(path)]) == 2
    assert "there is no profile" in capsys.readouterr().err
