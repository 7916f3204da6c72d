"""What all tests share.

Invariant: a test run is repeatable where it has to be (CI derandomizes hypothesis), and looks at
    new inputs everywhere else.
"""

import gc
import os
import signal

# A shell that starts tests in the background has them ignore Ctrl-C, and so would the commands that
# tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A rule that a pass of ours breaks is an error here, and a warning elsewhere.
os.environ.setdefault("QSYNC_VERIFY", "raise")

# What has been measured on this machine is nothing to tests.
os.environ.setdefault("QSYNC_CACHED_PLAN", "0")

# Processes that tests start import torch, which takes three times as long without compiled modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# How wide the terminal is that tests start in is nothing to them.
os.environ.pop("COLUMNS", None)

# Before torch is imported: with tests on several processes each one compiles in itself, and a pool
# of compilers for each is too many.
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
    """What is there by now stays: Python need not look through millions of objects again and again
    while models compile.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True)
def _no_code_of_other_tests() -> None:
    """Dynamo keeps what it compiled of a function, `nn.Linear.forward` say, eight versions at most:
    a test that meets another one's, or the limit, compiles nothing.
    """
    torch._dynamo.reset()
