"""Profiles of several batch sizes: exact sizes and monotone times between measured batches."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import qsync_fx
from qsync_fx import OptionError, ProfileError
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice, Network
from qsync_fx.profiler.batch_interpolation import BatchInterpolation, merge_batch_sizes
from qsync_fx.profiler.profile import Profile
from qsync_fx.timeline.device_profiles import load_device_profiles
from tests.support.planning.measured_layer import Counted, layer, quick

SIZES = 8, 32, 16


def step(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(width * 16, 10),
    )


@functools.cache
def of_size(size: int, device: str = "t4") -> Profile:
    model = network()
    torch.compiler.reset()
    batch = torch.randn(size, 3, 8, 8), torch.randint(10, (size,))
    optimizer = torch.optim.SGD(model.parameters())
    return qsync_fx.catalog_profile(device, model, step, batch, ["fp32", "fp16"], optimizer)


@functools.cache
def merged() -> Profile:
    return merge_batch_sizes([of_size(size) for size in SIZES])


@pytest.mark.parametrize("batch", [4, 8, 11, 24, 100])
def test_sizes_are_exact(batch: int) -> None:
    profile, expected = merged().at_batch(batch), of_size(batch)
    assert profile.graph == expected.graph and profile.batch_size == batch
    assert profile.loss_memory == expected.loss_memory
    assert sorted(item.batch_size for item in profile.batches) == sorted({*SIZES} - {batch})


def drawn(columns: list[list[float]]) -> Profile:
    """Return a profile whose operators have drawn times, one column for each batch size."""

    def timed(item: Any, times: list[float]) -> Any:
        runs = []
        for run in item.runs:
            operators = [
                replace(operator, forward=times[index % len(times)], backward=times[-1])
                for index, operator in enumerate(run.operators)
            ]
            total = sum(operator.forward for operator in operators)
            steps = [(total + 1.0, times[-1] * len(operators) + 1.0, 0.0)] * 2
            runs.append(replace(run, operators=operators, quantized=[], steps=steps))
        return replace(item, runs=runs)

    profile = merged()
    others = [
        timed(item, column) for item, column in zip(profile.batches, columns[1:], strict=True)
    ]
    result: Profile = replace(timed(profile, columns[0]), batches=others)
    return result


def operator_times(profile: Profile) -> list[tuple[float, float]]:
    return [(item.forward, item.backward) for run in profile.runs for item in run.operators]


TIMES = st.lists(st.floats(0, 10), min_size=4, max_size=4)


@given(st.lists(TIMES, min_size=3, max_size=3), st.integers(1, 80), st.integers(1, 80))
def test_times_grow_with_the_batch_and_are_never_negative(
    columns: list[list[float]], first: int, second: int
) -> None:
    interpolation = BatchInterpolation(drawn(columns))
    small, large = (interpolation.at(batch) for batch in sorted((first, second)))
    for before, after in zip(operator_times(small), operator_times(large), strict=True):
        assert all(0 <= a <= b + 1e-9 for a, b in zip(before, after, strict=True))
    for a, b in zip(small.runs, large.runs, strict=True):
        assert a.forward <= b.forward + 1e-9 and a.backward <= b.backward + 1e-9


@given(TIMES, TIMES, TIMES, st.integers(1, 80))
def test_growing_times_are_piecewise_linear(
    first: list[float], more: list[float], most: list[float], batch: int
) -> None:
    at_16 = [a + b for a, b in zip(first, more, strict=True)]
    at_32 = [a + b for a, b in zip(at_16, most, strict=True)]
    profile = BatchInterpolation(drawn([first, at_32, at_16])).at(batch)
    points = {8: first, 16: at_16, 32: at_32}
    low, high = (8, 16) if batch < 16 else (16, 32)
    share = (batch - low) / (high - low)
    for run in profile.runs:
        for index, operator in enumerate(run.operators):
            ends = [points[end][index % 4] for end in (low, high)]
            expected = max(0.0, ends[0] + share * (ends[1] - ends[0]))
            assert operator.forward == pytest.approx(expected, abs=1e-9)


def test_profiles_that_differ_in_more_than_the_batch_are_refused() -> None:
    first = of_size(8)
    other = replace(of_size(16), precisions=["fp32"])
    renamed = replace(of_size(16), model=replace(first.model, name="Other"))
    graph = of_size(16).stored
    operators = [
        replace(item, row="other") if item.id == "2/relu" else item for item in graph.operators
    ]
    changed = replace(of_size(16), stored=replace(graph, operators=operators))
    for wrong, message in (
        (of_size(16, "v100"), "another machine"),
        (other, "another precisions"),
        (renamed, "two models"),
        (first, "two profiles have 8 samples"),
        (changed, "with 16 samples the model differs"),
        (replace(first, batch_size=None), "batch size of the profile is unknown"),
    ):
        with pytest.raises(ProfileError, match=message):
            merge_batch_sizes([first, wrong])
    with pytest.raises(ProfileError, match="the model differs") as caught:
        merge_batch_sizes([first, changed])
    assert caught.value.where == "2/relu"
    with pytest.raises(ProfileError, match="covers one batch size, 8"):
        first.at_batch(16)
    with pytest.raises(ProfileError, match="a batch of 0 samples"):
        merged().at_batch(0)


def test_a_profile_is_used_at_the_batch_of_the_cluster(tmp_path: Path) -> None:
    path = tmp_path / "t4.json"
    merged().save(path)
    cluster = Cluster({"t4": ClusterDevice(count=2, batch=24)}, Network(1e9, 1e-5))
    for value in (path, merged(), [of_size(size) for size in SIZES]):
        _, profiles = load_device_profiles({"t4": value}, cluster)
        assert profiles["t4"].graph == of_size(24).graph
    assert Profile.load(path, any_machine=True) == merged()
    text = path.read_text().replace('"2/relu"', '"2/gelu"', 1)
    path.write_text(text)
    with pytest.raises(ProfileError):
        Profile.load(path, any_machine=True)


def test_batches_are_planned_from_measured_batch_sizes() -> None:
    slow = merge_batch_sizes([of_size(size, "t4") for size in (8, 64)])
    fast = merge_batch_sizes([of_size(size, "v100") for size in (8, 64)])
    variance = {
        operator.id: {"fp16": 1.0 + index}
        for index, operator in enumerate(slow.graph.operators)
        if operator.kind == "adjustable"
    }
    sensitivity = Sensitivity("second_order", "", variance, steps=1)
    devices = {"v100": ClusterDevice(batch=16), "t4": ClusterDevice()}
    cluster = Cluster(devices, Network(1e11, 1e-7))
    profiles: Any = {"v100": fast, "t4": slow}
    arguments: Any = {"sensitivity": sensitivity, "progress": False, "batch": "global"}
    answer = qsync_fx.find_plan(profiles, cluster, **arguments)
    # By default, the T4 uses the batch size of its profile.
    assert answer.fits and sum(answer.batches.values()) == 16 + 8
    assert answer.problem.classes["t4"].graph == slow.at_batch(answer.batches["t4"]).graph
    with pytest.raises(OptionError, match="'t4' covers one batch size") as caught:
        qsync_fx.find_plan({**profiles, "t4": of_size(8)}, cluster, **arguments)
    assert caught.value.where == "batch" and "batch_sizes" in (caught.value.do or "")


def test_measure_covers_batch_sizes(tmp_path: Path) -> None:
    path, shapes = tmp_path / "profile.json", set()

    class Watched(Counted):
        def __call__(self, model: Any, batch: Any) -> torch.Tensor:
            shapes.add((len(batch[0]), len(batch[1])))
            return super().__call__(model, batch)

    sizes = (6, 2)
    profile = quick(layer(), Watched(), batch_sizes=sizes, path=path, sensitivity="second_order")
    assert shapes == {(2, 2), (6, 6)}
    assert profile.batch_size == 6 and [item.batch_size for item in profile.batches] == [2]
    assert Profile.load(path) == profile and list(tmp_path.iterdir()) == [path]
    assert "also measured: 2" in str(profile)
    between = profile.at_batch(4)
    assert between.graph == quick(layer(), Counted()).graph
    assert between.sensitivity == (profile.sensitivity and profile.sensitivity.at_batch(6, 4))
    for wrong in ((0,), (2.0,), (True,)):
        with pytest.raises(OptionError, match="is no number of samples"):
            quick(layer(), Counted(), batch_sizes=wrong)
    correction: Any = {
        "profile": profile,
        "plan": qsync_fx.Plan.uniform("fp32"),
        "batch_sizes": (2,),
    }
    with pytest.raises(OptionError, match="a correction keeps the batch size"):
        qsync_fx.measure(layer(), Counted(), [torch.ones(4, 16)], **correction)
