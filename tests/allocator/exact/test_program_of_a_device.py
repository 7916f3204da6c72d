"""With all choices given, a program has the states of the pipeline and the seconds of the replayer."""

from __future__ import annotations

import random

import pytest
from allocation_problems import OwnedTimes, alone, fleet
from predicted_models import explained
from tiers import ALL

from qsync_fx import Plan
from qsync_fx.allocator import Judge, Problem
from qsync_fx.allocator.exact.device_program import THOUSANDTHS, device_program
from qsync_fx.allocator.exact.prices import Prices
from qsync_fx.allocator.exact.program import INFINITY, Program, value
from qsync_fx.explanation import Explanation
from qsync_fx.predictor.memory.forward import whole

FIVE = ("fp32", "fp16", "bf16", "int8", "fp8")
SIX = ("fp64", "fp32", "tf32", "bf16", "int8_grad", "int8")
NAMES = ["mlp", "checkpointed", "odd", "tied", "broken"]
MORE = [pytest.param(name, marks=ALL) for name in ("bert2", "vgg", "resnet", "gpt2")]


def drawn(problem: Problem, draw: random.Random) -> dict[str, str]:
    bias = draw.random()
    choices = problem.classes[problem.open[0]].choices
    return {op: draw.choice(known) if draw.random() < bias else known[-1] for op, known in choices.items()}


def solved(
    problem: Problem, asked: dict[str, str]
) -> tuple[float, Judge, list[dict[tuple[str | None, str | None], float]], float]:
    """Returns the least seconds with all choices given, the judge of them, states, and bytes that are kept."""
    name = problem.open[0]
    judge = Judge(problem, problem.completed({name: asked}))
    program = Program()
    device = device_program(program, problem, judge, name, Prices(problem.classes[name]), 1.0, True)
    step = program.variable(1.0, INFINITY)
    for variable, rest in device.ends:
        program.row({variable: 1.0, step: -1.0}, most=-rest)
    fixed = {
        variable: float(fmt == asked[operator])
        for operator, known in device.formats.choices.items()
        for fmt, variable in known.items()
    }
    found = program.solve(0.0, 60.0, relaxed=True, fixed=fixed)
    assert found.values is not None
    states = [{at: value(e, found.values) for at, e in known.items()} for known in device.formats.states]
    assert device.kept is not None
    # What wins no time may be kept without being wanted; the least that it can be is what counts.
    program.costs[step] = 0.0
    for variable, factor in device.kept.items():
        if variable >= 0:
            program.costs[variable] += factor
    least = program.solve(0.0, 60.0, relaxed=True, fixed=fixed)
    assert least.values is not None
    return found.objective / THOUSANDTHS, judge, states, value(device.kept, least.values)


@pytest.mark.parametrize("formats", [FIVE, SIX])
@pytest.mark.parametrize("name", NAMES + MORE)
def test_states_and_seconds_are_those_of_mapper_and_replayer(name: str, formats: tuple[str, ...]) -> None:
    draw = random.Random(name)
    for seed in range(4):
        problem = (fleet if seed % 2 else alone)(name, formats, seed, OwnedTimes)
        asked = drawn(problem, draw)
        seconds, judge, states, kept = solved(problem, asked)
        device = problem.open[0]
        for found, names in zip(states, judge.states(device).names, strict=True):
            assert found == pytest.approx({state: float(state == names) for state in found}, abs=1e-6)
        timeline = judge.timeline
        at = list(problem.classes).index(device)
        step = timeline.played.step
        own = timeline.played.devices[device]
        rest = [sum(judge.transfer[m:]) for m in range(len(judge.transfer))]
        ends = [own.computed, *(ready + more for ready, more in zip(own.ready.tolist(), rest, strict=True))]
        delay = problem.cluster.devices[device].delay
        assert seconds == pytest.approx(max(ends) + own.optimizer + delay, rel=1e-7)
        assert timeline.seconds >= seconds * (1 - 1e-7), (at, step)
        assert kept == pytest.approx(sum(map(whole, judge.states(device).saved().values())))


@pytest.mark.parametrize("name", ["mlp", "odd"])
def test_states_are_those_of_the_pipeline(name: str) -> None:
    explanation: Explanation = explained(name)
    draw = random.Random(f"pipeline {name}")
    problem = alone(name, FIVE, 0, OwnedTimes)
    for _ in range(3):
        asked = drawn(problem, draw)
        _, _, states, _ = solved(problem, asked)
        real = explanation.replanned(Plan(operators=asked))
        for found, operator in zip(states, real.operators, strict=True):
            names = tuple(None if f is None else f.name for f in (operator.note.precision, operator.note.output))
            assert found[names] == pytest.approx(1.0, abs=1e-6), operator.id  # type: ignore[index]
