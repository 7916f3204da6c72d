"""A script that runs itself once a rank, over links of a given rate, and takes what its first rank found.

Invariant: a rank is given its job as JSON behind --rank, and one that fails ends the script.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.communication import links


def told() -> dict[str, Any] | None:
    """Returns the job of this process, where it is a rank that `found_by` has started."""
    job: dict[str, Any] | None = (
        json.loads(sys.argv[2]) if len(sys.argv) > 2 and sys.argv[1] == "--rank" else None
    )
    return job


def found_by(
    script: str, job: Mapping[str, Any], ranks: int, rate: str | None, seconds: float, node: int = 1
) -> Any:
    """Returns what the first rank has written, as JSON, into the file that its job calls "path".

    Args:
        script: the script's own `__file__`.
        job: what each rank is told.
        ranks: how many, each with one thread.
        rate: of their links; None for loopback.
        seconds: that all may take.
        node: how many of them, in a row, share a link, and speak to one another beside it.
    """
    with tempfile.TemporaryDirectory() as folder, links.shaped(ranks // node, rate) as nodes:
        places = [place for place in nodes for _ in range(node)]
        path = Path(folder) / "found.json"
        command = [sys.executable, script, "--rank", json.dumps({**job, "path": str(path)})]
        ended = links.run(places, command, {"OMP_NUM_THREADS": "1"}, seconds=seconds)
        if any(ended.codes):
            raise SystemExit(f"{rate or 'loopback'}, {job}: ranks ended with {ended.codes}")
        return json.loads(path.read_text())
