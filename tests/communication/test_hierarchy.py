"""Hierarchical reduction in processes over gloo: codecs between nodes, FP32 or a codec inside."""

from __future__ import annotations

import functools
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from qsync_fx import OptionError
from qsync_fx.communication.allreduce import NodeGroups
from qsync_fx.communication.codec_cost_model import coded, of_copy, uniform
from qsync_fx.communication.message_header import HEADER
from qsync_fx.devices.roofline import share
from qsync_fx.distributed.compress_gradients import CompressRequest, checked
from qsync_fx.distributed.node_topology import grouped, in_a_row
from qsync_fx.plan import ClusterPlan, Plan
from qsync_fx.plan.cluster_plan import TRANSPORT, between_nodes, nodes_noted
from qsync_fx.predictor.cost_mapper.times import Parameter
from qsync_fx.predictor.replayer.cluster import TRANSPORTS
from tests.support import tiers
from tests.support.communication.compressed_training import Network
from tests.support.processes import ranks

run = functools.partial(ranks.results, script="hierarchy_rank.py")


EXACT = ("fp32", "1bit*")
"""Codecs without random numbers that encode values in their layout: their means are known exactly.
"""


def predicted(codec: str, world: int, size: int, buckets: int) -> list[float]:
    """Return the predicted bytes that all ranks send between and inside nodes in five steps."""
    parameters = [Parameter(name, p.numel()) for name, p in Network().named_parameters()]
    nodes = world // size
    costs = coded(parameters, uniform(parameters, codec), world, of_copy(1e9, ""), size=size)
    # DistributedDataParallel rebuilds its buckets after the first step, and each has a header.
    across, inside = size * HEADER * (1 if nodes == 2 else nodes), size * HEADER
    return [
        nodes * share(nodes) * (5 * (costs.nbytes - across) + buckets * across),
        world * share(size) * (5 * (costs.inside - inside) + buckets * inside),
    ]


