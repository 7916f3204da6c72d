"""What every operator of a graph costs under a plan, its casts included, by its id.

Invariant: the sum over all operators is the cost of the graph: each cast is charged to one operator, and what is kept counts once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from torch import fx

from qsync_fx.graph.algebra import Cost
from qsync_fx.graph.costs.casts import casts
from qsync_fx.graph.costs.flow import Flow
from qsync_fx.graph.costs.operator import operator_cost
from qsync_fx.graph.costs.places import Change, Place, places
from qsync_fx.graph.reads import State
from qsync_fx.plan.opid import OpId


class Costing:
    """Costs of one graph, for any plan; what was computed for one plan is there for the next."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._known: dict[tuple[fx.Node, State], Cost] = {}

    @functools.cached_property
    def places(self) -> list[Place | Change]:
        """What may need a cast, whatever the plan."""
        return places(self.flow)

    def own(self, node: fx.Node, state: State) -> Cost:
        """Returns what the operator at `node` costs in a state, without casts."""
        key = node, state
        if key not in self._known:
            site = self.flow.by_node[node]
            self._known[key] = operator_cost(self.flow, site, state).renamed(self.flow.sizes)
        return self._known[key]

    def of(self, states: Mapping[OpId, State]) -> dict[OpId, Cost]:
        """Returns what each operator costs, by its id, where the operators are in these states."""
        by_node = {site.node: states[site.id] for site in self.flow.sites if site.id in states}
        found = {site.id: self.own(site.node, by_node[site.node]) for site in self.flow.sites if site.node in by_node}
        for cast in casts(self.flow, by_node, self.places):
            if cast.owner is not None:
                owner = self.flow.by_node[cast.owner].id
                found[owner] += cast.cost.renamed(self.flow.sizes)
        return found
