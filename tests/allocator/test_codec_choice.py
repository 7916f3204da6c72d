"""Codecs in `find_plan`: the variance that they add, the codecs of the plan, and its notes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx import Cluster, OptionError, ProfileError, Sensitivity
from qsync_fx.allocator import PlanEvaluator, PlanNoteKind
from qsync_fx.communication.codecs import Draw, codec_named
from qsync_fx.communication.message_header import HEADER
from qsync_fx.plan import ClusterPlan, Plan
from qsync_fx.plan.cluster_plan import BETWEEN_NODES, TRANSPORT, levels_of
from qsync_fx.predictor.cost_mapper.times import Times
from qsync_fx.predictor.indicator.sensitivity_map import SENSITIVITY
from qsync_fx.predictor.memory import ADAM
from qsync_fx.predictor.replayer.cluster import (
    Buckets,
    ClusterDevice,
    Compression,
    Exchange,
    Network,
    Node,
    RankGroup,
)
from qsync_fx.profiler.sensitivity.gradient_step import of_gradients
from tests.support.planning.allocation_problems import PlainTimes, drawn_sensitivity
from tests.support.planning.predicted_models import graph_of


class Known:
    """Profile substitute with random times."""

    optimizer_memory = ADAM

    def __init__(self, sensitivity: Sensitivity) -> None:
        self.graph, self.sensitivity = graph_of("mlp"), sensitivity
        self.precisions = ["fp32", "bf16"]

    def times(self) -> Times:
        return PlainTimes(0)


def known(share: float = 1e-3) -> Known:
    sensitivity = drawn_sensitivity(graph_of("mlp"))
    gradients = {p.path: {"qsgd8": share, "qsgd4": 20 * share} for p in graph_of("mlp").parameters}
    return Known(replace(sensitivity, gradients=gradients))


def fleet(bandwidth: float, count: int = 4) -> Cluster:
    return Cluster({"all": ClusterDevice(count)}, Network(bandwidth, 1e-6))


def test_plan_contains_the_codec_of_each_parameter(tmp_path: Path) -> None:
    answer = qsync_fx.find_plan(
        known(), fleet(1e4), objective="fastest", budget=1e3, codecs=("qsgd8", "qsgd4")
    )
    assert set(answer.evaluation.codecs) <= {"fp32", "qsgd8", "qsgd4"}
    assert answer.codecs
    assert set(answer.codecs.values()) <= {"qsgd8", "qsgd4"}
    assert answer.evaluation.coding > 0
    assert "codecs add" in str(answer) and "12 GB/s for copies by one core" in str(answer)
    answer.save(tmp_path / "plan.json")
    plan = ClusterPlan.load(tmp_path / "plan.json")
    assert plan.codecs == answer.codecs
    again = qsync_fx.replay(plan, known(), cluster=fleet(1e4))
    assert again.seconds == pytest.approx(answer.evaluation.seconds)
    plain = qsync_fx.find_plan(known(), fleet(1e4), objective="fastest", budget=1e3)
    assert plain.evaluation.seconds > answer.evaluation.seconds
    assert isinstance(plain.as_plan(), Plan)
    assert [note.device for note in plain.notes if note.kind is PlanNoteKind.WAITS] == ["all"]


class Words(nn.Module):
    """Classifier of texts, whose gradients have tails of different weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4096, 32)
        self.layers = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 128))

    def forward(self, texts: Tensor) -> Tensor:
        result: Tensor = self.layers(self.words(texts)).mean(1)
        return result


def test_rotation_is_chosen_only_where_it_lowers_the_variance() -> None:
    torch.manual_seed(0)
    model, codecs = Words(), ("qsgd4", "qsgd4h")
    texts, labels = torch.randint(4096, (4, 64)), torch.randint(128, (4,))

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    sensitivity = qsync_fx.sensitivity(
        model, step, [(texts, labels)], "paper", ("fp32",), steps=1, progress=False
    )
    profile = qsync_fx.catalog_profile("t4", model, step, (texts, labels))
    cluster = Cluster({"t4": ClusterDevice(4)}, Network(1e6, 1e-6), Buckets(5e4, 5e4))
    request = {"sensitivity": sensitivity, "codecs": codecs, "precisions": ("fp32",)}
    fastest = qsync_fx.find_plan(
        {"t4": profile}, cluster, objective="fastest", budget=1e9, **request
    )
    assert set(fastest.codecs.values()) == {"qsgd4"}, "qsgd4 is faster than qsgd4h"
    limit = 1.01 * fastest.evaluation.seconds
    answer = qsync_fx.find_plan({"t4": profile}, cluster, target=limit, **request)
    assert answer.codecs["layers.0.weight"] == "qsgd4h"
    assert answer.codecs["layers.2.weight"] == "qsgd4"
    options = PlanEvaluator(answer.problem, answer.plans).options
    for codec, variance in zip(answer.evaluation.codecs, options.variance, strict=True):
        assert codec == "fp32" or codec == min(codecs, key=variance.__getitem__)


