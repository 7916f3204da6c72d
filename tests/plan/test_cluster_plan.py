"""Plans for a cluster: each rank selects its part or gets an error, and a saved plan is loaded
unchanged.
"""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import qsync_fx
from qsync_fx import ClusterPlan, Options, Plan
from qsync_fx.errors import OptionError, PlanError
from qsync_fx.plan import cluster_plan
from qsync_fx.plan.cluster_plan import LocalPlan, read_plan
from tests.support.planning.plan_samples import plans, texts

V100, T4 = Plan.uniform("fp32"), Plan("int8", [("head", "fp32")])
PLAN = ClusterPlan({"v100": V100, "t4": T4})
HEAD = '{"format": "qsync-cluster-plan", "version": 1'
names = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=6)


@st.composite
def cluster_plans(draw: st.DrawFn) -> ClusterPlan:
    classes = draw(st.dictionaries(names, plans, min_size=1, max_size=3))
    class_name = st.sampled_from(sorted(classes))
    devices = draw(
        st.dictionaries(class_name, st.sampled_from(["Tesla T4", "a b", "é1"]), max_size=2)
    )
    codec = st.builds(
        cluster_plan.two_levels,
        st.sampled_from(cluster_plan.CODECS),
        st.sampled_from(cluster_plan.INSIDE_CODECS),
    )
    codecs = draw(st.dictionaries(names, codec, max_size=3))
    notes = draw(st.dictionaries(texts, texts, max_size=2))
    batches = draw(st.dictionaries(class_name, st.integers(1, 10**9 - 1)))
    budgets = draw(st.dictionaries(class_name, st.floats(0, 1)))
    ranks = draw(st.lists(class_name, max_size=4))
    return ClusterPlan(classes, devices, ranks, notes, codecs, batches, budgets)


@settings(max_examples=100)
@given(cluster_plans())
def test_saved_plan_is_loaded_unchanged(plan: ClusterPlan) -> None:
    text = plan.to_json()
    read = ClusterPlan.from_json(text)
    assert read == plan
    assert hash(read) == hash(plan)
    assert read.notes == plan.notes
    assert read.to_json() == text
    assert pickle.loads(pickle.dumps(plan)) == plan
    for name, part in plan.classes.items():
        assert dict(read.classes[name].notes) == dict(part.notes)
        selected = plan.for_class(name)
        assert selected == part
        assert cluster_plan.local_batch(selected.notes) == plan.batches.get(name)
        assert cluster_plan.memory_budget(selected.notes) == plan.memory_budgets.get(name)


