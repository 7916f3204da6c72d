"""Errors that Dynamo suppresses, where `torch._dynamo.config.suppress_errors` asks for it: it then runs the frame as it was written.

Invariant: where a plan was given, an error that keeps a graph from being compiled reaches the user nevertheless. Without one it is
suppressed, with Dynamo's own words in the log.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import CodeType

import torch._dynamo.config
from torch._dynamo.exc import RestartAnalysis, SkipFrame

from qsync_fx.errors import PlanError, QSyncError
from qsync_fx.options import Options

_thread = threading.local()


@contextlib.contextmanager
def failures() -> Iterator[list[Exception]]:
    """Yields the list of what graphs fail with while Dynamo converts a frame."""
    before, _thread.failed = getattr(_thread, "failed", None), []
    try:
        yield _thread.failed
    finally:
        _thread.failed = before


def note(error: Exception) -> None:
    """Notes that a graph has failed to compile; requests to skip a frame or to trace it anew are no failures."""
    failed = getattr(_thread, "failed", None)
    if failed is not None and not isinstance(error, (SkipFrame, RestartAnalysis)):
        failed.append(error)


def tell_of_failures(failed: list[Exception], code: CodeType, options: Options) -> None:
    """Raises what Dynamo has suppressed for a frame that it then left to Python, where a plan was given."""
    if not failed or options.automatic or not torch._dynamo.config.suppress_errors:
        return
    error = failed[-1]
    if isinstance(error, QSyncError):
        raise error
    raise PlanError(
        f"a graph of {code.co_qualname} cannot be compiled, and would run as the model is written, without the plan: "
        f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
        where=f"{code.co_qualname}, {code.co_filename}:{code.co_firstlineno}",
        do="set torch._dynamo.config.suppress_errors = False to see the whole error, or leave the module out of what is compiled",
    ) from error
