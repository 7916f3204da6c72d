"""Dynamic batches: proportional to speed, with a constant global batch, within memory limits, and
with matching loss weights and learning rate.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from qsync_fx import PlanError, ProfileError
from qsync_fx.allocator import DeviceClass, PlanNoteKind, PlanResult, Problem, evaluate_plan
from qsync_fx.allocator.baselines import DynamicBatches, Uniform
from qsync_fx.allocator.evaluator import Scaled, resized
from qsync_fx.predictor.memory import LossMemory
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice
from tests.support.planning.catalog_fleets import of_catalog, sized, symbolic


def part(device: str, batch: int) -> DeviceClass:
    return sized("perceptron", device, batch)


def fleet(batch: int = 1024, v100: int = 2, t4: int = 2) -> Problem:
    problem = of_catalog("perceptron", batch, bandwidth=1e11)
    counts = {"v100": v100, "t4": t4}
    devices = {
        name: replace(device, count=counts[name])
        for name, device in problem.cluster.devices.items()
    }
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


def allocated(problem: Problem) -> PlanResult:
    return DynamicBatches(
        lambda name, batch: resized(problem.classes[name], symbolic("perceptron", name), batch)
    ).allocate(problem)


def batches(answer: PlanResult) -> dict[str, int]:
    return {name: device.batch or 0 for name, device in answer.problem.cluster.devices.items()}


def test_the_global_batch_stays_and_devices_take_equally_long() -> None:
    problem = fleet()
    answer = allocated(problem)
    sizes = batches(answer)
    assert sizes["v100"] + sizes["t4"] == 2048
    assert sizes["v100"] > 1024
    computing = [metrics.computing for metrics in answer.evaluation.classes.values()]
    assert max(computing) < min(computing) * 1.05
    assert answer.evaluation.seconds < Uniform("fp32").allocate(problem).evaluation.seconds
    assert answer.evaluation.variance == 0
    assert answer.evaluation == evaluate_plan(answer.problem, answer.plans)
    assert {note.kind for note in answer.notes} == {PlanNoteKind.BATCH}
    for note in answer.notes:
        assert note.numbers["learning rate"] == 1
        assert note.numbers["weight of its loss"] == pytest.approx(sizes[note.device] / 1024)


def test_counts_that_do_not_divide_it_come_near() -> None:
    sizes = batches(allocated(fleet(64, v100=3, t4=5)))
    assert abs(3 * sizes["v100"] + 5 * sizes["t4"] - 8 * 64) <= 1


def test_memory_limit_moves_samples_to_another_class() -> None:
    problem = fleet()
    free = allocated(problem)
    limit = free.evaluation.classes["v100"].peak_bytes or 0
    classes = {**problem.classes, "v100": replace(problem.classes["v100"], memory=0.8 * limit)}
    tight = replace(problem, classes=classes)
    answer = allocated(tight)
    sizes = batches(answer)
    assert answer.fits
    assert sizes["v100"] < batches(free)["v100"]
    assert sizes["v100"] + sizes["t4"] == 2048
    more = evaluate_plan(
        replace(
            answer.problem,
            classes={**answer.problem.classes, "v100": part("v100", sizes["v100"] + 1)},
        ),
        answer.plans,
    )
    assert (more.classes["v100"].peak_bytes or 0) > 0.8 * limit, (
        "the V100 has the largest batch that fits in its memory"
    )


def test_learning_rate_shrinks_if_no_class_fits_its_share() -> None:
    problem = fleet()
    least, share = (
        evaluate_plan(sized_problem, sized_problem.uniform("fp32")).classes["t4"].peak_bytes or 0
        for sized_problem in (fleet(2), problem)
    )
    classes = {
        name: replace(device_class, memory=(least + share) / 2)
        for name, device_class in problem.classes.items()
    }
    answer = allocated(replace(problem, classes=classes))
    samples = sum(batches(answer).values())
    assert answer.fits
    assert samples < 2048
    assert {note.numbers["learning rate"] for note in answer.notes} == {samples / 2048}
    hopeless = {
        name: replace(device_class, memory=1.0) for name, device_class in problem.classes.items()
    }
    assert not allocated(replace(problem, classes=hopeless)).fits


def test_loss_memory_scales_with_the_output() -> None:
    measured = part("t4", 1024)
    assert measured.training is not None
    for loss, double_loss in (
        (None, None),
        (LossMemory(held=1001, most=4000), LossMemory(held=2002, most=8000)),
    ):
        with_loss = replace(measured, training=replace(measured.training, loss=loss))
        same, double = (
            resized(with_loss, symbolic("perceptron", "t4"), batch).training
            for batch in (1024, 2048)
        )
        assert same == with_loss.training
        assert double == replace(measured.training, loss=double_loss)


def test_measured_values_are_scaled_to_the_batch() -> None:
    """Doubling the batch multiplies a catalog device's step time by 1.7 to 2."""
    measured = part("t4", 1024)
    same = resized(
        replace(measured, times=Scaled(measured.times, measured.graph, measured.graph)),
        symbolic("perceptron", "t4"),
        1024,
    )
    assert isinstance(same.times, Scaled)
    problem = Problem({"t4": measured}, Cluster({"t4": ClusterDevice(batch=1024)}))
    other = replace(problem, classes={"t4": same})
    assert evaluate_plan(other, problem.uniform("fp32")) == evaluate_plan(
        problem, problem.uniform("fp32")
    )
    double = replace(
        measured,
        times=Scaled(measured.times, measured.graph, symbolic("perceptron", "t4").at(batch=2048)),
    )
    once, twice = (
        evaluate_plan(
            replace(problem, classes={"t4": device_class}), problem.uniform("fp32")
        ).seconds
        for device_class in (measured, double)
    )
    assert once * 1.7 < twice < once * 2


def test_missing_input_is_reported() -> None:
    problem = fleet()
    devices = {
        name: replace(device, batch=None) for name, device in problem.cluster.devices.items()
    }
    with pytest.raises(PlanError, match="batch size of"):
        allocated(replace(problem, cluster=replace(problem.cluster, devices=devices)))
    with pytest.raises(ProfileError, match="one symbolic size") as caught:
        resized(problem.classes["t4"], problem.classes["t4"].graph, 8)
    assert "mark_dynamic" in str(caught.value)
