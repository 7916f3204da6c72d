"""Drift of links: lasting changes are detected, noise is not, and ranks on a link that slows down
change codecs.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from benchmarks.communication import links as made_links
from qsync_fx import OptionError
from qsync_fx.distributed import drift as watched
from qsync_fx.distributed.drift import (
    Hysteresis,
    LinkProbe,
    LinkTimes,
    ProbedLinks,
    link_drift,
)
from qsync_fx.distributed.replan import PlanChange, ReplanCause, ReplanReport
from qsync_fx.predictor.replayer.cluster import (
    Cluster,
    ClusterDevice,
    Exchange,
    Network,
    Transport,
)
from tests.support import tiers
from tests.support.processes import ranks

HOW = Hysteresis(patience=5, cooldown=20, links=0.5)


@pytest.fixture
def links() -> Any:
    if (reason := made_links.missing()) is not None:
        pytest.skip(f"no links can be made here: {reason}")
    return made_links


@given(st.lists(st.floats(1 / 1.5, 1.5), min_size=1, max_size=5), st.floats(0.01, 100))
def test_single_time_within_the_tolerance_is_no_change(within: list[float], other: float) -> None:
    assert link_drift([*within, other], HOW) is None


@given(st.lists(st.floats(1.51, 50), min_size=1, max_size=5))
def test_repeated_times_beyond_the_tolerance_are_a_change(beyond: list[float]) -> None:
    slower, faster = link_drift(beyond, HOW), link_drift([1 / ratio for ratio in beyond], HOW)
    assert slower is not None and min(beyond) <= slower <= max(beyond)
    assert faster is not None and 1 / max(beyond) <= faster <= 1 / min(beyond)
    assert link_drift([*beyond, 1 / beyond[0]], HOW) is None


def test_negative_share_is_rejected() -> None:
    with pytest.raises(OptionError, match="links must be a share"):
        Hysteresis(links=-1)


@pytest.mark.parametrize("bandwidth", [1e6, 1.25e8, 1.25e9, 1e12])
def test_measured_time_follows_from_bytes(bandwidth: float) -> None:
    cluster = Cluster({"cpu": ClusterDevice(4)}, Network(bandwidth, 1e-4))
    probe = LinkProbe.of(cluster)
    assert probe.seconds == pytest.approx(probe.nbytes / bandwidth + 1e-4 / 2), (
        "a probe has one of the two phases of an all-reduce"
    )
    assert probe.seconds >= 0.01 or probe.nbytes == 2**26
    assert LinkProbe.noted(probe.notes()) == LinkProbe(
        probe.nbytes, pytest.approx(probe.seconds, rel=1e-5)
    )
    assert LinkProbe.of(Cluster({"cpu": ClusterDevice(1)})).notes() == {}
    assert LinkProbe.noted({}) is None


def test_the_probed_link_is_that_of_the_codecs() -> None:
    """All-reduces of the default group may use another link than compressed gradients."""
    transport: Transport
    for transport in ("point_to_point", "collective"):
        exchanges = [
            Exchange("point_to_point", "all", 2, [(1e3, 1e-4), (1e6, 0.1), (1e9, 100.0)]),
            Exchange("collective", "all", 2, [(1e3, 1e-7), (1e6, 1e-4), (1e9, 0.1)]),
        ]
        network = Network(all_reduce=[(1e9, 1e-6)], exchanges=exchanges, transport=transport)
        probe = LinkProbe.of(Cluster({"gpu": ClusterDevice(2)}, network))
        rate = {"point_to_point": 1e-7, "collective": 1e-10}[transport]
        assert probe.transport == transport
        assert probe.seconds == pytest.approx(probe.nbytes * rate)
        assert LinkProbe.noted(probe.notes()) == replace(
            probe, seconds=pytest.approx(probe.seconds, rel=1e-5)
        )


def test_monitor_pauses_after_a_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    durations = iter([0.1, 0.1, 0.4, 0.4, 0.4, 0.4, 0.1, 0.1])
    used: list[str] = []

    def exchanged(transport: str, nbytes: int, repeats: int, device: object) -> float:
        used.append(transport)
        return next(durations)

    monkeypatch.setattr(watched, "exchange_seconds", exchanged)
    ours = ProbedLinks(LinkProbe(2**20, 0.1).notes(), HOW)
    assert [ours.look() for _ in range(4)] == [None, None, None, pytest.approx(4.0)]
    ours.decided(4.0)
    assert ours.probe == LinkProbe(2**20, pytest.approx(0.4))
    assert [ours.look() for _ in range(4)] == [None] * 4, (
        "the monitor does not measure during the cooldown"
    )
    assert [ours.look() for _ in range(2)] == [None, None], "0.4 s is the new prediction"
    assert [ours.look() for _ in range(2)] == [None, pytest.approx(0.25)]
    ours.decided(20.0)
    assert ours.probe == LinkProbe(2**16, pytest.approx(0.5)), (
        "the probe shrinks, since a probe of 8 s would delay training"
    )
    assert set(used) == {"point_to_point"}
    monkeypatch.setattr(
        watched, "exchange_seconds", lambda transport, nbytes, repeats, device: nbytes / 2**17
    )
    monkeypatch.setattr(
        watched, "all_reduce_seconds", lambda nbytes, repeats, device: nbytes / 2**18
    )
    monkeypatch.setattr(watched.distributed, "get_world_size", lambda: 2)
    powers = (10, 12, 14, 16)
    assert ours.times() == LinkTimes(
        [(2**power, 2.0 ** (power - 18)) for power in powers],
        [Exchange("point_to_point", "all", 2, [(2**p, 2.0 ** (p - 17)) for p in powers])],
    )
    assert ProbedLinks({}, HOW).look() is None and ProbedLinks({}, HOW).times() is None


def test_link_change_is_reported_with_numbers() -> None:
    decided = ReplanReport(
        40,
        (ReplanCause(-1, "", PlanChange.LINKS, 0.02, 0.4),),
        None,
        None,
        "the active plan is still the best one",
    )
    assert (
        "although an exchange of gradients takes 400 ms instead of the predicted 20 ms "
        "(ratio 20.00)" in str(decided)
    )
    assert ReplanReport.from_dict(json.loads(json.dumps(decided.to_dict()))) == decided


@tiers.ALL
@pytest.mark.timeout(600)
def test_over_a_link_that_becomes_slow_gradients_go_in_a_codec(links: Any, tmp_path: Path) -> None:
    with links.shaped(2, "500mbit") as places:

        def slows() -> None:
            until = time.monotonic() + 400
            while (
                sum((tmp_path / f"{rank}.there").exists() for rank in range(2)) < 2
                and time.monotonic() < until
            ):
                time.sleep(0.02)
            links.reshape(places, "20mbit")
            (tmp_path / "changed").touch()

        changing = threading.Thread(target=slows, daemon=True)
        changing.start()
        command = [sys.executable, str(ranks.script_of("relinked_rank.py")), str(tmp_path)]
        ended = links.run(places, command, ranks.ENVIRONMENT, seconds=500, caught=True)
    assert ended.codes == (0, 0), "\n".join(ended.printed)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for name in ("before", "after", "replanned", "weights", "name", "note"):
        assert first[name] == second[name], name
    assert first["before"] == {}, "FP32 gradients meet the time limit at 500 Mbit/s"
    # Imprecise measurements before training can cause another decision, which retains the plan.
    (decided,) = (
        report
        for entry in first["replanned"]
        if (report := ReplanReport.from_dict(entry)).after is not None
    )
    assert decided.step > 10, "replanning happens only after the link changes"
    (cause,) = decided.causes
    assert cause.change is PlanChange.LINKS
    assert cause.measured > 5 * cause.predicted, "the link has 1/25 of its former bandwidth"
    assert decided.before and decided.after
    assert decided.after.seconds < 0.2 < decided.before.seconds
    assert set(first["after"].values()) <= {"qsgd8", "qsgd4"} and first["after"]
    assert all(printed.count("a new plan is active") == 1 for printed in ended.printed), (
        "each rank announces the new plan once"
    )
    assert "a plan's qsgd" in first["name"]
