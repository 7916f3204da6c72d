"""`@qsync_fx.rewrite`: a pass that replaces a pattern, both written in plain torch.

Invariant: a rewrite changes only sites that compute the pattern and whose inner values have no
other readers. Reports show their number, and why other sites remain unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from torch import Tensor, fx

from qsync_fx.errors import OptionError, PassError, QSyncError
from qsync_fx.graph import Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.node_metadata import Rewritten
from qsync_fx.passes.casting import drop_unread_casts
from qsync_fx.passes.pass_base import GraphPass, place_after
from qsync_fx.passes.rewriting.apply_rewrite import obstacle, put
from qsync_fx.passes.rewriting.match import Match, MatchSite, sites
from qsync_fx.passes.rewriting.pattern import Pattern
from qsync_fx.passes.tracing.retrace import modes


@dataclass(frozen=True)
class Rewrite(GraphPass):
    """A rewrite: `function` is the pattern, `replacement` decorates the code that replaces it."""

    where: Callable[[Match], Any] | None = None
    example: tuple[Tensor, ...] | None = field(default=None, compare=False)
    _puts: list[Callable[..., Any]] = field(default_factory=list, compare=False)

    def replacement(self, function: Callable[..., Any]) -> Rewrite:
        """Set the function that replaces the pattern; return the rewrite.

        The function accepts any of the pattern's arguments by name, and optionally `match`
        (`Match`) for information about the site. It returns as many tensors as the pattern, of the
        same shapes and dtypes. Tensors that it refers to are not copied: parameters get gradients,
        and writes to buffers persist.
        """
        available = {*inspect.signature(self.function).parameters, "match"}
        for name in inspect.signature(function).parameters:
            if name not in available:
                owner = f"the replacement of {self.name!r}"
                message = f"{owner} takes {name!r}, which the pattern does not have"
                raise OptionError(message, do=f"take some of {', '.join(sorted(available))}")
        if self._puts:
            message = f"the rewrite {self.name!r} already has a replacement"
            raise OptionError(message, do="write one rewrite for each replacement")
        self._puts.append(function)
        return self

    def __call__(self, graph: PrecisionGraph) -> None:
        if not self._puts:
            message = f"the rewrite {self.name!r} has no replacement"
            raise OptionError(message, do=f"decorate one with @{self.name}.replacement")
        result = Rewritten()
        if graph.context.fake_mode is not None:  # else the graph contains no tensors
            for part in graph.walk():
                result += self._rewrite(part)
        graph.rewritten[self.name] = result
        graph.module.recompile()

    @functools.cached_property
    def _pattern(self) -> Pattern:
        return Pattern.of(self.function, self.example)

    def _rewrite(self, graph: PrecisionGraph) -> Rewritten:
        in_force, used = modes(graph), set[fx.Node]()
        chosen: list[tuple[MatchSite, Match]] = []
        left: list[str] = []
        for site in sites(graph, self._pattern, in_force):
            if not used.isdisjoint(site.matched):
                continue
            match = self._match(graph, site)
            if self.where is not None and not self._wanted(self.where, match):
                continue
            if why := obstacle(graph, site, in_force):
                left.append(f"{match.main.where}: {why}")
                continue
            used.update(site.matched)
            chosen.append((site, match))
        now: dict[fx.Node, fx.Node] = {}
        for site, match in chosen:
            current = _moved(site, now)
            now |= put(graph, current, self.name, self._puts[0], match, in_force[site.matched[-1]])
        drop_unread_casts(graph)
        return Rewritten(len(chosen), tuple(left))

    def _match(self, graph: PrecisionGraph, site: MatchSite) -> Match:
        noted = (node for node in site.matched if node in node_metadata.NOTE)
        operators = tuple(Operator(graph, node) for node in noted)
        return Match(graph, operators, fx.node.map_arg(dict(site.arguments), graph.value))

    def _wanted(self, where: Callable[[Match], Any], match: Match) -> bool:
        try:
            return bool(where(match))
        except QSyncError:
            raise
        except Exception as error:
            message = f"the guard of {self.name!r} failed: {type(error).__name__}: {error}"
            do = "correct the function given as where="
            raise PassError(message, where=match.main.where, do=do) from error


def _moved(site: MatchSite, now: Mapping[fx.Node, fx.Node]) -> MatchSite:
    """Return a site with arguments that other replacements have changed."""
    arguments = fx.node.map_arg(dict(site.arguments), lambda node: now.get(node, node))
    return MatchSite(arguments, site.matched, site.outputs)


@overload
def rewrite(function: Callable[..., Any], /) -> Rewrite: ...
@overload
def rewrite(
    *,
    after: str | None = None,
    before: str | None = None,
    where: Callable[[Match], Any] | None = None,
    example: Sequence[Tensor] | None = None,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Rewrite]: ...
def rewrite(
    function: Callable[..., Any] | None = None,
    /,
    *,
    after: str | None = None,
    before: str | None = None,
    where: Callable[[Match], Any] | None = None,
    example: Sequence[Tensor] | None = None,
    name: str | None = None,
) -> Rewrite | Callable[[Callable[..., Any]], Rewrite]:
    """Make a pass that finds a pattern in plain torch; `.replacement` sets the new code.

    Arguments of the function without a default match any tensor. Arguments with a default match any
    value at the positions where the default occurs: `eps=1e-5`, `p=0.1`, `training=True`.

    Args:
        after: the pass directly before it; "normalize" if neither `after` nor `before` is set.
        before: the pass directly after it.
        where: predicate on each `Match`; only sites for which it returns true are rewritten.
        example: tensors that the function accepts, needed if it accepts no FP32 tensors of size 8
            in any number of dimensions. Sizes and dtypes may differ from the model's.
        name: name in reports; by default the function's name.

    Example:
        >>> @rewrite
        ... def scaled(x, weight, bias):
        ...     return torch.relu(torch.nn.functional.linear(x, weight, bias))
        >>> @scaled.replacement
        ... def put(x, weight, bias):
        ...     return torch.nn.functional.linear(x, weight, bias).clamp(min=0)
    """
    after = place_after(after, before, "normalize")

    def make(function: Callable[..., Any]) -> Rewrite:
        examples = example if example is None else tuple(example)
        title = name or function.__name__
        result = Rewrite(title, function, after, before, where=where, example=examples)
        result._pattern  # noqa: B018 - checks the signature at definition
        return result

    return make if function is None else make(function)
