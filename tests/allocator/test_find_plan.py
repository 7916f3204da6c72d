"""`find_plan`: plans for each objective from profiles, profile files and the catalog, and its
errors.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx import Cluster, OptionError, Plan, PlanError, ProfileError, QSyncError, Sensitivity
from qsync_fx.allocator import PlanNote, PlanNoteKind, PlanResult, evaluate_plan
from qsync_fx.allocator.milp.milp_allocator import MilpAllocator
from qsync_fx.devices import get
from qsync_fx.distributed.compress_gradients import checked as asked_of
from qsync_fx.formatting import duration
from qsync_fx.plan import ClusterPlan
from qsync_fx.predictor.cost_mapper.times import Times
from qsync_fx.predictor.memory import ADAM, OptimizerMemory
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.predictor.replayer.cluster import ClusterDevice, Network
from qsync_fx.profiler.profile import Profile
from tests.support import tiers
from tests.support.planning.allocation_problems import PlainTimes, drawn_sensitivity
from tests.support.planning.predicted_models import graph_of


class Known:
    """Profile substitute with random times."""

    optimizer_memory: OptimizerMemory | None = ADAM

    def __init__(self, name: str, seed: int, sensitivity: Sensitivity | None = None) -> None:
        self.graph: ModelGraph = graph_of(name)
        self.precisions = ["fp32", "bf16", "int8"]
        self.sensitivity, self._seed = sensitivity, seed

    def times(self) -> Times:
        return PlainTimes(self._seed)


MLP = Known("mlp", 0, drawn_sensitivity(graph_of("mlp")))
OTHER = Known("mlp", 1)
FLEET = Cluster(
    {"fast": ClusterDevice(count=2), "slow": ClusterDevice(count=2, slowdown=3.0)},
    Network(1e7, 1e-5),
)


def kinds(answer: PlanResult) -> dict[PlanNoteKind, list[PlanNote]]:
    notes: dict[PlanNoteKind, list[PlanNote]] = {}
    for note in answer.notes:
        notes.setdefault(note.kind, []).append(note)
    return notes


def test_hybrid_preserves_the_fastest_class_and_the_low_precision_step() -> None:
    answer = qsync_fx.find_plan({"fast": MLP, "slow": OTHER}, FLEET)
    assert set(answer.plans["fast"].values()) == {"fp32"}
    assert [note.device for note in kinds(answer)[PlanNoteKind.KEEPS]] == ["fast"]
    lowest = evaluate_plan(answer.problem, answer.problem.uniform())
    assert answer.problem.seconds == lowest.seconds >= answer.evaluation.seconds * (1 - 1e-9)
    assert answer.evaluation.variance <= lowest.variance
    assert answer.gap is not None
    assert answer.gap < 1e-3
    # Other limits: the step time of a uniform plan, and a number of seconds.
    bf16 = qsync_fx.find_plan({"fast": MLP, "slow": OTHER}, FLEET, target="bf16")
    assert (
        bf16.problem.seconds
        == evaluate_plan(answer.problem, answer.problem.uniform("bf16")).seconds
    )
    ample = qsync_fx.find_plan({"fast": MLP, "slow": OTHER}, FLEET, target=1.0)
    assert ample.evaluation.variance == 0
    assert PlanNoteKind.BINDS not in kinds(ample)


def test_fastest_stays_within_the_variance_of_a_format() -> None:
    answer = qsync_fx.find_plan(MLP, objective="fastest", budget="bf16")
    bf16 = evaluate_plan(answer.problem, answer.problem.uniform("bf16"))
    assert answer.evaluation.variance <= bf16.variance * (1 + 1e-9)
    assert answer.evaluation.seconds <= bf16.seconds
    assert qsync_fx.find_plan(MLP, objective="fastest") == answer
    free = qsync_fx.find_plan(MLP, objective="fastest", budget=float("inf"))
    assert free.evaluation.seconds <= answer.evaluation.seconds
    assert isinstance(answer.as_plan(), Plan)


def test_recovery_is_open_on_all_classes() -> None:
    answer = qsync_fx.find_plan({"fast": MLP, "slow": OTHER}, FLEET, objective="recover")
    assert answer.problem.open == ("fast", "slow")
    mixed = evaluate_plan(answer.problem, answer.problem.uniform("bf16"))
    assert answer.evaluation.seconds <= mixed.seconds * (1 + 1e-9)
    assert answer.evaluation.variance <= mixed.variance
    with pytest.raises(PlanError, match="budget of recovery is a format"):
        qsync_fx.find_plan(MLP, objective="recover", budget=0.5)


def test_memory_is_a_limit() -> None:
    profile = replace(reckoned("t4"), sensitivity=drawn_sensitivity(reckoned("t4").graph))
    free = qsync_fx.find_plan(profile, target=1.0)
    peak = free.evaluation.classes["t4"].peak_bytes
    assert peak
    tight = qsync_fx.find_plan(profile, target=1.0, memory={"t4": peak * 0.9})
    assert (tight.evaluation.classes["t4"].peak_bytes or 0) <= peak * 0.9
    assert tight.evaluation.variance > free.evaluation.variance
    percent = qsync_fx.find_plan(
        profile, Cluster({"t4": ClusterDevice(memory=2.0 * peak)}), target=1.0, memory="50%"
    )
    assert percent.problem.classes["t4"].memory == peak
    shared = qsync_fx.find_plan(profile, Cluster({"t4": ClusterDevice(memory="30%")}), target=1.0)
    assert shared.problem.classes["t4"].memory == pytest.approx(
        0.3 * qsync_fx.devices.get("t4").memory.bytes
    )
    assert (
        qsync_fx.find_plan(MLP, target=1.0, memory="1.5 GiB").problem.classes["cpu"].memory
        == 1.5 * 2**30
    )
    for memory, message in (
        ("all", "is no memory"),
        ("30%", "is not known"),
        ({"gpu": 1}, "no devices 'gpu'"),
    ):
        with pytest.raises(PlanError, match=message):
            qsync_fx.find_plan(MLP, memory=memory)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"takes .* MB at least, .* MB more than allowed"):
        qsync_fx.find_plan(MLP, memory=100)


def test_plans_are_saved_for_one_device_and_for_a_cluster(tmp_path: Path) -> None:
    both = qsync_fx.find_plan({"fast": MLP, "slow": OTHER}, FLEET)
    both.save(tmp_path / "cluster.json")
    loaded = ClusterPlan.load(tmp_path / "cluster.json")
    assert {name: loaded.classes[name] for name in loaded.classes} == both.to_plans()
    alone = qsync_fx.find_plan(MLP)
    alone.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == alone.plan()
    assert qsync_fx.Options.parse({"plan": alone}).plan == alone.plan()
    assert qsync_fx.Options.parse({"plan": both, "device_class": "slow"}).plan == both.plan("slow")


def test_result_is_accepted_as_a_plan() -> None:
    """The result of `find_plan` works in replay, `switch_plan`, gradient hooks and `measure`."""
    alone = qsync_fx.find_plan(MLP, objective="fastest", budget="bf16")
    assert qsync_fx.replay(alone, MLP).seconds == qsync_fx.replay(alone.plan(), MLP).seconds
    fleet = qsync_fx.find_plan({"fast": MLP, "slow": OTHER}, FLEET)
    profiles = {"fast": MLP, "slow": OTHER}
    assert qsync_fx.replay(fleet, profiles, cluster=FLEET).seconds == pytest.approx(
        fleet.evaluation.seconds
    )
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="qsync")
    planned = qsync_fx.find_plan(
        Known("broken", 0, drawn_sensitivity(graph_of("broken"))),
        objective="fastest",
        budget="bf16",
    )
    assert qsync_fx.switch_plan(compiled, planned) is compiled
    assert asked_of(fleet, None, None, False, None, None, False).scheme == fleet.codecs
    with pytest.raises(PlanError, match="is not a plan for one device"):
        qsync_fx.measure(
            nn.Linear(2, 2), lambda model, x: model(x).sum(), [torch.ones(1, 2)], plan=fleet
        )


def test_useless_device_is_reported_with_numbers() -> None:
    crawling = Cluster(
        {"fast": ClusterDevice(), "slow": ClusterDevice(slowdown=100.0)}, Network(1e7, 1e-5)
    )
    (note,) = kinds(qsync_fx.find_plan({"fast": MLP, "slow": OTHER}, crawling))[
        PlanNoteKind.DOES_NOT_HELP
    ]
    assert note.device == "slow"
    assert note.numbers["samples a second"] < note.numbers["without it"]
    linked = Cluster(
        {"fast": ClusterDevice(count=2), "slow": ClusterDevice(count=2, slowdown=1.1)},
        Network(1e12),
    )
    (note,) = kinds(qsync_fx.find_plan({"fast": MLP, "slow": MLP}, linked))[PlanNoteKind.JOINS]
    assert note.numbers["samples a second"] > note.numbers["without it"]


def test_operators_stay_wide_without_a_faster_format() -> None:
    answer = qsync_fx.find_plan(MLP, target="fp32")
    notes = kinds(answer)[PlanNoteKind.NOT_FASTER]
    for note in notes:
        wide = dict(answer.plans["cpu"])
        for fmt in answer.problem.classes["cpu"].choices[note.operator]:
            if fmt != wide[note.operator]:
                changed = {"cpu": {**wide, note.operator: fmt}}
                assert (
                    evaluate_plan(answer.problem, changed).seconds
                    >= answer.evaluation.seconds - 1e-12
                )


def test_missing_input_is_named() -> None:
    with pytest.raises(ProfileError, match="no profile contains how much"):
        qsync_fx.find_plan(OTHER)
    sensitivity = drawn_sensitivity(graph_of("mlp"))
    assert qsync_fx.find_plan(OTHER, sensitivity=sensitivity).plans
    poor = replace(
        sensitivity,
        variance={
            op: {"int8": variances["int8"]} for op, variances in sensitivity.variance.items()
        },
    )
    answer = qsync_fx.find_plan(OTHER, sensitivity=poor)
    assert [note.formats for note in kinds(answer)[PlanNoteKind.LEFT_OUT]] == [("bf16",)]
    with pytest.raises(ProfileError, match=r"sensitivity of .* in 'bf16' is unknown"):
        qsync_fx.find_plan(OTHER, sensitivity=poor, precisions=["fp32", "bf16"])
    with pytest.raises(PlanError, match="no objective 'fast'"):
        qsync_fx.find_plan(MLP, objective="fast")
    with pytest.raises(OptionError, match="no allocator 'exakt'"):
        qsync_fx.find_plan(MLP, allocator="exakt")
    with pytest.raises(ProfileError, match="require a cluster"):
        qsync_fx.find_plan({"fast": MLP, "slow": OTHER})
    assert qsync_fx.find_plan(MLP, allocator=MilpAllocator()) == qsync_fx.find_plan(MLP)


@pytest.mark.parametrize(
    ("wishes", "where"),
    [
        ({"objective": "fastest", "target": "int8"}, "target"),
        ({"objective": "hybrid", "budget": 0.5}, "budget"),
        ({"objective": "recover", "budget": "bf16", "target": 1.0}, "target"),
        ({"max_replans": -1}, "max_replans"),
        ({"step": lambda model, batch: model(batch)}, "step"),
        ({"precisions": []}, "precisions"),
        ({"allocator": "dynamic-batches"}, "allocator"),
    ],
)
def test_ignored_arguments_are_rejected(wishes: dict[str, Any], where: str) -> None:
    with pytest.raises(QSyncError) as caught:
        qsync_fx.find_plan(MLP, **wishes)
    assert caught.value.where == where


def test_formats_are_limited_to_supporting_devices() -> None:
    profiles = {
        name: replace(reckoned(name), sensitivity=drawn_sensitivity(reckoned(name).graph))
        for name in ("v100", "t4")
    }
    fleet = Cluster({"v100": ClusterDevice(), "t4": ClusterDevice()}, Network(1e9))
    answer = qsync_fx.find_plan(profiles, fleet, precisions=["fp32", "fp16", "int8"])
    assert answer.problem.classes["v100"].formats == ("fp32", "fp16")
    assert answer.problem.classes["t4"].formats == ("fp32", "fp16", "int8")
    assert [(note.device, note.formats) for note in kinds(answer)[PlanNoteKind.HAS_NOT]] == [
        ("v100", ("int8",))
    ]
    with pytest.raises(PlanError, match="'fp8' is not supported by v100, t4"):
        qsync_fx.find_plan(profiles, fleet, precisions=["fp32", "fp8"])
    with pytest.raises(PlanError, match="'v100' has none of the allowed formats"):
        qsync_fx.find_plan(profiles, fleet, precisions=["int8"])


def test_a_plan_beyond_its_memory_is_no_answer() -> None:
    profile = replace(reckoned("t4"), sensitivity=drawn_sensitivity(reckoned("t4").graph))
    with pytest.raises(
        PlanError,
        match=r"no plan was found within the limits; the nearest has .* more than allowed",
    ):
        qsync_fx.find_plan(profile, target=1.0, memory=1000, allocator="uniform")


def test_notes_have_units() -> None:
    profile = replace(reckoned("t4"), sensitivity=drawn_sensitivity(reckoned("t4").graph))
    answer = qsync_fx.find_plan(profile, target="fp16")
    (bound,) = kinds(answer)[PlanNoteKind.BINDS]
    step, limit = (duration(bound.numbers[name]) for name in ("seconds", "limit"))
    assert f"the step time limits the plan: {step} of {limit} allowed" in str(answer)
    note = kinds(answer)[PlanNoteKind.NOT_FASTER][0]
    more, (narrow, wide) = duration(note.numbers["seconds more"]), note.formats
    assert f"{note.operator} takes {more} more in {narrow} than in {wide}" in str(answer)


@tiers.ALL
def test_blocks_are_tied() -> None:
    bert = Known("bert2", 0, drawn_sensitivity(graph_of("bert2")))
    answer = qsync_fx.find_plan(bert, tie_blocks=True)
    (formats,) = answer.plans.values()
    layers = [
        {op.split(".layer.")[1][1:]: fmt for op, fmt in formats.items() if f".layer.{n}." in op}
        for n in (0, 1)
    ]
    assert layers[0] == layers[1]
    assert len(layers[0]) > 4


@functools.cache
def reckoned(device: str) -> Profile:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)
    )

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        result: Tensor = model(batch).square().mean()
        return result

    optimizer = torch.optim.Adam(model.parameters())
    return qsync_fx.catalog_profile(device, model, step, torch.randn(4096, 64), optimizer=optimizer)


def test_profiles_of_the_catalog_and_their_files(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(
        '[devices.v100]\ncount = 16\n[devices.t4]\ncount = 16\nprofile = "t4.json"\n'
        "[network]\nbandwidth = 12.5e9\nlatency = 30e-6\n"
    )
    reckoned("t4").save(tmp_path / "t4.json")
    reckoned("v100").save(tmp_path / "v100.json")
    sensitivity = drawn_sensitivity(reckoned("t4").graph)
    answer = qsync_fx.find_plan(
        {"v100": str(tmp_path / "v100.json")},
        tmp_path / "cluster.toml",
        memory={"t4": "30%"},
        sensitivity=sensitivity,
    )
    assert answer.fits
    assert set(answer.plans["v100"].values()) == {"fp32"}
    assert answer.problem.classes["t4"].memory == pytest.approx(0.3 * get("t4").memory.bytes)
    assert answer.problem.classes["t4"].formats == ("fp32", "fp16", "int8")
