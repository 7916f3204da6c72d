"""Skips every test of this folder where there is no GPU that kernels can be had for, and says why.

Invariant: a test here that runs, runs on the GPU. Collecting them needs none, so `make test` sees that they can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu import kit


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = kit.missing()
    if reason:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    if kit.AVAILABLE:
        # A kernel that fails, fails late: here, where it is still known whose it was.
        torch.cuda.synchronize()
