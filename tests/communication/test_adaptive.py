"""AQGB's controller in simulation: the example of its paper (section 3) and a link whose bandwidth
changes.
"""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from benchmarks.paper.support.aqgb_simulation import Block, broadcast
from qsync_fx.communication.aqgb import mixed
from qsync_fx.communication.codecs.truncation import LEVELS

BLOCKS = [
    Block(size * 1e6, ready) for size, ready in ((40, 0.27), (20, 0.41), (30, 0.61), (10, 0.68))
]
DEADLINE, LAST = 0.765, 0.68


def gigabit(time: float) -> float:
    return 1e9 / 8


def varying(time: float) -> float:
    """Return the link bandwidth in bytes/s: alternately 650 Mbit/s and 1 Gbit/s, for 50 ms each."""
    return (1e9 if int(time / 0.05 + 1e-9) % 2 else 0.65e9) / 8


CHANGES = [0.05 * n for n in range(1, 60)]


def test_the_example_of_the_paper() -> None:
    adaptive = broadcast(BLOCKS, DEADLINE, gigabit)
    assert [decision.ratio for decision in adaptive.decisions] == pytest.approx(
        [0.4375, 1, 0.375, 0.575], abs=5e-4
    )
    assert adaptive.decisions[2].drained / adaptive.decisions[2].made == pytest.approx(
        0.257, abs=5e-4
    )
    assert adaptive.end == pytest.approx(0.7567, abs=5e-5)
    assert adaptive.overlap(DEADLINE) == 1
    without = broadcast(BLOCKS, DEADLINE, gigabit, adaptive=False)
    assert without.overlap(DEADLINE) == pytest.approx(0.495 / 0.8)
    assert without.overlap(LAST) == pytest.approx(0.5125)
    assert without.sent == pytest.approx(100e6)
    assert 0.81 <= adaptive.overlap(LAST) <= 0.83


def test_a_link_whose_rate_changes() -> None:
    """The paper reports overlaps of 51% and 98%."""
    without = broadcast(BLOCKS, DEADLINE, varying, CHANGES, adaptive=False)
    assert without.overlap(DEADLINE) == pytest.approx(0.509, abs=5e-4)
    assert broadcast(BLOCKS, DEADLINE, varying, CHANGES).overlap(DEADLINE) == pytest.approx(
        0.994, abs=2e-3
    )


@given(ratio=st.floats(0.375, 1))
def test_two_neighbouring_levels_make_a_ratio(ratio: float) -> None:
    shares = mixed(ratio)
    assert sum(shares.values()) == pytest.approx(1)
    assert sum(bits / 32 * share for bits, share in shares.items()) == pytest.approx(ratio)
    indices = [LEVELS.index(bits) for bits in shares]
    assert len(indices) == 1 or indices[1] == indices[0] + 1
    assert all(share > 0 for share in shares.values())


@given(
    sizes=st.lists(st.floats(1e3, 1e8), min_size=1, max_size=6),
    gaps=st.lists(st.floats(1e-3, 0.5), min_size=6, max_size=6),
    rate=st.floats(1e6, 1e10),
)
def test_complete_delivery_needs_at_most_fp32_bytes(
    sizes: list[float], gaps: list[float], rate: float
) -> None:
    times = [sum(gaps[: index + 1]) for index in range(len(sizes))]
    blocks = [Block(size, ready) for size, ready in zip(sizes, times, strict=True)]
    adaptive = broadcast(blocks, times[-1] + gaps[-1], lambda time: rate)
    plain = broadcast(blocks, times[-1] + gaps[-1], lambda time: rate, adaptive=False)
    assert 0.374 * sum(sizes) <= adaptive.sent <= 1.001 * sum(sizes)
    assert plain.sent == pytest.approx(sum(sizes), rel=1e-6)
    assert adaptive.end <= plain.end + 1e-9
    assert all(begin < end for begin, end in adaptive.busy)