def test_fast_link_selects_no_codec() -> None:
    answer = qsync_fx.find_plan(
        known(), fleet(1e14), objective="fastest", budget=1e3, codecs=("qsgd8",)
    )
    assert not answer.codecs
    assert answer.evaluation.coding == 0
    assert isinstance(answer.as_plan(), Plan)
    assert not any(note.kind is PlanNoteKind.WAITS for note in answer.notes)


def test_codecs_apply_to_the_traffic_between_nodes(
    tmp_path: Path,
) -> None:
    nodes = replace(fleet(1e4, 8), devices={"all": ClusterDevice(8, node=Node(4, 1e12))})
    request = {"objective": "fastest", "budget": 1e3, "codecs": ("qsgd8",)}
    answer, flat = (
        qsync_fx.find_plan(known(), cluster, **request) for cluster in (nodes, fleet(1e4, 2))
    )  # type: ignore[arg-type]
    assert answer.codecs == flat.codecs
    assert answer.evaluation.coding == pytest.approx(flat.evaluation.coding), (
        "coding on two nodes takes as long as on two ranks"
    )
    heads = 3 * HEADER * len(answer.evaluation.codecs) / 1e4
    assert answer.evaluation.seconds == pytest.approx(flat.evaluation.seconds + heads, rel=1e-4), (
        "the four ranks of a node send the bytes of one rank, with four headers"
    )
    assert PlanNoteKind.BETWEEN_NODES in {note.kind for note in answer.notes}
    assert "hierarchical=True" in str(answer)
    answer.save(tmp_path / "plan.json")
    plan = ClusterPlan.load(tmp_path / "plan.json")
    assert plan.notes == {BETWEEN_NODES: "4 ranks", TRANSPORT: "point_to_point"}
    assert qsync_fx.replay(plan, known(), cluster=nodes).seconds == pytest.approx(
        answer.evaluation.seconds
    )
    single = replace(nodes, devices={"all": ClusterDevice(4, node=Node(4, 1e12))})
    on_one_node = qsync_fx.find_plan(known(), single, **request)  # type: ignore[arg-type]
    assert not on_one_node.codecs
    assert {note.kind for note in on_one_node.notes} & {
        PlanNoteKind.ONE_NODE,
        PlanNoteKind.WAITS,
    } == {PlanNoteKind.ONE_NODE}


def test_slow_links_inside_nodes_select_codecs_of_two_levels(tmp_path: Path) -> None:
    request = {"codecs": ("qsgd8", "qsgd4"), "inside_codecs": ("qsgd8", "fp32")}
    fastest = {"objective": "fastest", "budget": 1e3}
    devices = {"all": ClusterDevice(8, node=Node(4, 1e4))}
    nodes = Cluster(devices, Network(1e4, 1e-6, transport="collective"))
    answer = qsync_fx.find_plan(known(), nodes, **fastest, **request)  # type: ignore[arg-type]
    plain = qsync_fx.find_plan(known(), nodes, codecs=("qsgd8", "qsgd4"), **fastest)  # type: ignore[arg-type]
    assert {levels_of(codec)[1] for codec in answer.codecs.values()} == {"qsgd8"}
    assert not any("/" in codec for codec in plain.codecs.values())
    assert answer.evaluation.seconds < 0.6 * plain.evaluation.seconds
    assert PlanNoteKind.TWO_LEVELS in {note.kind for note in answer.notes}
    answer.save(tmp_path / "plan.json")
    plan = ClusterPlan.load(tmp_path / "plan.json")
    assert plan.codecs == answer.codecs
    assert plan.notes == {BETWEEN_NODES: "4 ranks", TRANSPORT: "collective"}
    again = qsync_fx.replay(plan, known(), cluster=nodes)
    assert again.seconds == pytest.approx(answer.evaluation.seconds)
    with pytest.raises(ProfileError, match="codes gradients inside nodes, but each device"):
        qsync_fx.replay(plan, known(), cluster=fleet(1e4, 8))
    flat = qsync_fx.find_plan(known(), fleet(1e4), **fastest, **request)  # type: ignore[arg-type]
    assert PlanNoteKind.NOT_INSIDE in {note.kind for note in flat.notes}
    assert set(flat.codecs.values()) <= {"qsgd8", "qsgd4"}
    fast = replace(nodes, devices={"all": ClusterDevice(8, node=Node(4, 1e12))})
    limit = 1.2 * qsync_fx.find_plan(known(), fast, **fastest, **request).evaluation.seconds  # type: ignore[arg-type]
    calmest = qsync_fx.find_plan(known(), fast, target=limit, **request)  # type: ignore[arg-type]
    assert {levels_of(codec)[1] for codec in calmest.codecs.values()} == {"fp32"}


