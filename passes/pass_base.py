"""What a pass is.

Invariant: a pass is a frozen value, called with a `PrecisionGraph` that it changes in place. Its fields are its options. Its class says its
name, which is what users write, and its scope, and it keeps nothing between two graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol, overload, runtime_checkable

from qsync_fx.errors import OptionError
from qsync_fx.graph import PrecisionGraph


class Scope(Enum):
    """What a pass is called with."""

    MODEL = "model"
    """The whole graph, once: it walks into the bodies of higher-order operators itself."""
    BODY = "body"
    """The graph, and then each body, depth first, as a graph of its own."""


@runtime_checkable
class Pass(Protocol):
    """One step of the pipeline."""

    @property
    def name(self) -> str: ...

    def __call__(self, graph: PrecisionGraph) -> None: ...


def scope(step: Pass) -> Scope:
    """Returns the scope that a pass declares; one that declares none is called with each body."""
    declared: Scope = getattr(step, "scope", Scope.BODY)
    return declared


@dataclass(frozen=True)
class GraphPass:
    """A user's pass: a function on a `PrecisionGraph`, and its place in the pipeline.

    Equal when function and place are equal, so that compiled code is reused exactly as long as the passes are the same.
    """

    scope: ClassVar[Scope] = Scope.MODEL

    name: str
    function: Callable[[PrecisionGraph], None]
    after: str | None = None
    before: str | None = None

    def __call__(self, graph: PrecisionGraph) -> Any:
        return self.function(graph)  # None, or the runner refuses it


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
    """Makes a pass of a function on a `PrecisionGraph`.

    Args:
        after: the pass that it runs directly after; "assign" when neither is given.
        before: the pass that it runs directly before.
        name: what reports call it; the function's name by default.

    Example:
        >>> @graph_pass(after="assign")
        ... def keep_head_fp32(graph):
        ...     for op in graph.operators(kind="adjustable", pattern="**.classifier"):
        ...         op.assign("fp32", reason="the head stays in FP32")
    """
    if after is not None and before is not None:
        raise OptionError(
            "a pass has one place, but both after= and before= are given", do="give one of them"
        )

    def make(function: Callable[[PrecisionGraph], None]) -> GraphPass:
        place = "assign" if after is None and before is None else after
        return GraphPass(name or function.__name__, function, after=place, before=before)

    return make(function) if function is not None else make
