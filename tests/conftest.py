"""Configuration of all tests.

Invariant: CI runs are repeatable (hypothesis is derandomized); other runs draw new inputs.
"""

import gc
import os
import signal

# A background job of a shell ignores SIGINT. Commands that tests start and interrupt would inherit
# this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Verifier violations of the project's passes are errors in tests, and warnings elsewhere.
os.environ.setdefault("QSYNC_VERIFY", "raise")

# Tests ignore plans that are cached on this machine.
os.environ.setdefault("QSYNC_CACHED_PLAN", "0")

# Processes that tests start import torch, which takes three times as long without compiled modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tests do not depend on the width of the terminal.
os.environ.pop("COLUMNS", None)

# Must be set before torch is imported. Each worker process compiles by itself, as a pool of compile
# processes per worker is too many.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import hypothesis
import pytest
import torch
import torch._dynamo

pytest_plugins = ["tests.support.processes.clean_exit", "tests.support.tiers"]

# No deadline: the first example of a test pays for compilation, and other processes share the
# machine.
hypothesis.settings.register_profile("fresh", deadline=None)
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable" if os.environ.get("CI") else "fresh")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Freeze existing objects, so that garbage collection does not scan millions of them while
    models compile.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True)
def _no_code_of_other_tests() -> None:
    """Reset Dynamo, which caches at most eight compiled versions of a function such as
    `nn.Linear.forward`. A cached match, or the limit, would prevent a test's compilation.
    """
    torch._dynamo.reset()
