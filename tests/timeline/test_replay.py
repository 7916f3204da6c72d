"""Replay of plans and device profiles into a timeline, on real models with random times."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

import qsync_fx
from qsync_fx import Cluster, ClusterPlan, Plan, PlanError, ProfileError, Timeline
from qsync_fx.predictor.analytic_times import DeviceTimes
from qsync_fx.predictor.cost_mapper import CostMapper
from qsync_fx.predictor.cost_mapper.times import Times
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.predictor.replayer.cluster import Buckets, ClusterDevice, Exchange, Network
from qsync_fx.profiler.model_graph_builder import build_model_graph
from qsync_fx.profiler.profile import CodecSpeed, Collective
from tests.support.planning.predicted_models import DrawnTimes, graph_of


@dataclass(frozen=True)
class Known:
    """Substitute for a profile: a model and the times of its operators."""

    graph: ModelGraph
    drawn: Times
    collectives: list[Collective] = field(default_factory=list)
    codecs: list[CodecSpeed] = field(default_factory=list)

    def times(self) -> Times:
        return self.drawn


MLP = Known(graph_of("mlp"), DrawnTimes())
FLEET = Cluster(
    {"fast": ClusterDevice(count=2, batch=4), "slow": ClusterDevice(slowdown=3.0, batch=4)},
    Network(1e6, 1e-5),
)


def test_one_device() -> None:
    plan = Plan.uniform("int8")
    timeline = qsync_fx.replay(plan, MLP)
    mapper = CostMapper(MLP.graph, MLP.drawn, plan)
    assert isinstance(timeline, Timeline)
    assert timeline.seconds == pytest.approx(mapper.seconds)
    totals = mapper.totals
    operators = timeline.by_operator()
    assert sum(operator.forward for operator in operators) == pytest.approx(totals.forward)
    assert sum(operator.casts for operator in operators) == pytest.approx(
        totals.casts + totals.casts_backward + totals.unpacking
    )
    assert timeline.waiting == {"cpu": 0}


def test_profile_contains_the_gradient_copy_speed() -> None:
    copying = replace(MLP, codecs=[CodecSpeed("qsgd8", 1e6, 1e6), CodecSpeed("fp32", 2e6, 1e6)])
    plans = dict.fromkeys(FLEET.devices, Plan.uniform("fp32"))
    fleet = qsync_fx.replay(plans, {"fast": MLP, "slow": copying}, cluster=FLEET).played.cluster
    assert [device.copies for device in fleet.devices.values()] == [None, 5e-7]
    without_copies = replace(
        FLEET, devices={name: replace(entry, copies=0.0) for name, entry in FLEET.devices.items()}
    )
    quick = qsync_fx.replay(plans, copying, cluster=without_copies)
    assert quick.seconds == qsync_fx.replay(plans, MLP, cluster=FLEET).seconds


def test_measured_copies_take_precedence_over_codec_copies() -> None:
    steps = Collective("gloo", 3, [(1024, 1e-3)], copies=7e-7)
    copying = replace(MLP, codecs=[CodecSpeed("fp32", 2e6, 1e6)], collectives=[steps])
    plans = dict.fromkeys(FLEET.devices, Plan.uniform("fp32"))
    fleet = qsync_fx.replay(plans, {"fast": copying, "slow": MLP}, cluster=FLEET).played.cluster
    assert [device.copies for device in fleet.devices.values()] == [7e-7, None]


def test_ranks_wait_for_buffers_with_profiled_links() -> None:
    sent = replace(MLP, collectives=[Collective("gloo", 3, [(1024, 1e-3)], buffers=0.25)])
    left = replace(MLP, collectives=[Collective("gloo", 3, [(1024, 1e-3)])])
    plans = dict.fromkeys(FLEET.devices, Plan.uniform("fp32"))
    unknown = replace(FLEET, network=None)
    longer, shorter = (
        qsync_fx.replay(plans, profile, cluster=unknown).seconds for profile in (sent, left)
    )
    assert longer == pytest.approx(shorter + 0.25)
    assert (
        qsync_fx.replay(plans, sent, cluster=FLEET).seconds
        == qsync_fx.replay(plans, left, cluster=FLEET).seconds
    )


def test_profiled_slowdown_of_concurrent_devices_applies() -> None:
    profile = replace(MLP, collectives=[Collective("gloo", 3, [(1024, 1e-3)], slowdown=1.5)])
    plans = dict.fromkeys(FLEET.devices, Plan.uniform("fp32"))
    unknown = replace(FLEET, network=None)
    profiled = qsync_fx.replay(
        plans, {"fast": profile, "slow": MLP}, cluster=unknown
    ).played.cluster
    assert [device.slowdown for device in profiled.devices.values()] == [1.5, 3.0]
    configured = qsync_fx.replay(
        plans, {"fast": profile, "slow": MLP}, cluster=FLEET
    ).played.cluster
    assert configured == FLEET


def test_a_fleet_with_a_plan_for_each() -> None:
    plans = {"fast": Plan.uniform("fp32"), "slow": Plan.uniform("int8")}
    timeline = qsync_fx.replay(plans, MLP, cluster=FLEET)
    assert list(timeline.waiting) == ["fast", "slow"]
    slow = 3 * CostMapper(MLP.graph, MLP.drawn, plans["slow"]).seconds
    fast = CostMapper(MLP.graph, MLP.drawn, plans["fast"]).seconds
    assert timeline.seconds > max(slow, fast)
    assert timeline.throughput == pytest.approx(12 / timeline.seconds)
    assert (
        qsync_fx.replay(plans, {"fast": MLP, "slow": MLP}, cluster=FLEET).seconds
        == timeline.seconds
    )


def test_gradients_of_a_graph_are_ready_together() -> None:
    small = Buckets(first_bytes=1, bytes=1)
    fleet = replace(FLEET, buckets=small)
    split = qsync_fx.replay(Plan.uniform("fp32"), MLP, cluster=fleet)
    joint = qsync_fx.replay(
        Plan.uniform("fp32"), MLP, cluster=replace(fleet, buckets=replace(small, whole_graphs=True))
    )
    assert len(split.played.buckets) == len(joint.played.buckets) == 6
    assert len(set(split.played.step.ready[0].tolist())) > 1
    assert len(set(joint.played.step.ready[0].tolist())) == 1
    assert joint.seconds > split.seconds


def test_a_cluster_from_a_file_and_links_from_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[devices.here]\ncount = 4")
    with pytest.raises(ProfileError, match="neither the link of 'here' nor"):
        qsync_fx.replay(Plan.uniform("fp32"), MLP, cluster=path)
    profile = Known(
        MLP.graph, MLP.drawn, [Collective("gloo", 4, [(8, 0.25), (1024, 0.5), (2**30, 1e3)], 0.25)]
    )
    timeline = qsync_fx.replay(Plan.uniform("fp32"), profile, cluster=path)
    (bucket,) = timeline.played.buckets
    duration = float(timeline.played.step.arrived[0] - timeline.played.step.sent[0])
    assert bucket.nbytes > 1024 and duration > 0.5
    assert timeline.played.cluster.network == Network(
        all_reduce=[(8, 0.25), (1024, 0.5), (2**30, 1e3)], ranks=4, busy=0.25, ring=True
    )
    assert duration == pytest.approx(
        float(timeline.played.cluster.all_reduce.seconds([bucket.nbytes], 4)[0])
    )


def test_codecs_use_the_transport_of_the_measured_backend() -> None:
    """`compress` chooses the same: messages with gloo, collectives with other backends."""
    exchanges = [
        Exchange("point_to_point", "all", 3, [(1.0, 5.0)]),
        Exchange("collective", "all", 3, [(1.0, 1.0)]),
    ]
    unknown = replace(FLEET, network=None)
    plan = ClusterPlan(
        dict.fromkeys(FLEET.devices, Plan.uniform("fp32")),
        codecs={MLP.graph.parameters[0].path: "qsgd8"},
    )
    for backends, transport in (
        (("gloo", "gloo"), "point_to_point"),
        (("nccl", "nccl"), "collective"),
        (("nccl", "gloo"), "point_to_point"),
    ):
        profiles = {
            name: replace(
                MLP, collectives=[Collective(backend, 3, [(8, 0.1)], exchanges=exchanges)]
            )
            for name, backend in zip(FLEET.devices, backends, strict=True)
        }
        network = qsync_fx.replay(plan, profiles, cluster=unknown).played.cluster.network
        assert network is not None
        assert (network.transport, network.exchanges) == (transport, exchanges)


def test_devices_of_the_catalog(tmp_path: Path) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512)
    )
    explained = qsync_fx.explain(model, torch.randn(256, 512), options={"target": "t4"})
    computed = DeviceTimes(qsync_fx.devices.get("t4"), build_model_graph(explained))
    path = tmp_path / "cluster.toml"
    path.write_text(
        "[devices.here]\n[devices.there]\ndevice = 't4'\nslowdown = 2.0\n[network]\nbandwidth = "
        "1e10"
    )
    timeline = qsync_fx.replay(Plan.uniform("fp16"), {"here": computed}, cluster=path)
    alone = qsync_fx.replay(Plan.uniform("fp16"), computed)
    assert timeline.seconds > 2 * alone.seconds > 0
    assert timeline.waiting["here"] > 0
    with pytest.raises(ProfileError, match="the model that 'there' trains is unknown"):
        qsync_fx.replay(
            Plan.uniform("fp16"), {}, cluster=Cluster({"there": ClusterDevice(device="t4")})
        )
    with pytest.raises(ProfileError, match="the profiles are for cpu, which may support"):
        qsync_fx.replay(Plan.uniform("fp32"), {"here": MLP}, cluster=path)


@pytest.mark.parametrize(
    ("plan", "profile", "cluster", "error", "says"),
    [
        (
            {"a": Plan(), "b": Plan()},
            MLP,
            None,
            ProfileError,
            "2 plans and 1 profile require a cluster",
        ),
        (Plan(), {}, None, ProfileError, "there is no profile with the durations of operators"),
        ({"fast": Plan()}, MLP, FLEET, ProfileError, "there is none for the devices 'slow'"),
        ({"fast": Plan(), "slwo": Plan()}, MLP, FLEET, ProfileError, "did you mean 'slow'"),
        (Plan(), {"fast": MLP}, FLEET, ProfileError, "there is none for the devices 'slow'"),
        (Plan(), object(), None, ProfileError, "is of type object, not a profile"),
        (Plan(), None, None, ProfileError, "is of type NoneType, not a profile"),
        ("int8", MLP, None, PlanError, "'int8' is a format, not a plan"),
        ("none.json", MLP, None, PlanError, "No such file"),
        (8, MLP, None, PlanError, "of type int is not a plan"),
        (Plan(operators={"nowhere/linear": "int8"}), MLP, None, PlanError, "nowhere"),
    ],
)
def test_missing_profile_is_an_error(
    plan: object, profile: object, cluster: Cluster | None, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        qsync_fx.replay(plan, profile, cluster=cluster)  # type: ignore[arg-type]


def test_plan_may_be_a_path(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan.uniform("int8").save(path)
    assert qsync_fx.replay(path, MLP).seconds == qsync_fx.replay(Plan.uniform("int8"), MLP).seconds
    both = qsync_fx.replay({"fast": Plan.uniform("fp32"), "slow": str(path)}, MLP, cluster=FLEET)
    assert (
        both.seconds
        == qsync_fx.replay(
            {"fast": Plan.uniform("fp32"), "slow": Plan.uniform("int8")}, MLP, cluster=FLEET
        ).seconds
    )


def test_a_profile_that_the_cluster_names_is_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[devices.here]\nprofile = 'none.json'")
    with pytest.raises(ProfileError, match="the profile cannot be read") as caught:
        qsync_fx.replay(Plan(), {}, cluster=path)
    assert str(tmp_path / "none.json") in str(caught.value.where)
