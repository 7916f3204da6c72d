"""Runs operators on fake tensors.

Invariant: nothing is computed, and no size that depends on values is left with a name that nothing has.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode


class FakeRun:
    """A context in which operators run on the fake tensors of `mode`, within others. A class: graphs enter it for every node."""

    def __init__(self, mode: FakeTensorMode | None, *others: AbstractContextManager[Any]) -> None:
        self._contexts: list[Any] = list(others)
        if mode is not None:
            # Without the Python dispatcher operators that are composed of others take no symbolic sizes.
            self._contexts += [enable_python_dispatcher(), mode]
            if mode.shape_env is not None:
                self._contexts.append(mode.shape_env.ignore_fresh_unbacked_symbols())

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *exc: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*exc)
