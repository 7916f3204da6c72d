"""AQGB's online controller with a simulated clock and link, compared with its paper's decisions."""

from __future__ import annotations

import pytest

from qsync_fx.communication.aqgb import Controller

MB = 1e6
COMINGS = [(40, 0.27), (20, 0.41), (30, 0.61), (10, 0.68)]
DEADLINE = 0.765
LINK = 1e9 / 8


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Link:
    """Link that delivers pending bytes at its rate, compressed by the controller's ratio."""

    def __init__(self, controller: Controller, clock: Clock, rate: float = LINK) -> None:
        self.controller, self.clock, self.rate = controller, clock, rate
        self.undelivered = 0.0

    def until(self, time: float) -> None:
        if self.undelivered > 0:
            size = min(
                self.undelivered, (time - self.clock.now) * self.rate / self.controller.ratio
            )
            wire = size * self.controller.ratio
            self.undelivered -= size
            self.controller.carried(round(size), wire, wire / self.rate, {32: 1})
            self.clock.now += wire / self.rate
        self.clock.now = max(self.clock.now, time)


def step(
    controller: Controller, clock: Clock, number: int, rate: float = LINK, begin: float = 0.0
) -> Link:
    link = Link(controller, clock, rate)
    for size, ready in COMINGS:
        link.until(begin + ready)
        controller.came(number, round(size * MB))
        link.undelivered += size * MB
    link.until(begin + DEADLINE)
    controller.needed()
    link.until(begin + 10.0)
    return link


def test_the_example_of_the_paper() -> None:
    """The first step measures arrival times and bandwidth; the second is the paper's example."""
    clock = Clock()
    controller = Controller(elapsed=True, clock=clock)
    step(controller, clock, 0)
    assert [entry.decision for entry in controller.log] == [None] * 4
    assert [entry.ratio for entry in controller.log] == [1.0] * 4
    step(controller, clock, 1, begin=100)
    first, second, third, last = list(controller.log)[4:]
    assert [entry.ratio for entry in (first, second, third, last)] == pytest.approx(
        [0.4375, 1, 0.375, 0.575], abs=5e-4
    )
    assert third.decision is not None
    assert third.decision.drained / third.decision.made == pytest.approx(0.257, abs=5e-4)
    assert [entry.gap for entry in (first, second, third, last)] == pytest.approx(
        [0.14, 0.2, 0.07, 0.085]
    )
    assert controller.adapted().decisions == 4
    assert controller.adapted().rate == pytest.approx(LINK)


def test_lightly_loaded_link_is_estimated_as_in_the_paper() -> None:
    def last(elapsed: bool) -> float:
        clock = Clock()
        controller = Controller(elapsed=elapsed, clock=clock)
        for number in range(2):
            begin = 10.0 * number
            link = Link(controller, clock)
            for size, ready in ((1, 0.0), (20, 0.5)):
                link.until(begin + ready)
                controller.came(number, round(size * MB))
                link.undelivered += size * MB
            link.until(begin + 1.0)
            controller.needed()
        return controller.log[-1].ratio

    assert last(elapsed=True) == 0.375
    assert last(elapsed=False) == 1.0


def test_next_step_is_predicted_from_the_latest_equal_step() -> None:
    clock = Clock()
    controller = Controller(clock=clock)

    def run(number: int, sizes: list[int], gap: float) -> None:
        for size in sizes:
            controller.came(number, size)
            clock.now += gap
            controller.carried(size, size, 0.001, {32: size // 4})
        controller.needed()

    for number, gap in enumerate((0.1, 0.1, 0.1)):
        run(number, [1000, 2000], gap)
    run(3, [1000, 3000], 0.5)
    assert [entry.gap for entry in controller.log][-2:] == [pytest.approx(0.1), None], (
        "a new bucket has no predicted gap and is sent in full precision"
    )
    assert controller.ratio == 1.0
    run(4, [1000, 3000], 0.5)
    assert controller.log[-1].gap == pytest.approx(0.5)
    for number in range(5, 11):
        run(number, [1000, 2000], 0.2)
    assert [entry.gap for entry in controller.log][-2:] == pytest.approx([0.2, 0.2])


def test_unawaited_step_is_not_used() -> None:
    clock = Clock()
    controller = Controller(clock=clock)
    for number in range(3):
        controller.came(number, 1000)
        controller.carried(1000, 1000, 0.001, {32: 250})
    assert [entry.gap for entry in controller.log] == [None] * 3


def test_grace_is_time_that_a_step_may_wait() -> None:
    for grace, ratio in ((0.0, 0.375), (1.0, 1.0)):
        clock = Clock()
        controller = Controller(grace=grace, clock=clock)
        for number in range(2):
            controller.came(number, round(100 * MB))
            controller.needed()
            clock.now += 0.9
            controller.carried(round(100 * MB), 100 * MB, 0.8, {32: 1})
        assert controller.log[-1].ratio == ratio


def test_a_slower_link_gets_fewer_bits_and_a_faster_one_all() -> None:
    for rate, least, most in ((LINK / 2, 0.375, 0.6), (10 * LINK, 1.0, 1.0)):
        clock = Clock()
        controller = Controller(clock=clock)
        step(controller, clock, 0, rate)
        step(controller, clock, 1, rate, begin=100)
        ratios = [entry.ratio for entry in list(controller.log)[4:]]
        assert least <= min(ratios) and ratios[2] <= most, ratios


def test_learned_state_is_saved() -> None:
    clock = Clock()
    controller = Controller(elapsed=True, clock=clock)
    step(controller, clock, 0)
    other = Controller(elapsed=True, clock=clock)
    other.load(controller.saved())
    for trained in (controller, other):
        clock.now = 100.0
        step(trained, clock, 1, begin=100)
    assert [entry.ratio for entry in other.log] == [
        entry.ratio for entry in list(controller.log)[4:]
    ]
    assert str(other.adapted()) == "4 decisions: 100.0% in 32 bits; link bandwidth 125.0 MB/s"
    new = Controller()
    new.load({})
    assert str(new.adapted()) == "0 decisions: no data sent; link bandwidth not measured yet"
