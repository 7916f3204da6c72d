"""Traces of a run that both tests of good traces and of damaged ones start from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.distributed import traced_rank


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both traces of a run of one rank, and the order in which its gradients arrived."""
    where = tmp_path_factory.mktemp("traces")
    arrival = traced_rank.main(0, 1, str(where))
    (where / "arrival.json").write_text(json.dumps(arrival))
    return where
