"""AQGB's controller: the example of its paper (section 3), exactly, and what it makes of a link
whose rate changes.
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
    """650 Mbps and 1 Gbps, 50 ms each."""
    return (1e9 if int(time / 0.05 + 1e-9) % 2 else 0.65e9) / 8


CHANGES = [0.05 * n for n in range(1, 60)]


def test_the_example_of_the_paper() -> None:
    found = broadcast(BLOCKS, DEADLINE, gigabit)
    assert [decision.ratio for decision in found.decisions] == pytest.approx(
        [0.4375, 1, 0.375, 0.575], abs=5e-4
    )
    assert found.decisions[2].drained / found.decisions[2].made == pytest.approx(0.257, abs=5e-4)
    assert found.end == pytest.approx(0.7567, abs=5e-5)
    assert found.overlap(DEADLINE) == 1
    without = broadcast(BLOCKS, DEADLINE, gigabit, adaptive=False)
    assert without.overlap(DEADLINE) == pytest.approx(0.495 / 0.8)
    assert without.overlap(LAST) == pytest.approx(0.5125)
    assert without.sent == pytest.approx(100e6)
    assert 0.81 <= found.overlap(LAST) <= 0.83


def test_a_link_whose_rate_changes() -> None:
    """The paper's 51% and 98%."""
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
    places = [LEVELS.index(bits) for bits in shares]
    assert len(places) == 1 or places[1] == places[0] + 1
    assert all(share > 0 for share in shares.values())


@given(
    sizes=st.lists(st.floats(1e3, 1e8), min_size=1, max_size=6),
    gaps=st.lists(st.floats(1e-3, 0.5), min_size=6, max_size=6),
    rate=st.floats(1e6, 1e10),
)
def test_complete_delivery_needs_at_most_fp32_bytes(
    sizes: list[float], gaps: list[float], rate: float
) -> None:
    times = [sum(gaps[: at + 1]) for at in range(len(sizes))]
    blocks = [Block(size, ready) for size, ready in zip(sizes, times, strict=True)]
    found = broadcast(blocks, times[-1] + gaps[-1], lambda time: rate)
    plain = broadcast(blocks, times[-1] + gaps[-1], lambda time: rate, adaptive=False)
    assert 0.374 * sum(sizes) <= found.sent <= 1.001 * sum(sizes)
    assert plain.sent == pytest.approx(sum(sizes), rel=1e-6)
    assert found.end <= plain.end + 1e-9
    assert all(begin < end for begin, end in found.busy)
