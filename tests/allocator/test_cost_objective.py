"""Objective "cost": the least cost per sample over all subsets of the device classes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qsync_fx import PlanError, find_plan
from qsync_fx.allocator.evaluator import resized
from qsync_fx.allocator.plan_result import PlanResult
from qsync_fx.errors import ProfileError
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice
from tests.support.planning.catalog_fleets import of_catalog, symbolic

PROBLEM = of_catalog("perceptron", 64, count=16)
PROFILES: Any = {name: part.times for name, part in PROBLEM.classes.items()}
ARGUMENTS: dict[str, Any] = {
    "sensitivity": PROBLEM.classes["t4"].sensitivity,
    "progress": False,
}


def priced(v100: float | None, t4: float | None) -> Cluster:
    prices = {"v100": v100, "t4": t4}
    devices = {
        name: replace(device, price_per_hour=prices[name])
        for name, device in PROBLEM.cluster.devices.items()
    }
    return replace(PROBLEM.cluster, devices=devices)


def plan(cluster: Cluster, objective: str = "cost", **more: Any) -> PlanResult:
    profiles = {name: PROFILES[name] for name in cluster.devices}
    return find_plan(profiles, cluster, objective=objective, **ARGUMENTS, **more)


@pytest.mark.parametrize("price", [0.3, 3.0, 300.0])
def test_cheapest_subset_is_that_of_separate_plans(price: float) -> None:
    cluster = priced(price, 0.35)
    budget = plan(cluster, "fastest").problem.variance
    rates = {}
    for names in (("v100", "t4"), ("v100",), ("t4",)):
        part = cluster.only(names)
        assert part is not None
        try:
            rates[names] = plan(part, "fastest", budget=budget).samples_per_price or 0.0
        except PlanError:
            continue
    answer = plan(cluster)
    best = max(rates, key=lambda names: rates[names])
    assert answer.samples_per_price == rates[best]
    assert tuple(answer.plans) == best
    assert answer.gap is not None and answer.gap < 1
    text = str(answer)
    for names, rate in rates.items():
        assert f"{' and '.join(names)}: cost of training on these devices only" in text
        assert rate > 0
    for name in {"v100", "t4"} - {*best}:
        assert f"{name}: the plan leaves these devices out" in text


def test_samples_of_a_step_stay_on_fewer_devices() -> None:
    answer = plan(
        priced(300.0, 0.35),
        batch="global",
        budget=1e9,
        resized=lambda part, batch: resized(part, symbolic("perceptron", part.graph.device), batch),
    )
    assert dict(answer.batches) == {"t4": 128}


def test_other_objectives_show_the_cost() -> None:
    answer = plan(priced(3.0, 0.35), "hybrid")
    cost = 16 * 3.35 * answer.evaluation.seconds / 3600 / 2048
    assert answer.samples_per_price == pytest.approx(1 / cost)
    assert "samples per unit of currency, at 53.6 an hour" in str(answer)
    assert plan(priced(3.0, None), "hybrid").samples_per_price is None


def test_cost_requires_prices() -> None:
    with pytest.raises(PlanError, match="without price_per_hour"):
        plan(priced(3.0, None))
    with pytest.raises(ProfileError, match="price_per_hour"):
        Cluster({"t4": ClusterDevice(price_per_hour=-1.0)})
