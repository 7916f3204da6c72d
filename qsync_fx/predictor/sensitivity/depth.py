"""An operator's variance from how deep it stands: closed forms, for where gradients are not propagated (`profiling.statistics` does).

With operators at depths 1 to L, an error in a forward result reaches the gradients of the L - d + 1 operators from there on, and one in
an input gradient those of the d - 1 operators before: Omega = gamma**2 (L - d + 1) forward + weight gradient + (d - 1) input gradient.
QSync's equation 3 has the two weights the other way round, as it asks for the noise received at an operator and not for what it causes.

Invariant: a depth is the longest path to an operator: with residual branches the shortest one is as long as there are no operators at all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def depths(inputs: Mapping[Node, Iterable[Node]], counted: Iterable[Node]) -> dict[Node, int]:
    """Returns the number of counted nodes on the longest path to each node, itself included.

    Args:
        inputs: what each node reads, in an order in which these come first.
    """
    own, found = set(counted), dict[Node, int]()
    for node, before in inputs.items():
        found[node] = max((found.get(one, 0) for one in before), default=0) + (node in own)
    return found


def omega(
    gamma: float, depth: int, deepest: int, forward: float, weight_gradient: float, input_gradient: float
) -> float:
    """Returns the variance that an operator causes.

    Args:
        gamma: the derivative of the loss by its input: 1/N for a mean over N samples.
        depth, deepest: of the operator, and of the model's deepest.
        forward, weight_gradient, input_gradient: the variance of its three products, summed over elements.
    """
    return gamma**2 * (deepest - depth + 1) * forward + weight_gradient + (depth - 1) * input_gradient
