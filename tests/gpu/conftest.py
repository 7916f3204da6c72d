"""Skip every test of this folder, with the reason, without a GPU that has kernels.

Invariant: a test that runs here uses the GPU. Collection needs no GPU, so `make test` checks it.
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
        # Kernel errors are asynchronous: wait for them while the failing test is known.
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            raise
        # This process cannot use the GPU any more. xdist reports the test that ends it and
        # continues in another process.
        print(f"the GPU is lost to this process: {error}", file=sys.stderr, flush=True)
        os._exit(1)