def test_invalid_codecs_inside_nodes_are_reported() -> None:
    with pytest.raises(OptionError, match="no codec '1bit\\*' inside nodes, where"):
        qsync_fx.find_plan(known(), fleet(1e4), codecs=("qsgd8",), inside_codecs=("1bit*",))
    with pytest.raises(OptionError, match="only with codecs between nodes") as caught:
        qsync_fx.find_plan(known(), fleet(1e4), inside_codecs=("qsgd8",))
    assert "add codecs=" in (caught.value.do or "")


def test_nodes_shared_by_classes_suppress_single_class_notes() -> None:
    """Three ranks of one class and one of the other fill two nodes; three alone do not."""
    table, node = [(1e3, 1e-3), (1e6, 1.0)], Node(2)
    groups: tuple[RankGroup, ...] = ("inside", "between")
    exchanges = [Exchange("point_to_point", group, 2, table) for group in groups]
    shared = Cluster(
        {"all": ClusterDevice(3, node=node), "other": ClusterDevice(1, node=node)},
        Network(all_reduce=table, exchanges=exchanges),
    )
    answer = qsync_fx.find_plan({"all": known(), "other": known()}, shared, codecs=("qsgd8",))
    kinds = {note.kind for note in answer.notes}
    assert not kinds & {PlanNoteKind.JOINS, PlanNoteKind.DOES_NOT_HELP}
    pair = ClusterDevice(2, node=node)
    even = replace(shared, devices={"all": pair, "other": pair})
    kinds = {
        note.kind for note in qsync_fx.find_plan({"all": known(), "other": known()}, even).notes
    }
    assert kinds & {PlanNoteKind.JOINS, PlanNoteKind.DOES_NOT_HELP}


def test_missing_codec_inputs_are_reported() -> None:
    with pytest.raises(OptionError, match="a plan has no codec 'qsgd5'"):
        qsync_fx.find_plan(known(), fleet(1e4), codecs=("qsgd5",))
    bare = Known(drawn_sensitivity(graph_of("mlp")))
    with pytest.raises(ProfileError, match="variance of codecs for the gradient of") as caught:
        qsync_fx.find_plan(bare, fleet(1e4), codecs=("qsgd8",))
    assert "measure it again" in (caught.value.do or "")
    with pytest.raises(ProfileError, match="variance that 'qsgd2' adds to gradients is unknown"):
        qsync_fx.find_plan(known(), fleet(1e4), codecs=("qsgd2",))
    compressed = replace(fleet(1e4), compression=Compression(ratio=0.5))
    with pytest.raises(ProfileError, match="the cluster already has a compression"):
        qsync_fx.find_plan(known(), compressed, codecs=("qsgd8",))
    alone = qsync_fx.find_plan(known(), objective="fastest", codecs=("qsgd8",))
    assert PlanNoteKind.NOT_SENT in {note.kind for note in alone.notes}


def sent(codec: str, values: Tensor, seed: int, stream: int) -> Tensor:
    spec = codec_named(codec)
    wire, decoded = (
        torch.empty(spec.nbytes(values.numel()), dtype=torch.uint8),
        torch.empty_like(values),
    )
    spec.encode(values, wire, Draw(seed, stream))
    spec.decode(wire, decoded)
    return decoded


