"""Skips every test of this folder where there is no GPU that kernels can be had for, and says why.

Invariant: a test here that runs, runs on the GPU. Collecting them needs none, so `make test` sees
    that they can be.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu import kit


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
    if not kit.AVAILABLE:
        return
    try:
        # A kernel that fails, fails late: here, where it is still known whose it was.
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            raise
        # Nothing runs on the GPU in this process any more. xdist names the test that ends it, and
        # goes on in another process.
        print(f"the GPU is lost to this process: {error}", file=sys.stderr, flush=True)
        os._exit(1)
