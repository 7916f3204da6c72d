"""What an answer holds, as plans and as text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qsync_fx import Plan, PlanError
from qsync_fx.allocator import PlanNote, PlanNoteKind, PlanResult, evaluate_plan
from qsync_fx.formatting import duration
from qsync_fx.predictor.cost_mapper import states
from tests.support.planning.allocation_problems import fleet


def an_answer() -> PlanResult:
    problem = replace(fleet("mlp"), seconds=1.0)
    plans = problem.uniform()
    notes = (
        PlanNote(PlanNoteKind.NOT_FASTER, "slow", "0/linear", ("int8", "bf16"), {"seconds": 0.25}),
        PlanNote(PlanNoteKind.NOT_FASTER, "slow", "2/linear", ("int8", "fp32")),
    )
    found = evaluate_plan(problem, plans)
    return PlanResult(
        problem, plans, found, "uniform", bound=found.variance / 2, took=0.125, notes=notes
    )


def test_plans_are_of_classes() -> None:
    answer = an_answer()
    part = answer.problem.classes["slow"]
    assert answer.plan() == Plan(operators=answer.plans["slow"])
    assert states(part.graph, answer.plan()) == states(part.graph, part.uniform("int8"))
    assert answer.to_plans() == {name: answer.plan(name) for name in ("fast", "slow")}
    assert answer.plan("fast") == Plan(operators=part.uniform("fp32"))
    with pytest.raises(PlanError, match="no devices 'slwo'"):
        answer.plan("slwo")
    both = {name: replace(found, fixed_plan=None) for name, found in answer.problem.classes.items()}
    with pytest.raises(PlanError, match="plans of 2 classes"):
        replace(answer, problem=replace(answer.problem, classes=both)).plan()


def test_gaps() -> None:
    answer = an_answer()
    assert answer.gap == pytest.approx(0.5)
    assert answer.fits
    assert replace(answer, bound=None).gap is None
    assert replace(answer, bound=answer.evaluation.variance * (1 + 1e-9)).gap == 0
    assert not replace(answer, problem=replace(answer.problem, seconds=1e-9)).fits


def test_notebook_representation_has_one_line() -> None:
    line = repr(an_answer())
    assert (
        line.startswith("PlanResult(uniform, 23.81 ms a step on ")
        and "gap 50.00%" in line
        and "\n" not in line
    )
    assert len(line) < 120


def test_printed_result() -> None:
    answer = an_answer()
    text = str(answer)
    for part in (
        "fast",
        "slow",
        "1 s allowed",
        "uniform",
        "gap 50.00%",
        "0/linear int8/bf16 250 ms",
        "2/linear",
    ):
        assert part in text, part
    assert f"{answer.evaluation.classes['slow'].variance:.4g}" in text
    assert "no bound is known" in str(replace(answer, bound=None))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_every_number_is_printed_at_any_terminal_width(width: int) -> None:
    answer = an_answer()
    text = answer.text(width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for name, figures in answer.evaluation.classes.items():
        whole = "".join(text.split())
        for part in (name, duration(figures.computing), f"{figures.variance:.4g}"):
            assert "".join(part.split()) in whole or width < 60, part
    # One class a line where there is room, else one a column.
    assert any(line.split()[:2] == ["devices", "count"] for line in text.splitlines()) == (
        width >= 100
    )
