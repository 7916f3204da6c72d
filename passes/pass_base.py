"""The pass protocol, and the decorator for passes of users.

Invariant: a pass is a frozen value, called with a `PrecisionGraph` that it changes in place. Its
fields are its options. It stores no state between graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol, overload, runtime_checkable

from qsync_fx.errors import OptionError
from qsync_fx.graph import PrecisionGraph


class Scope(Enum):
    """Argument of a pass."""

    MODEL = "model"
    """The top-level graph, once; the pass visits bodies of higher-order operators itself."""
    BODY = "body"
    """The graph and then each body, depth first, as a separate graph."""


@runtime_checkable
class Pass(Protocol):
    """One step of the pipeline."""

    @property
    def name(self) -> str: ...

    def __call__(self, graph: PrecisionGraph) -> None: ...


def scope(step: Pass) -> Scope:
    """Return the scope that a pass declares, BODY by default."""
    declared: Scope = getattr(step, "scope", Scope.BODY)
    return declared


@dataclass(frozen=True)
class GraphPass:
    """A user's pass; passes with equal fields are equal, so compiled code is reused."""

    scope: ClassVar[Scope] = Scope.MODEL

    name: str
    function: Callable[[PrecisionGraph], None]
    after: str | None = None
    before: str | None = None

    def __call__(self, graph: PrecisionGraph) -> Any:
        return self.function(graph)  # the runner rejects any result but None


@overload
def graph_pass(function: Callable[[PrecisionGraph], None], /) -> GraphPass: ...
@overload
def graph_pass(
    *, after: str | None = None, before: str | None = None, name: str | None = None
) -> Callable[[Callable[[PrecisionGraph], None]], GraphPass]: ...
def graph_pass(
    function: Callable[[PrecisionGraph], None] | None = None,
    /,
    *,
    after: str | None = None,
    before: str | None = None,
    name: str | None = None,
) -> GraphPass | Callable[[Callable[[PrecisionGraph], None]], GraphPass]:
    """Make a pass from a function on a `PrecisionGraph`.

    Args:
        after: the pass directly before it; "assign" if neither `after` nor `before` is set.
        before: the pass directly after it.
        name: name in reports; by default the function's name.

    Example:
        >>> @graph_pass(after="assign")
        ... def keep_head_fp32(graph):
        ...     for op in graph.operators(kind="adjustable", pattern="**.classifier"):
        ...         op.assign("fp32", reason="the head stays in FP32")
    """
    after = place_after(after, before, "assign")

    def make(function: Callable[[PrecisionGraph], None]) -> GraphPass:
        return GraphPass(name or function.__name__, function, after, before)

    return make if function is None else make(function)


def place_after(after: str | None, before: str | None, default: str) -> str | None:
    """Return the pass that precedes a user's pass; `default` if the user sets no position."""
    if after is not None and before is not None:
        message = "a pass has one place, but both after= and before= are given"
        raise OptionError(message, do="give one of them")
    return after or (default if before is None else None)
