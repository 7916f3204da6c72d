"""Exit of processes with compressed gradients: communication threads end before the interpreter."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from qsync_fx.communication.transport import COLLECTIVE, POINT_TO_POINT
from tests.support import tiers
from tests.support.processes import ranks

CODES = {"exception": [1, 1, 1], "interrupt": [-signal.SIGINT] * 3, "one fails": [0, 1, 1]}


@tiers.one_in(2)
@pytest.mark.parametrize(
    ("codec", "transport", "ending"),
    [
        ("duo4", POINT_TO_POINT, "end"),
        *(
            pytest.param(codec, transport, ending, marks=tiers.ALL)
            for codec, transport in (
                ("duo4", POINT_TO_POINT),
                ("qsgd8", POINT_TO_POINT),
                ("qsgd8", COLLECTIVE),
            )
            for ending in ("destroy", "exception", "interrupt", "one fails", "in a guard")
        ),
    ],
)
def test_process_exit_status_is_preserved(
    codec: str, transport: str, ending: str, tmp_path: Path
) -> None:
    job = {"codec": codec, "ending": ending, "compress": {"transport": transport}}
    ended = ranks.run("ending_rank.py", 3, tmp_path, **job)
    logs = "\n".join(rank.log for rank in ended)
    assert [rank.code for rank in ended] == CODES.get(ending, [0, 0, 0]), logs
    assert all("qsync communication" in rank.result for rank in ended), (
        "the communication thread is running at the exit"
    )
    assert "terminate called" not in logs
