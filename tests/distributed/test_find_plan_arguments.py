"""Invalid arguments of `measure_and_plan`, `measure` and `find_plan`, rejected before any step."""

from __future__ import annotations

from typing import Any

import pytest

import qsync_fx
from qsync_fx import QSyncError
from tests.support.planning.measured_layer import BATCH, Counted, layer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sensitivity": None}, "planning requires the sensitivity of each operator"),
        ({"sensitivity": "exat"}, "'exat' is not a method"),
        ({"objective": "fast"}, "there is no objective 'fast'"),
        ({"objective": "fastest", "budget": "bf17"}, "bf17"),
        ({"objective": "recover", "budget": 0.5}, "the budget of recovery is a format"),
        ({"target": "fp33"}, "fp33"),
        ({"memory": "4 GBB"}, "'4 GBB' is no memory"),
        ({"memory": {"gpu": 1e9}}, "no rank has the device class 'gpu'"),
        ({"margin": 2.0}, "no plan leaves a margin of 2"),
        ({"precisions": ["int9"]}, "int9"),
        ({"codecs": ["qsgd5"]}, "a plan has no codec 'qsgd5'"),
        ({"max_replans": -1}, "cannot be run in -1 rounds"),
        ({"batch": "all"}, "is no range of samples"),
        ({"batch": "global", "codecs": ["qsgd5"]}, "a plan has no codec 'qsgd5'"),
        ({"batch": "global", "batch_sizes": [0]}, "is no number of samples"),
        ({"batch_sizes": [2, 4]}, "measured only to plan batches"),
        ({"repeats": 0}, "cannot be measured 0 times"),
        (
            {"options": {"inner_backend": "eager"}},
            "operators are timed in the code that Inductor writes",
        ),
        ({"ronds": 3}, "measure_and_plan has no argument 'ronds'"),
        ({"profile": "profile.json"}, "measure_and_plan has no argument 'profile'"),
        ({"save": "missing/plan.json"}, "cannot be written"),
        ({"path": "missing/profile.json"}, "cannot be written"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_are_refused_before_a_step(arguments: dict[str, Any], message: str) -> None:
    step = Counted()
    with pytest.raises(QSyncError) as caught:
        qsync_fx.distributed.measure_and_plan(
            layer(), step, [BATCH], device_class="cpu", progress=False, **arguments
        )
    assert message in str(caught.value)
    assert not step.calls


def test_measure_refuses_an_unknown_method_before_a_step() -> None:
    step = Counted()
    with pytest.raises(QSyncError, match="'exat' is not a method"):
        qsync_fx.measure(layer(), step, [BATCH], ["fp32"], sensitivity="exat", progress=False)
    assert not step.calls


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"codecs": ["qsgd5"]}, "no codec"),
        ({"margin": -1.0}, "margin"),
        ({"memory": "all"}, "is no memory"),
    ],
)
def test_find_plan_from_a_profile_without_sensitivity_names_the_wrong_argument(
    arguments: dict[str, Any], message: str
) -> None:
    profile = qsync_fx.catalog_profile("t4", layer(), Counted(), BATCH, ["fp32", "fp16"])
    with pytest.raises(QSyncError, match=message):
        qsync_fx.find_plan(profile, **arguments)
