"""Registration of the backend with torch, safe for concurrent threads.

torch loads a backend from its entry point when a program first names it, and registers it without a
lock: of several threads that do so simultaneously, all but one fail with "duplicate name".
Invariant: registering the same function again under the same name has no effect. Another function
under the same name is refused, as torch does.

A thread that waits for the import of the backend has already read `register_backend`, so a
replacement function would come too late for it. Therefore the code object of the function is
replaced. Tests pin the parts of torch that this module uses.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

from torch._dynamo.backends import registry

Backend = Callable[..., Any]


def register(backend: Backend, name: str) -> None:
    """Register a backend with torch; called while the module of its entry point is imported."""
    registry.register_backend.__code__ = _registering_once.__code__
    backend._tags = ()  # type: ignore[attr-defined]
    # The function first: torch fails on a name that has neither a function nor an entry point.
    registry._COMPILER_FNS.setdefault(name, backend)
    registry._BACKENDS.setdefault(name, None)


def register_once(backend: Backend | None, name: str | None, tags: Sequence[str]) -> Any:
    """Call torch's `register_backend`, unless the name has this function already."""
    if backend is not None and registry._COMPILER_FNS.get(name or backend.__name__) is backend:
        return backend
    return _register_backend(backend, name, tags)


def _registering_once(compiler_fn: Any = None, name: Any = None, tags: Any = ()) -> Any:
    """Call `register_once`: the new code of torch's `register_backend`, with torch's globals."""
    from qsync_fx.backend.backend_registration import register_once

    return register_once(compiler_fn, name, tags)


def _copied(function: Any) -> Any:
    """Return a function with the code that `function` had before this module was imported."""
    original = types.FunctionType(
        function.__code__, function.__globals__, argdefs=function.__defaults__
    )
    return getattr(function, "__wrapped__", original)


_register_backend = registry.register_backend.__wrapped__ = _copied(registry.register_backend)  # type: ignore[attr-defined]