@pytest.mark.parametrize("codec", ["qsgd8", "qsgd4"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_variance_of_the_mean_equals_the_added_variance(codec: str, ranks: int) -> None:
    """All ranks have the same gradient, so the mean is as large. The mean is at or between code
    points, so coding it again adds slightly less variance than coding a gradient.
    """
    parameter = graph_of("mlp").parameters[0]
    gradient = torch.randn(parameter.numel, generator=torch.Generator().manual_seed(0))
    gradients = {p.path: {codec: 0.0} for p in graph_of("mlp").parameters}
    gradients[parameter.path] = of_gradients({parameter.path: gradient})[parameter.path]
    profile = Known(replace(drawn_sensitivity(graph_of("mlp")), gradients=gradients))
    answer = qsync_fx.find_plan(
        profile, fleet(1e3, ranks), objective="fastest", budget=1e6, codecs=(codec,)
    )
    evaluator = PlanEvaluator(answer.problem, answer.plans)
    errors = []
    for seed in range(300):
        mean = torch.stack([sent(codec, gradient, seed, rank) for rank in range(ranks)]).mean(0)
        errors.append(
            float(
                ((sent(codec, mean, seed, ranks) if ranks > 2 else mean) - gradient)
                .double()
                .square()
                .sum()
            )
        )
    added = evaluator.options.added((codec,) * len(evaluator.buckets))
    measured = sum(errors) / len(errors)
    assert (1.0 if ranks == 2 else 0.8) * added == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("nodes", [2, 3])
def test_variance_of_two_levels_covers_both_roundings(nodes: int) -> None:
    """All ranks have the same gradient. It is coded inside, between and inside nodes again.

    As above, coding a coded mean adds less variance than coding a gradient.
    """
    parameter, size = graph_of("mlp").parameters[0], 2
    gradient = torch.randn(parameter.numel, generator=torch.Generator().manual_seed(0))
    gradients = {p.path: {"qsgd4": 0.0, "qsgd2": 0.0} for p in graph_of("mlp").parameters}
    gradients[parameter.path] = of_gradients({parameter.path: gradient})[parameter.path]
    profile = Known(replace(drawn_sensitivity(graph_of("mlp")), gradients=gradients))
    cluster = Cluster({"all": ClusterDevice(nodes * size, node=Node(size, 1e3))}, Network(1e3))
    answer = qsync_fx.find_plan(
        profile,
        cluster,
        objective="fastest",
        budget=1e6,
        codecs=("qsgd4",),
        inside_codecs=("qsgd2",),
    )
    options, errors = PlanEvaluator(answer.problem, answer.plans).options, []
    for seed in range(300):
        means = [
            torch.stack([sent("qsgd2", gradient, seed, size * node + rank) for rank in range(size)])
            for node in range(nodes)
        ]
        values = [sent("qsgd4", mean.mean(0), seed, 10 + node) for node, mean in enumerate(means)]
        result = torch.stack(values).mean(0)
        if nodes > 2:
            result = sent("qsgd4", result, seed, 20)
        result = sent("qsgd2", result, seed, 21)
        errors.append(float((result - gradient).double().square().sum()))
    both, between = (
        options.added((codec,) * len(options.coded)) for codec in ("qsgd4/qsgd2", "qsgd4")
    )
    variances = gradients[parameter.path]
    assert between == pytest.approx(variances["qsgd4"] * (1 / nodes + (nodes > 2)))
    assert both - between == pytest.approx(variances["qsgd2"] * (1 / (nodes * size) + 1))
    assert sum(errors) / len(errors) == pytest.approx(both, rel=0.35)


def test_sensitivity_contains_codec_variance_by_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5))
    batches = [torch.randn(16, 40)]

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        result: Tensor = model(batch).square().mean()
        return result

    result = qsync_fx.sensitivity(model, step, batches, precisions=("bf16",), steps=1, fraction=1.0)
    step(model, batches[0]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        variances = result.gradients[name]
        assert (
            variances["qsgd2"] > variances["qsgd4"] > variances["qsgd8"] > variances["qsgd16"] > 0
        )
        flat = parameter.grad.flatten()
        errors = [
            float((sent("qsgd4", flat, seed, 0) - flat).double().square().sum())
            for seed in range(400)
        ]
        assert variances["qsgd4"] == pytest.approx(sum(errors) / len(errors), rel=0.1)
        assert variances["bf16"] == pytest.approx(
            float((flat.bfloat16().float() - flat).double().square().sum()), rel=1e-3
        )
    assert SENSITIVITY.decode(result.to_json()) == result


def test_codec_variance_requires_no_extra_step() -> None:
    calls = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        calls.append(batch)
        result: Tensor = model(batch).square().mean()
        return result

    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5))
    result = qsync_fx.sensitivity(model, step, [torch.randn(16, 40)], "paper", ("bf16",), steps=1)
    assert result.gradients.keys() == dict(model.named_parameters()).keys()
    assert len(calls) == 2, "one step captures the graphs, one computes the sensitivity"


def test_stretches_of_a_large_gradient_stand_for_all_of_it() -> None:
    values = torch.randn(3_000_000, generator=torch.Generator().manual_seed(1))
    variances = of_gradients({"w": values})["w"]
    for codec in ("qsgd8", "1bit*"):
        assert variances[codec] == pytest.approx(codec_named(codec).variance(values), rel=0.03)
    assert of_gradients({"w": torch.tensor([1.0, float("nan")])}) == {}
