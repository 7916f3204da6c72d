"""Step times with compressed gradients, compared with a published study.

Each network is predicted from the others.
"""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.published import communication_study
from benchmarks.published.communication_study import EXCHANGES, CollectiveSample, Exchange
from qsync_fx.errors import ProfileError


def test_networks_that_were_left_out() -> None:
    """The median error of the QSGD rows must be at most 3.5%."""
    every = communication_study.cells()
    errors = {
        cell: error
        for cell, exchange in communication_study.left_out(every).items()
        for error in communication_study.errors([cell], exchange)
    }
    assert len(errors) == len(every) == 4 * (6 * 4 + 5 * 3)
    for primitive in ("MPI", "NCCL"):
        selected = [error for cell, error in errors.items() if cell.primitive == primitive]
        assert statistics.median(selected) <= 0.035
    assert statistics.median(errors.values()) <= 0.025
    unchanged = [
        abs(cell.sample.without / cell.sample.seconds - 1)
        for cell in every
        if cell.primitive == "MPI"
    ]
    assert statistics.median(unchanged) > 0.2, (
        "the 32-bit step time alone is not an accurate prediction"
    )


def test_one_bit_with_buckets_has_the_link_of_qsgd() -> None:
    result = communication_study.one_bit_left_out()
    assert len(result) == 6 * 4
    assert statistics.median(result.values()) <= 0.05


def test_printed_speeds_are_relative_to_32_bits() -> None:
    rows = communication_study.speeds(communication_study.left_out(communication_study.cells()))
    assert sum("speed" in row for row in rows) == 4 * (6 * 4 + 5 * 3) + 2 * 6 * 4 - 1
    columns = {"case": "AlexNet", "primitive": "MPI", "gpus": 8, "codec": "qsgd", "bits": 2}
    (speed,) = (row["speed"] for row in rows if columns.items() <= row.items())
    assert speed == pytest.approx(1076.5 / 272.9)
    (scaling,) = (row["scaling"] for row in rows if columns.items() <= row.items())
    assert scaling == pytest.approx(1076.5 / 240.8)


def test_prices_are_those_of_the_cheapest_instance() -> None:
    rows = communication_study.prices()
    (alone,) = (row for row in rows if row["case"] == "AlexNet" and row["bits"] == 8)
    assert alone["gpus"] == 1
    assert alone["price"] == pytest.approx(0.9 * 1.3e6 * 112 / 240.8 / 3600)


def test_more_parameters_make_8_bits_pay_more() -> None:
    speeds = [row["predicted speed"] for row in communication_study.larger_models()]
    assert speeds == sorted(speeds) and 1 < speeds[0] < speeds[-1] < 4


def test_constants_equal_the_published_tables() -> None:
    every = communication_study.cells()
    assert {(cell.primitive.lower(), cell.gpus) for cell in every} == EXCHANGES.keys()
    for (primitive, gpus), exchange in EXCHANGES.items():
        fitted = Exchange.fit(
            [
                cell.sample
                for cell in every
                if (cell.primitive.lower(), cell.gpus) == (primitive, gpus)
            ]
        )
        assert fitted.travel == pytest.approx(exchange.travel, rel=1e-2)
        assert fitted.coding == pytest.approx(exchange.coding, rel=1e-2)


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-11, 1e-8), st.floats(-1e-10, 1e-9), st.integers(0, 2**32))
def test_fit_recovers_constants_despite_an_outlier(travel: float, coding: float, seed: int) -> None:
    import random

    draw, exchange = random.Random(seed), Exchange(travel, coding)
    samples = []
    for width in (0.28, 0.5, 1.0, 2.0) * 4:
        elements = draw.uniform(1e6, 1e8)
        without = 1 + 4 * travel * elements
        samples.append(
            CollectiveSample(elements, width, without, exchange.seconds(elements, width, without))
        )
    wrong = samples[3]
    samples[3] = CollectiveSample(
        wrong.elements, wrong.element_bytes, wrong.without, 2 * wrong.seconds
    )
    fitted = Exchange.fit(samples)
    for sample in samples[:3] + samples[4:]:
        assert fitted.seconds(
            sample.elements, sample.element_bytes, sample.without
        ) == pytest.approx(sample.seconds, rel=5e-3)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_samples_of_one_width_are_rejected(count: int) -> None:
    with pytest.raises(ProfileError, match="do not tell travelling from coding"):
        Exchange.fit(
            [CollectiveSample(1e6 * index, 1.0, 1.0, 0.9) for index in range(1, count + 1)]
        )
