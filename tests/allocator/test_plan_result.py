"""Plan result: its plans per class, its gap and its text."""

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
        PlanNote(
            PlanNoteKind.NOT_FASTER, "slow", "0/linear", ("int8", "bf16"), {"seconds more": 0.25}
        ),
        PlanNote(PlanNoteKind.NOT_FASTER, "slow", "2/linear", ("int8", "fp32")),
        PlanNote(PlanNoteKind.NOT_FASTER, "slow", "4/linear", ("int8", "fp32")),
        PlanNote(PlanNoteKind.JOINS, "slow", numbers={"samples a second": 2e5, "without it": 9.5}),
        PlanNote(PlanNoteKind.WAITS, "fast", numbers={"seconds": 0.25, "of a step of": 1.0}),
        PlanNote(PlanNoteKind.BINDS, "slow", numbers={"memory": 1.98e9, "limit": 2e9}),
    )
    evaluation = evaluate_plan(problem, plans)
    return PlanResult(
        problem,
        plans,
        evaluation,
        "uniform",
        bound=evaluation.variance / 2,
        took=0.125,
        notes=notes,
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
    both = {name: replace(item, fixed_plan=None) for name, item in answer.problem.classes.items()}
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


def test_variance_is_compared_with_the_noise_of_the_gradient() -> None:
    answer = an_answer()
    assert "own noise" not in str(answer)
    noise = 4 * answer.evaluation.variance / sum(map(answer.problem.weight, answer.plans))
    classes = {
        name: replace(item, sensitivity=replace(item.sensitivity, noise=noise))
        for name, item in answer.problem.classes.items()
    }
    measured = replace(answer, problem=replace(answer.problem, classes=classes))
    assert "0.25 of the gradient's own noise between batches" in str(measured)


def test_printed_result() -> None:
    answer = an_answer()
    text = str(answer)
    for part in (
        "fast",
        "slow",
        "1 s allowed",
        "uniform",
        "gap 50.00%",
        "the memory of slow limits the plan: 1.98GB of 2GB allowed",
        "slow: a narrower format is not faster for 3 operators: "
        "0/linear takes 250 ms more in int8 than in bf16; 2/linear int8/fp32; ...",
        "slow: the device makes the run faster: 200,000 samples a second, 9.5 without it",
        "fast: the device waits for gradients: 250 ms of a step of 1 s; gradient codecs",
    ):
        assert part in text, part
    assert text.count("limits the plan") == 1
    assert f"{answer.evaluation.classes['slow'].variance:.4g}" in text
    assert "no bound is known" in str(replace(answer, bound=None))
    assert "no bound is known for the measured costs" in str(replace(answer, bound=None, ran=1))


def test_variance_and_formats_are_printed_as_shares() -> None:
    answer = an_answer()
    uniform = f"variance {answer.evaluation.variance:.4g} added to the mean gradient"
    assert f"{uniform}, 1 of uniform int8's\n" in str(answer)
    assert "no limit is reached: the plan has the least variance" in str(replace(answer, notes=()))

    first, *others = answer.plans["slow"]
    plans = dict(answer.plans, slow={**answer.plans["slow"], first: "fp32"})
    problem = answer.problem
    mixed = replace(answer, plans=plans, evaluation=evaluate_plan(problem, plans))
    rest = sum(problem.omega("slow", operator, "int8") for operator in others)
    share = rest / (rest + problem.omega("slow", first, "int8"))
    assert f"{share:.2g} of uniform int8's" in str(mixed)
    count = len(others) + 1
    assert f"{count - 1} ({1 - 1 / count:.0%})" in str(mixed)
    # The ratio requires a variance in the narrowest formats.
    wide = problem.completed({"slow": problem.classes["slow"].uniform("fp32")})
    narrow = replace(problem.classes["slow"], formats=("fp32",))
    only = replace(problem, classes=dict(problem.classes, slow=narrow))
    text = str(PlanResult(only, wide, evaluate_plan(only, wide), "uniform"))
    assert "variance 0 added to the mean gradient\n" in text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_every_number_is_printed_at_any_terminal_width(width: int) -> None:
    answer = an_answer()
    text = answer.text(width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for name, metrics in answer.evaluation.classes.items():
        compact = "".join(text.split())
        for part in (name, duration(metrics.computing), f"{metrics.variance:.4g}"):
            assert "".join(part.split()) in compact or width < 60, part
    # Classes are rows if the width suffices, otherwise columns.
    assert any(line.split()[:2] == ["devices", "count"] for line in text.splitlines()) == (
        width >= 100
    )