@tiers.ALL
@pytest.mark.parametrize(
    ("world", "size", "codecs"),
    [(4, 2, ["fp32", "fp16", "1bit", "1bit*", "qsgd8", "qsgd2"]), (6, 2, ["1bit*", "qsgd4"])],
)
def test_gradients_are_coded_between_nodes_alone(
    world: int, size: int, codecs: list[str], tmp_path: Path
) -> None:
    first, *others = run("codecs", world, tmp_path, size=size, codecs=codecs)
    for name in codecs:
        result = first[name]
        assert all(other[name]["weights"] == result["weights"] for other in others), name
        if name in EXACT:
            equal = [step for rank in (first, *others) for step in rank[name]["equal"]]
            assert equal == [[True, True]] * 2 * world, name
        wire, theory, raw, inside = result["wire"]
        headers = 36 * 2 * result["buckets"] * (world // size - 1)
        assert wire <= 1.03 * theory + headers + 40 * 6 * 9 * world, name
        assert inside >= raw, (
            "FP32 traffic inside nodes is at least the uncompressed traffic between nodes"
        )
        if name != "1bit":  # its message sizes depend on shapes
            sums = [[rank[name]["wire"][index] for rank in (first, *others)] for index in (0, 3)]
            assert [sum(item) for item in sums] == predicted(
                name, world, size, result["buckets"]
            ), name
        assert result["checks"] == 3
        assert "in FP32 within the node" in result["printed"]
        if name == "qsgd2":
            assert wire < 0.5 * raw


def holds_of_plans(first: Any, *others: Any) -> None:
    """Assert the nodes that ranks detect for planning, and their plan for the nodes of torchrun."""
    assert first["in a row"] == ["2 nodes of 2 ranks: 0, 1; 2, 3", False]
    assert first["torchrun"] == ["2 nodes of 2 ranks: 0, 2; 1, 3", False]
    assert all(
        first[name] == ["None", name == "uneven"]
        for name in ("one host", "uneven", "alone", "flat")
    )
    for name in ("one host", "uneven", "alone", "flat", "torchrun", "in a row", "notes"):
        assert all(other[name] == first[name] for other in others), name
    cluster = first["cluster"]
    assert cluster["devices"]["cpu"]["node"] == {"ranks": 2, "bandwidth": None, "latency": 0.0}
    network = cluster["network"]
    assert (network["ring"], network["transport"]) == (True, "point_to_point")
    groups = [(item["transport"], item["group"], item["ranks"]) for item in network["exchanges"]]
    assert groups == [
        ("point_to_point", "all", 4),
        ("collective", "all", 4),
        ("point_to_point", "inside", 2),
        ("point_to_point", "between", 2),
        ("collective", "inside", 2),
        ("collective", "between", 2),
    ]
    assert first["notes"] == "2 ranks"
    assert first["flat table"], "uncompressed all-reduces have the times measured over all ranks"
    across, inside = first["sent"]
    assert 0 < across < 0.3 * inside
    assert "replanning has no compression that uses them" in first["replanning"]["text"]


@tiers.ALL
def test_nodes_are_detected_and_planned(tmp_path: Path) -> None:
    first, *others = run("nodes", 4, tmp_path)
    assert all(other["resumed"] == first["resumed"] for other in others)
    assert first["resumed"][0] == first["resumed"][1]
    warned, stated = first["one host"]
    assert len(warned) == 1
    assert "not compressed" in warned[0]
    assert stated == ["1 nodes of 4 ranks: 0, 1, 2, 3"]
    assert first["torchrun"] == ["2 nodes of 2 ranks: 0, 2; 1, 3"]
    assert first["plan"] == [
        ["2 nodes of 2 ranks: 0, 2; 1, 3", "2 nodes of 2 ranks: 0, 1; 2, 3"],
        0,
    ]
    flat, larger = first["plan of others"]
    assert "for nodes of 2 ranks, but these nodes have 1" in flat
    assert "for nodes of 4 ranks, but these nodes have 2" in larger
    holds_of_plans(*(rank["planned"] for rank in (first, *others)))
    for name, text in {
        "unequal": "has 3 ranks, but",
        "number": "4 ranks cannot be divided into nodes of 3",
        "differ": "another hierarchy than",
        "aqgb": "AQGB cannot reduce inside nodes first: it chooses bits by the progress",
        "flat": "but gradients are sent with",
    }.items():
        assert text in first[name]["text"], name


def test_plan_records_the_scope_of_its_codecs() -> None:
    def asked(
        notes: dict[str, str], hierarchical: bool | int | None = None, codec: str = "qsgd8"
    ) -> CompressRequest:
        plan = ClusterPlan(
            {"all": Plan.uniform("fp32")}, notes=notes, codecs={"weight": codec} if codec else {}
        )
        return checked(plan, None, None, False, hierarchical, None, fsdp=False)

    for size, row in ((1, False), (4, False), (4, True), (12, True)):
        assert nodes_noted(between_nodes(size, row)) == (size, row)
    assert asked({}) == CompressRequest({"weight": "qsgd8"})
    assert asked(between_nodes(4)) == CompressRequest({"weight": "qsgd8"}, True, 4)
    assert asked(between_nodes(4, in_a_row=True)) == CompressRequest({"weight": "qsgd8"}, 4, 4)
    assert asked(between_nodes(4), 2) == CompressRequest({"weight": "qsgd8"}, 2, 4)
    assert asked(between_nodes(4), codec="") == CompressRequest({}, True, 4)
    assert asked(between_nodes(4), False) == CompressRequest({"weight": "qsgd8"}, False, 4)
    with pytest.warns(UserWarning, match="nodes of 4 ranks, but these nodes have 1"):
        asked(between_nodes(4)).warn(None, "collective")
    with pytest.warns(UserWarning, match="not compressed"):
        asked({}, True).warn(NodeGroups(((0, 1),)), "collective")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked(between_nodes(2)).warn(NodeGroups(((0, 1), (2, 3))), "collective")
        asked({}).warn(None, "collective")
        asked(between_nodes(4), codec="").warn(None, "collective")  # without codecs


TWO_LEVELS = {"hierarchical": 2, "inside": "qsgd8"}


@tiers.ALL
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("inside", ["fp32", "qsgd8"])
def test_two_levels_train_equal_replicas(inside: str, transport: str, tmp_path: Path) -> None:
    settings = {"hierarchical": 2, "inside": inside, "transport": transport}
    job = {"codecs": ["fp32", "qsgd8", "qsgd4", "1bit*"], "compress": settings}
    first, *others = run("codecs", 4, tmp_path, script="compressed_rank.py", **job)
    for name in job["codecs"]:
        assert all(other[name]["weights"] == first[name]["weights"] for other in others), name
        assert first[name]["checks"] == 3
        assert first[name]["distance"] < {"fp32": 1e-5, "qsgd8": 0.1}.get(name, 2)
        label = "FP32" if inside == "fp32" else inside
        assert f"in {label} within the node" in first[name]["printed"]


@tiers.ALL
def test_resumed_training_with_two_levels_is_bit_equal(tmp_path: Path) -> None:
    job = {"script": "compressed_rank.py", "where": str(tmp_path), "compress": TWO_LEVELS}
    first, *others = run("resumed", 4, tmp_path, **job)
    assert all(other == first for other in others)
    for codec, (expected, resumed, without) in first.items():
        assert resumed == expected != without, codec


@tiers.ALL
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_duo_reduces_in_two_levels(transport: str, tmp_path: Path) -> None:
    settings = {**TWO_LEVELS, "transport": transport}
    job = {"codecs": ["duo0", "duo1", "duo4"], "buckets": 0.02, "compress": settings}
    first, *others = run("elsewhere", 4, tmp_path, script="compressed_rank.py", **job)
    for name, result in first.items():
        assert result["kernels"] == result["operators"], name
        assert all(other[name]["kernels"] == result["kernels"] for other in others), name


@tiers.ALL
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sharded_models_reduce_in_two_levels(transport: str, tmp_path: Path) -> None:
    for inside in ("fp32", "qsgd8"):
        settings = {"hierarchical": 2, "inside": inside, "transport": transport}
        job = {"codecs": ["fp32", "qsgd8", "1bit*"], "compress": settings}
        for result in run("codecs", 4, tmp_path, script="sharded_rank.py", **job):
            assert result["fp32"]["apart"] < 1e-6
            assert result["qsgd8"]["apart"] < 3 / 127
            assert all(result[name]["finite"] for name in job["codecs"])
            wire, raw, theory = result["qsgd8"]["wire"]
            assert wire <= 1.03 * theory + 100 * result["qsgd8"]["buckets"]
            assert wire < 0.35 * raw
            assert "within the node" in result["qsgd8"]["printed"]
    settings = {**TWO_LEVELS, "transport": transport}
    job = {"script": "sharded_rank.py", "where": str(tmp_path), "compress": settings}
    for result in run("resumed", 4, tmp_path, **job):
        for codec, (expected, resumed, without) in result.items():
            assert resumed == expected != without, codec


@tiers.ALL
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_error_feedback_is_lost_when_codecs_between_nodes_change(
    transport: str, tmp_path: Path
) -> None:
    for result in run("changes", 4, tmp_path, compress={"transport": transport}):
        assert result["lost"] > 1e-3, "error feedback is pending before the change to FP32"
        assert result["unexplained"] < 1e-5


@tiers.EVERY
def test_replanning_changes_codecs_between_nodes(tmp_path: Path) -> None:
    first, *others = run("replanned", 4, tmp_path, seconds=500)
    assert all(other["weights"] == first["weights"] for other in others)
    assert first["before"] == {}
    assert set(first["after"].values()) == {"qsgd8/qsgd8"}, "both levels use qsgd8"
    assert first["report"] == "a plan's qsgd8/qsgd8"
    assert first["groups"] == [["all", 4], ["inside", 2], ["between", 2]]
    assert first["notes"] == ["2 ranks in a row", "point_to_point"]
    assert first["layout"].startswith("2 nodes of 2 ranks: 0, 1; 2, 3; Qsgd(")
    assert first["inside"] > 0
    assert "the plan assumes nodes of 2 ranks, but compression has none" in first["flat"]["text"]


def test_codec_inside_nodes_without_nodes_is_an_error() -> None:
    with pytest.raises(OptionError, match="not reduced inside nodes first"):
        checked("qsgd4", None, None, False, None, None, fsdp=False, inside="qsgd8")
    for codec in ("1bit", "1bit*", "aqgb12", None):
        with pytest.raises(OptionError, match="must code consecutive values without error"):
            checked("qsgd4", None, None, False, True, None, fsdp=False, inside=codec)
    with pytest.raises(OptionError, match="shards are cut over all ranks") as caught:
        checked("duo4", None, None, True, True, None, fsdp=False)
    assert "remove sharded=..." in (caught.value.do or "")
    with pytest.raises(OptionError, match="AQGB cannot reduce inside nodes first") as caught:
        checked("aqgb", None, None, False, True, None, fsdp=False)
    assert "aqgb16" in (caught.value.do or "")
    assert checked("aqgb16", None, None, False, True, None, fsdp=False).hierarchical


def test_plan_of_two_levels_requires_nodes() -> None:
    plan = ClusterPlan({"all": Plan.uniform("fp32")}, codecs={"weight": "qsgd4/qsgd8"})

    def asked(hierarchical: bool | int | None = None, inside: str = "fp32") -> CompressRequest:
        return checked(plan, None, None, False, hierarchical, None, False, inside)

    assert asked(True) == CompressRequest({"weight": "qsgd4/qsgd8"}, True)
    for hierarchical in (None, False):
        with pytest.raises(OptionError, match="codes gradients inside nodes, but they are not"):
            asked(hierarchical)
    with pytest.raises(OptionError, match="a plan defines the codecs inside nodes") as caught:
        asked(True, "qsgd8")
    assert "inside_codecs=" in (caught.value.do or "")
    with pytest.warns(UserWarning, match="so only the codec inside nodes is used"):
        asked(True).warn(NodeGroups(((0, 1),)), "collective")


def test_plan_for_another_transport_is_reported_once() -> None:
    def asked(notes: dict[str, str], codec: str = "qsgd8") -> CompressRequest:
        codecs = {"weight": codec} if codec else {}
        plan = ClusterPlan({"all": Plan.uniform("fp32")}, notes=notes, codecs=codecs)
        return checked(plan, None, None, False, None, None, fsdp=False)

    for transport, other in itertools.permutations(TRANSPORTS):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            asked({TRANSPORT: transport}).warn(None, other)
        (text,) = (str(item.message) for item in caught)
        assert f"chosen for the transport {transport!r}, but gradients are sent with" in text
        assert f"Pass transport={transport!r} to compress" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for notes, codec in (({TRANSPORT: "collective"}, "qsgd8"), ({}, "qsgd8"), ({}, "")):
            asked(notes, codec).warn(None, "collective")
        asked({TRANSPORT: "point_to_point"}, "").warn(None, "collective")  # without codecs


@tiers.ALL
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_plan_of_two_levels_trains_as_its_codecs_alone(transport: str, tmp_path: Path) -> None:
    """Each parameter has the same gradient as with `compress(codec, inside=...)`."""
    for result in run("two_levels", 4, tmp_path, transport=transport):
        assert result["equal"] == [True, True]
        assert result["statement"] == result["expected"]
        assert "in FP32 and qsgd8 within the node" in result["printed"]
        messages = [text for text in result["warned"] if "chosen for the transport" in text]
        assert len(messages) == (transport == "collective")
        assert "has another tensor codec than rank" in result["differ"]["text"]
        assert "inside nodes" in result["differ"]["text"]


@tiers.ALL
def test_corrupt_message_inside_a_node_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for result in run("harmed", 4, tmp_path):
        assert result["kind"] == "RankError"
        assert (
            "rank 2 cannot read the message of rank 3 for bucket 1 of step 2: its" in result["text"]
        )


@given(names=st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_nodes_hold_each_rank_once(names: list[str]) -> None:
    sizes = {names.count(name) for name in names}
    if len(sizes) > 1:
        with pytest.raises(OptionError, match="ranks, but"):
            grouped(names)
        return
    groups = grouped(names)
    assert (groups is None) == (sizes == {1})
    if groups is not None:
        assert sorted(rank for node in groups.ranks for rank in node) == list(range(len(names)))
        for rank in range(len(names)):
            assert {names[other] for other in groups.node_of(rank)} == {names[rank]}
            across = groups.across(rank)
            assert len({names[other] for other in across}) == len(across) == len(set(names))
            assert {groups.across(other) for other in across} == {across}


def test_ranks_in_a_row() -> None:
    assert in_a_row(2, 6) == ["0", "0", "1", "1", "2", "2"]
    for size in (0, -1, 4):
        with pytest.raises(OptionError, match="cannot be divided into nodes"):
            in_a_row(size, 6)