@settings(max_examples=200)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | texts,
        lambda t: st.lists(t) | st.dictionaries(texts, t),
        max_leaves=8,
    )
)
def test_arbitrary_values_are_a_plan_or_an_error(value: Any) -> None:
    for field in ("classes", "devices", "ranks", "notes", "codecs"):
        body: dict[str, Any] = {"classes": {"a": {"default": "int8"}}, field: value}
        try:
            text = str(
                ClusterPlan.from_json(
                    json.dumps({"format": "qsync-cluster-plan", "version": 1, **body})
                )
            )
        except PlanError as error:
            text = str(error)
        assert text
        assert len(text) < 2000


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        (HEAD + "}", "has no class", "classes"),
        (HEAD + ', "classes": []}', "has a list instead of an object", "classes"),
        (HEAD + ', "classes": {"a": 1}}', "has the number 1 instead of an object", 'classes.a'),
        (HEAD + ', "classes": {"a": {"defalt": "int8"}}}', "unknown field 'defalt'", 'classes.a'),
        (HEAD + ', "classes": {"a": {"default": "int9"}}}', "'int9' is not a precision",
        'classes.a.default'),
        (HEAD + ', "classes": {"a": {"default": "int8", "default": "int8"}}}', "occurs twice",
        'classes.a'),
        (HEAD + ', "classes": {"\\u001b[2J": {}}}', "must be a printable string",
        'classes["\\u001b[2J"]'),
        (HEAD + ', "classes": {"a": {}}, "ranks": ["b"]}', "no class 'b'", "ranks[0]"),
        (HEAD + ', "classes": {"a": {}}, "ranks": "a"}', "the rank table must be a list, not text",
        "ranks"),
        (HEAD + ', "classes": {"a": {}}, "devices": {"b": "x"}}', "no class 'b'", "devices"),
        (HEAD + ', "classes": {"a": {}}, "devices": {"a": ""}}', "a device name must be a string",
        'devices.a'),
        (HEAD + ', "classes": {"a": {}}, "notes": {"a": 1}}',
        "a note must map a string to a string, not to the number 1", 'notes["a"]'),
        (HEAD + ', "class": {}}', "unknown field 'class'", None),
        ('{"format": "qsync-cluster-plan", "version": 2}', "has version 2", "version"),
        ('{"format": "qsync-plan", "version": 1}', "is not marked as a plan", "format"),
    ],
)  # fmt: skip
def test_hostile_text(text: str, message: str, where: str | None, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        ClusterPlan.load(path)
    assert message in caught.value.what
    assert caught.value.do
    assert (caught.value.where or "").startswith(f"'{path}'" + (f", {where}" if where else ""))


def test_codecs_of_gradients_are_part_of_a_plan(tmp_path: Path) -> None:
    plan = ClusterPlan(
        PLAN.classes, codecs={"0.weight": "qsgd8", "1.weight": "qsgd8", "1.bias": "fp32"}
    )
    assert plan != PLAN
    assert plan.for_class("t4").notes["cluster plan"] != PLAN.for_class("t4").notes["cluster plan"]
    assert plan.for_ranks(["t4"]).codecs == plan.codecs
    assert "gradients in qsgd8: 2 parameters, such as 0.weight" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert ClusterPlan.load(tmp_path / "plan.json").codecs == plan.codecs
    old = ClusterPlan.from_json(HEAD + ', "classes": {"t4": {"default": "int8"}}}')
    assert not old.codecs
    for codecs, message, where in (
        ({"a": "qsgd5"}, "'qsgd5' is not a gradient codec", "codecs.a"),
        ({"a": 8}, "the number 8 is not a gradient codec", "codecs.a"),
        ({"a": "qsgd4/1bit"}, "'1bit' is not a gradient codec inside nodes", "codecs.a"),
        ({"a": "qsgd4/"}, "'' is not a gradient codec inside nodes", "codecs.a"),
        ({"a": "qsgd4/qsgd8/qsgd8"}, "is not a gradient codec inside nodes", "codecs.a"),
        ({"a": "fp32/qsgd8"}, "'fp32/qsgd8' has FP32 on one of two levels", "codecs.a"),
        ({"a": "qsgd4/fp32"}, "'qsgd4/fp32' has FP32 on one of two levels", "codecs.a"),
        (["qsgd8"], "codecs must be a mapping, not a list", "codecs"),
        ({"": "qsgd8"}, "a parameter name must be a printable string", "codecs"),
    ):
        with pytest.raises(PlanError, match=message) as caught:
            ClusterPlan(PLAN.classes, codecs=codecs)  # type: ignore[arg-type]
        assert (caught.value.where or "").startswith(where)
        assert caught.value.do


def test_batches_and_memory_budgets_are_part_of_a_plan() -> None:
    plan = ClusterPlan(PLAN.classes, batches={"t4": 12}, memory_budgets={"t4": 0.5, "v100": 1})
    assert plan != PLAN
    assert plan.for_class("t4").notes["cluster plan"] != PLAN.for_class("t4").notes["cluster plan"]
    assert plan.for_class("v100").notes["memory budget"] == "1.0"
    assert "local batch" not in plan.for_class("v100").notes
    moved = plan.for_ranks(["t4", "v100"])
    assert (moved.batches, moved.memory_budgets) == (plan.batches, plan.memory_budgets)
    assert "t4, rank 0, local batch 12, memory budget 0.5:" in str(moved)
    fields: list[tuple[dict[str, object], str, str]] = [
        ({"batches": {"t4": 0}}, "must be a positive integer", "batches.t4"),
        ({"batches": {"t4": True}}, "must be a positive integer", "batches.t4"),
        ({"batches": {"t4": 1.5}}, "must be a positive integer", "batches.t4"),
        ({"batches": {"T4": 1}}, "no class 'T4'", "batches"),
        ({"batches": [1]}, "batches must be a mapping, not a list", "batches"),
        ({"memory_budgets": {"t4": 1.01}}, "must be a number in", "memory_budgets.t4"),
        ({"memory_budgets": {"t4": float("nan")}}, "must be a number in", "memory_budgets.t4"),
        ({"memory_budgets": 1}, "must be a mapping, not the number 1", "memory_budgets"),
    ]
    for field, message, where in fields:
        with pytest.raises(PlanError, match=message) as caught:
            ClusterPlan(PLAN.classes, **field)  # type: ignore[arg-type]
        assert caught.value.where == where
        assert caught.value.do


@pytest.mark.parametrize("text", ["", "0", "-1", "1e3", "12 ", "١", "1" * 40])
def test_malformed_notes_have_no_local_batch(text: str) -> None:
    assert cluster_plan.local_batch({"local batch": text}) is None


@pytest.mark.parametrize("text", ["", "2.5", "-1", "nan", "inf", "0,5", "1.5"])
def test_malformed_notes_have_no_memory_budget(text: str) -> None:
    assert cluster_plan.memory_budget({"memory budget": text}) is None


def test_every_codec_name_of_a_plan_has_a_codec() -> None:
    from qsync_fx.communication.codecs import codec_named

    assert [codec_named(name).name for name in cluster_plan.CODECS] == list(cluster_plan.CODECS)
    for name in cluster_plan.CODECS:
        codec = codec_named(name)
        consecutive = codec.fitted((3, 5)) == codec and not codec.gathered
        allowed = name in cluster_plan.INSIDE_CODECS
        assert (consecutive and not codec.residual) == allowed, name


def test_plan_shows_the_codecs_of_both_levels() -> None:
    plan = ClusterPlan(PLAN.classes, codecs={"a": "qsgd4/qsgd8", "b": "qsgd4"})
    assert "gradients in qsgd4 between nodes and qsgd8 inside: 1 parameters, such as a" in str(plan)
    assert "gradients in qsgd4: 1 parameters, such as b" in str(plan)
    assert cluster_plan.levels_of("qsgd4/qsgd8") == ("qsgd4", "qsgd8")
    assert cluster_plan.levels_of("qsgd4") == ("qsgd4", "fp32")


def test_one_file_for_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    PLAN.for_ranks(["v100", "t4", "t4"]).save(path)
    assert read_plan(path) == ClusterPlan.load(path)
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank, expected in enumerate((V100, T4, T4)):
        monkeypatch.setenv("RANK", str(rank))
        options = Options.parse({"plan": str(path)})
        assert options == Options(plan=expected)
        assert options.plan is not None
        assert options.plan.notes["chosen by"] == f"rank {rank} in the plan's table"
    monkeypatch.setenv("QSYNC_DEVICE_CLASS", "v100")
    assert Options.parse({"plan": str(path)}).plan == V100
    assert Options.parse({"plan": str(path), "device_class": "t4"}).plan == T4
    with pytest.raises(PlanError, match="is not marked as a plan"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("plan", "process", "expected"),
    [
        (PLAN, LocalPlan(None, None, "Tesla T4"), "t4"),
        (PLAN, LocalPlan(0, 2, "Tesla V100-SXM2-16GB"), "v100"),
        (PLAN.for_ranks(["t4", "v100"]), LocalPlan(0, 2, "Tesla V100-SXM2-16GB"), "t4"),
        (PLAN.for_ranks(["t4", "v100"]), LocalPlan(0, 3, "Tesla V100-SXM2-16GB"), "v100"),
        (
            ClusterPlan({"slow": T4, "fast": V100}, {"slow": "Tesla T4"}),
            LocalPlan(None, None, "Tesla T4"),
            "slow",
        ),
        (ClusterPlan({"slow": T4}), LocalPlan(5, 9, "NVIDIA H100 80GB HBM3"), "slow"),
    ],
)
def test_device_class_selects_the_part(
    plan: ClusterPlan, process: LocalPlan, expected: str
) -> None:
    assert plan.for_process(process).notes["device class"] == expected


@pytest.mark.parametrize(
    ("plan", "process", "where"),
    [
        (PLAN, LocalPlan(None, None, "cpu"),
        "this process has no rank; the plan has no rank table; the device name is 'cpu'"),
        (PLAN.for_ranks(["t4"]), LocalPlan(0, 2, "NVIDIA A100-SXM4-40GB"),
        "rank 0 of 2; the plan's rank table is for 1 ranks"),
        (
            ClusterPlan({"a": T4, "b": V100}, {"a": "T4", "b": "Tesla"}),
            LocalPlan(None, None, "Tesla T4"),
            "matches a and b",
        ),
    ],
)  # fmt: skip
def test_ambiguous_part_is_an_error(plan: ClusterPlan, process: LocalPlan, where: str) -> None:
    with pytest.raises(
        PlanError, match="the class of this rank's device in the cluster plan is unknown"
    ) as caught:
        plan.for_process(process)
    assert where in (caught.value.where or "")
    assert "device_class" in (caught.value.do or "")


def test_wrong_classes() -> None:
    with pytest.raises(PlanError, match="the plan has no class 'T4'") as caught:
        Options.parse({"plan": PLAN, "device_class": "T4"})
    assert "did you mean 't4'?" in (caught.value.do or "")
    with pytest.raises(PlanError, match="the plan has no class 't4'"):
        Options.parse({"plan": T4, "device_class": "t4"})
    with pytest.raises(OptionError, match='"device_class" cannot be'):
        Options.parse({"plan": PLAN, "device_class": 4})
    with pytest.raises(PlanError, match="has no class"):
        ClusterPlan({})
    with pytest.raises(PlanError, match="must be a plan, not text"):
        ClusterPlan({"t4": "int8"})  # type: ignore[dict-item]


def test_reports_name_the_device_class() -> None:
    explanation = qsync_fx.explain(
        torch.nn.Sequential(OrderedDict(head=torch.nn.Linear(4, 4))),
        torch.randn(2, 4),
        options={"plan": PLAN, "device_class": "t4"},
    )
    assert 'plan of t4: pattern "head"' in str(explanation)
    assert "plan: the part for t4, chosen by the option" in str(explanation)
    assert explanation.plan().notes == {}


def test_text_names_ranks_and_classes() -> None:
    text = str(PLAN.for_ranks(["t4", "v100", "v100", "v100", "t4"]))
    assert "v100, rank 1, 2, 3:" in text
    assert "t4, rank 0, 4:" in text
    assert 'pattern "head"' in text


def test_notes_of_several_lines_are_printed_as_they_are() -> None:
    text = str(
        ClusterPlan({"t4": T4}, notes={"answer": "30 ms a step\nvariance 2", "from": "a\x1b[2J"})
    )
    assert "note 'answer'\n  30 ms a step\n  variance 2" in text
    assert "\x1b" not in text
    assert "\x1b" not in str(ClusterPlan({"t4": T4}, notes={"answer": "a\nb\x1b[2J"}))
