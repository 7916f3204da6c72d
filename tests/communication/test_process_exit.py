"""Real processes over gloo that end like a user's script: the threads of a compressed training end
before the interpreter does.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support import tiers
from tests.support.processes import ranks

CODES = {"exception": [1, 1, 1], "interrupt": [-signal.SIGINT] * 3, "one fails": [0, 1, 1]}


@pytest.mark.parametrize(
    ("codec", "ending"),
    [
        ("duo4", "end"),
        *(
            pytest.param(codec, ending, marks=tiers.ALL)
            for codec in ("duo4", "qsgd8")
            for ending in ("destroy", "exception", "interrupt", "one fails", "in a guard")
        ),
    ],
)
def test_process_exit_status_is_preserved(codec: str, ending: str, tmp_path: Path) -> None:
    ended = ranks.run("ending_rank.py", 3, tmp_path, codec=codec, ending=ending)
    logs = "\n".join(rank.log for rank in ended)
    assert [rank.code for rank in ended] == CODES.get(ending, [0, 0, 0]), logs
    assert all("qsync communication" in rank.result for rank in ended), (
        "the thread whose end this is about"
    )
    assert "terminate called" not in logs
