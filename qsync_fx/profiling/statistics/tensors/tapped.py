"""Runs a graph node by node and hands operators to whoever wants to look at them, or to change them: adjustable ones, others by name.

Invariant: without a change it computes what the graph computes, to the bit. Bodies of higher-order operators (activation checkpointing) are
run in their place, once: what a backward pass would compute again is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from torch import fx

from qsync_fx.graph import Operator, PrecisionGraph, meta
from qsync_fx.graph.nodes import filled
from qsync_fx.graph.notes import Note
from qsync_fx.ops import Kind
from qsync_fx.profiling.statistics.tensors.calling import called
from qsync_fx.profiling.statistics.tensors.captured import Run

Call = Callable[[Sequence[Any]], Any]
Tap = Callable[[Operator, list[Any], Call], Any]
"""Called with an operator, its arguments in the order of the schema, and what computes it of them; returns its result."""


Watch = Callable[[fx.Node, Sequence[Any], dict[str, Any], Callable[[], Any]], Any]
"""Called with any other node, its arguments, and what computes it; returns its result."""


def tapped(tap: Tap, watch: Watch | None = None, also: Container[str] = ()) -> Run:
    """Returns what runs a graph with `tap` at its adjustable operators and those with the ids `also`, and `watch` at all other calls."""
    return lambda part, inputs: _Tapped(part.graph, tap, watch, also).run(*inputs)


class _Tapped(fx.Interpreter):
    def __init__(self, graph: PrecisionGraph, tap: Tap, watch: Watch | None, also: Container[str]) -> None:
        super().__init__(graph.module)
        self._precision_graph, self._tap, self._watch, self._also = graph, tap, watch, also

    def run_node(self, n: fx.Node) -> Any:
        if bodies := meta.bodies(n):
            args, _ = self.fetch_args_kwargs_from_env(n)
            return _Tapped(bodies[0], self._tap, self._watch, self._also).run(*args[1:])
        note = meta.NOTE.get(n)
        if note is None or note.row is None or note.precision is None or not self._taps(note):
            if self._watch is None or n.op != "call_function":
                return super().run_node(n)
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return self._watch(n, args, kwargs, lambda: super(_Tapped, self).run_node(n))
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target: Any = n.target
        given = filled(target, args, kwargs)
        names = list(given)

        def call(values: Sequence[Any]) -> Any:
            # Arguments behind a star have no place: they go by name.
            by_name = {a.name for a in target._schema.arguments if a.kwarg_only}
            pairs = list(zip(names, values, strict=True))
            args = tuple(v for k, v in pairs if k not in by_name)
            return called(target, args, {k: v for k, v in pairs if k in by_name})

        return self._tap(Operator(self._precision_graph, n), list(given.values()), call)

    def _taps(self, note: Note) -> bool:
        return note.kind is Kind.ADJUSTABLE or str(note.id) in self._also
