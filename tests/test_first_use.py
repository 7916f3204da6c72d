"""Mistakes and spellings of new users: each is accepted, or is an error with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx import OptionError, Plan, PlanError, ProfileError
from qsync_fx.formats import precisions

BATCH = torch.randn(4, 16)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def step(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.fixture(scope="module")
def profile() -> qsync_fx.Profile:
    return qsync_fx.catalog_profile("t4", net(), step, BATCH, ("fp32", "int8"))


@pytest.fixture(scope="module")
def sensitivity() -> qsync_fx.Sensitivity:
    return qsync_fx.sensitivity(net(), step, [BATCH], precisions="INT8", steps=1)


def test_a_tensor_is_not_a_list_of_batches(
    profile: qsync_fx.Profile, sensitivity: qsync_fx.Sensitivity
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: qsync_fx.measure(net(), step, BATCH),
        lambda: qsync_fx.sensitivity(net(), step, BATCH),
        lambda: qsync_fx.distributed.measure_and_plan(net(), step, BATCH),
        lambda: qsync_fx.find_plan(
            profile, sensitivity=sensitivity, model=net(), step=step, batches=BATCH
        ),
    ]
    for call in calls:
        with pytest.raises(OptionError) as caught:
            call()
        assert caught.value.what == "batches is of type Tensor, which is one batch or none"
        assert caught.value.where == "batches"
        assert caught.value.do == "give a list of batches, [batch] for one, or a DataLoader"


def test_one_format_is_a_list_of_formats(
    profile: qsync_fx.Profile, sensitivity: qsync_fx.Sensitivity
) -> None:
    for spelling in ("BF16", torch.bfloat16):
        assert [fmt.name for fmt in precisions(spelling)] == ["bf16"]
    assert sensitivity.precisions == ["int8"]
    result = qsync_fx.find_plan(profile, sensitivity=sensitivity, precisions="INT8", budget=None)
    assert set(result.plan().operators.values()) == {qsync_fx.FORMATS["int8"]}


def test_a_dictionary_is_a_plan() -> None:
    fields = {"default": "INT8", "2": torch.bfloat16}
    plan = Plan("int8", [("2", "bf16")])
    assert Plan(fields) == Plan("INT8", {"2": "BF16"}) == plan
    assert qsync_fx.Options(plan=fields).plan == plan  # type: ignore[arg-type]
    explanation = qsync_fx.explain(net(), BATCH)
    assert explanation.replanned(fields).plan() == explanation.replanned(plan).plan()
    model = torch.compile(net(), backend="qsync", options={"inner_backend": "aot_eager"})
    qsync_fx.switch_plan(model, fields)
    model(BATCH).sum().backward()
    ran = {str(op.id): str(op.precision) for op in qsync_fx.plan_coverage(model).operators}
    assert ran == {"0/linear": "int8", "1/relu": "bf16", "2/linear": "bf16"}


def test_measure_accepts_a_dictionary_and_a_path_as_plans(tmp_path: Path) -> None:
    fields = {"default": "INT8", "2": "fp32"}
    Plan(fields).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="is not a precision"):
        qsync_fx.measure(net(), step, [BATCH], plan={"default": "int7"})
    profile = qsync_fx.measure(
        net(),
        step,
        [BATCH],
        "FP32",
        plan=[fields, tmp_path / "plan.json"],
        repeats=1,
        sensitivity=None,
        progress=False,
    )
    assert [run.planned for run in profile.runs] == [False, True]


@pytest.mark.parametrize("value", [net(), torch.compile(net()), step], ids=["net", "opt", "step"])
def test_find_plan_with_a_model_names_measure(value: Any) -> None:
    for call in (
        lambda: qsync_fx.find_plan(value, step, [BATCH]),  # type: ignore[arg-type]
        lambda: qsync_fx.find_plan(value, step=step, batches=[BATCH]),
        lambda: qsync_fx.find_plan({"t4": value}),
    ):
        with pytest.raises(ProfileError, match="requires profiles, not a model") as caught:
            call()
        assert "qsync_fx.measure(model, step, batches)" in str(caught.value.do)
        assert "qsync_fx.distributed.measure_and_plan" in str(caught.value.do)


def test_a_profile_instead_of_a_model_names_find_plan(profile: Any) -> None:
    for call in (
        lambda: qsync_fx.distributed.measure_and_plan(profile),
        lambda: qsync_fx.distributed.measure_and_plan({"t4": profile}, "cluster.toml"),
        lambda: qsync_fx.measure(profile, step, [BATCH]),
        lambda: qsync_fx.sensitivity(profile, step, [BATCH]),
        lambda: qsync_fx.catalog_profile("t4", profile, step, BATCH),
    ):
        with pytest.raises(OptionError, match="a module is required") as caught:
            call()
        assert "qsync_fx.find_plan(profiles, cluster)" in str(caught.value.do)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"query": nn.Linear(8, 8), "key": nn.Linear(8, 8)})
        self.shared = self.attention["key"]


@pytest.mark.parametrize(
    ("plan", "message", "do"),
    [
        (Plan("int8", {"*.atention": "fp32"}), "'*.atention' selects none of the 6 mod", "attent"),
        (Plan("int8", {"**.{querry,key}": "fp32"}), "'**.querry' selects none", "nearest: query"),
        (Plan("int8", {"0.atention.key": "fp32"}), "selects none", "nearest: 0.attention.key"),
        (
            Plan("int8", operators={"0.attention.keys/linear": "fp32"}),
            "names 1 operator that the model does not have",
            "0.attention.key",
        ),
    ],
)
def test_a_typo_is_found_when_the_plan_is_written(
    plan: Plan, message: str, do: str, tmp_path: Path
) -> None:
    model = torch.compile(nn.Sequential(Block()))
    for call in (
        lambda: plan.check(model),
        lambda: plan.save(tmp_path / "plan.json", model),
    ):
        with pytest.raises(PlanError) as caught:
            call()
        assert message in caught.value.what and do in str(caught.value.do)
    assert not (tmp_path / "plan.json").exists()


def test_a_plan_of_the_model_is_written(tmp_path: Path) -> None:
    plan = Plan("int8", {"0.shared": "fp32", "**.{query,key}": "bf16", "**/matmul": "fp32"})
    plan.save(tmp_path / "plan.json", nn.Sequential(Block()))
    assert Plan.load(tmp_path / "plan.json") == plan
