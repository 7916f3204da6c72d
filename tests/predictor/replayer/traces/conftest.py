"""Recorded traces, shared by the tests of valid and of damaged traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.distributed import traced_rank


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with both traces of a single-rank run and its gradients' arrival order."""
    where = tmp_path_factory.mktemp("traces")
    arrival = traced_rank.main(0, 1, str(where))
    (where / "arrival.json").write_text(json.dumps(arrival))
    return where
