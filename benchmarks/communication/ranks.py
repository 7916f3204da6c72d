"""Multi-process benchmarks: a script starts itself once per rank over rate-limited links.

Invariant: a rank receives its job as JSON after --rank; if a rank fails, the script fails.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.communication import links


def requested_job() -> dict[str, Any] | None:
    """Return the job of this process if `found_by` started it as a rank, else None."""
    job: dict[str, Any] | None = None
    if len(sys.argv) > 2 and sys.argv[1] == "--rank":
        job = json.loads(sys.argv[2])
    return job


def found_by(
    script: str, job: Mapping[str, Any], ranks: int, rate: str | None, seconds: float, node: int = 1
) -> Any:
    """Run `script` as all ranks, and return the JSON that rank 0 writes to its job's "path".

    Args:
        script: the script's `__file__`.
        job: arguments of all ranks, without "path".
        ranks: number of ranks, with one thread each.
        rate: of the links; None for loopback.
        seconds: time limit of all ranks together.
        node: number of consecutive ranks that share a namespace and its link.
    """
    with tempfile.TemporaryDirectory() as folder, links.shaped(ranks // node, rate) as nodes:
        places = [place for place in nodes for _ in range(node)]
        path = Path(folder) / "found.json"
        command = [sys.executable, script, "--rank", json.dumps({**job, "path": str(path)})]
        ended = links.run(places, command, {"OMP_NUM_THREADS": "1"}, seconds=seconds)
        if any(ended.codes):
            raise SystemExit(f"{rate or 'loopback'}, {job}: ranks ended with {ended.codes}")
        return json.loads(path.read_text())
