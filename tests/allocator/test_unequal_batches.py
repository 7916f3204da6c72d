"""Variance of the mean gradient of devices with unequal batches, against direct simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qsync_fx.allocator import Problem
from qsync_fx.allocator.evaluator import resized
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice
from tests.support.planning.catalog_fleets import of_catalog, sized, symbolic

MEASURED = 8
"""Batch at which the variances of the simulated operator are measured."""


def with_batches(batches: dict[str, int], counts: dict[str, int]) -> Problem:
    devices = {
        name: ClusterDevice(count=counts[name], batch=batch) for name, batch in batches.items()
    }
    parts = {name: sized("perceptron", name, MEASURED) for name in batches}
    classes = {
        name: resized(part, symbolic("perceptron", name), batches[name])
        for name, part in parts.items()
    }
    return Problem(classes, Cluster(devices))


def test_variance_equals_that_of_simulated_samples() -> None:
    batches, counts = {"v100": 24, "t4": 6}, {"v100": 2, "t4": 3}
    problem = with_batches(batches, counts)
    plans = problem.uniform()
    draw = np.random.default_rng(0)
    samples = sum(batches[name] * counts[name] for name in batches)
    mean = np.zeros(20_000)
    for name, batch in batches.items():
        measured = sized("perceptron", name, MEASURED).variance(plans[name])
        for _ in range(counts[name]):
            # The error of a mean of MEASURED samples has the measured variance.
            errors = draw.normal(0, (measured * MEASURED) ** 0.5, (batch, len(mean)))
            mean += batch / samples * errors.mean(0)
    assert problem.variance_of(plans) == pytest.approx(mean.var(), rel=0.05)


def test_equal_batches_are_a_plain_mean() -> None:
    equal = with_batches({"v100": 8, "t4": 8}, {"v100": 2, "t4": 3})
    cluster = equal.cluster
    unknown = {name: replace(device, batch=None) for name, device in cluster.devices.items()}
    for name in equal.classes:
        plain = replace(equal, cluster=replace(cluster, devices=unknown)).weight(name)
        assert equal.weight(name) == pytest.approx(plain)


def test_same_global_batch_has_the_same_noise_for_any_shares() -> None:
    noises = []
    for batches in ({"v100": 8, "t4": 8}, {"v100": 13, "t4": 3}):
        problem = with_batches(batches, {"v100": 2, "t4": 2})
        classes = {
            name: replace(
                part, sensitivity=replace(part.sensitivity, noise=5.0 * 8 / batches[name])
            )
            for name, part in problem.classes.items()
        }
        noises.append(replace(problem, classes=classes).noise)
    assert noises[0] == pytest.approx(noises[1])
    assert noises[0] == pytest.approx(5.0 * 8 / 32)


def test_resized_class_scales_its_sensitivity() -> None:
    problem = of_catalog("perceptron", 64)
    part = problem.classes["t4"]
    variance = part.sensitivity.variance
    measured = replace(part.sensitivity, trace=[variance], noise=3.0, noise_scale=100.0)
    measured = replace(measured, gradients={"0.weight": {"qsgd8": 2.0}})
    part = replace(part, sensitivity=measured)
    result: Sensitivity = resized(part, symbolic("perceptron", "t4"), 16).sensitivity
    assert result.noise == pytest.approx(12.0)
    for operator, by in variance.items():
        for fmt, value in by.items():
            assert result.variance[operator][fmt] == pytest.approx(4 * value)
            assert result.trace[0][operator][fmt] == pytest.approx(4 * value)
    # The mean square of a gradient is proportional to 1 + noise scale / batch.
    ratio = (1 + 100 / 16) / (1 + 100 / 64)
    assert result.gradients["0.weight"]["qsgd8"] == pytest.approx(2 * ratio)
    assert resized(part, symbolic("perceptron", "t4"), 64).sensitivity.variance == variance
