"""Derivatives of random sums of gradients: how the tensors of one run reach the gradients of all parameters.

For random signs r, one a parameter, p = r'G is a sum of all gradients G. Its derivative by a tensor t is H'r, H the derivative of G by t,
and its derivative by the gradient of t says how an error in that gets through. In the mean over signs the square of an element of H'r is
the square norm of what the element does to G, and the square of e'H'r that of what an error e of all elements does.

Invariant: each probe costs one backward pass through the backward pass, whatever the number of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qsync_fx.errors import ProfileError
from qsync_fx.ops import Place

_EIGHT: Final = torch.tensor([[1.0 - 2.0 * ((byte >> bit) & 1) for bit in range(8)] for byte in range(256)])
"""The signs that a byte stands for."""


@dataclass(frozen=True)
class Probe:
    """
    Attributes:
        by_value: the derivative by what is at each edge; None where there is none.
        by_gradient: the derivative by the gradient of what is at an edge, by its number.
    """

    by_value: Sequence[Tensor | None]
    by_gradient: Mapping[int, Tensor | None]


@dataclass(frozen=True)
class Probed:
    """
    Attributes:
        gradients: of the loss by what is at each edge; None where it does not depend on it.
        probes: one a draw of signs.
    """

    gradients: Sequence[Tensor | None]
    probes: Sequence[Probe]

    def of(self, numbers: Mapping[Place, int]) -> dict[Place, Tensor]:
        """Returns the gradients of a call's tensors, those that have one, by place."""
        return {place: g for place, number in numbers.items() if (g := self.gradients[number]) is not None}


def probed(
    loss: Tensor, parameters: Sequence[Tensor], edges: Sequence[GradientEdge], draws: int, generator: torch.Generator
) -> Probed:
    """Differentiates a loss, and `draws` random sums of the gradients of its parameters. The graph stays as it is.

    Raises:
        ProfileError: an operator of the model has no second derivative.
    """
    try:
        return _probed(loss, parameters, edges, draws, generator)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise _not_twice(str(error).partition("\n")[0]) from error


def _not_twice(why: str) -> ProfileError:
    return ProfileError(
        f"the model cannot be differentiated twice: {why}",
        where='the method "exact"',
        do='find the sensitivity with method="injected", which costs a pass an operator and precision, or with method="depth"',
    )


def _probed(
    loss: Tensor, parameters: Sequence[Tensor], edges: Sequence[GradientEdge], draws: int, generator: torch.Generator
) -> Probed:
    ways: list[Any] = [*parameters, *edges]
    found: Sequence[Tensor | None] = torch.autograd.grad(loss, ways, create_graph=True, allow_unused=True)
    # Where the loss is linear in everything, its gradients depend on nothing.
    own, inner = [g for g in found[: len(parameters)] if g is not None and g.requires_grad], found[len(parameters) :]
    known = [at for at, g in enumerate(inner) if g is not None and g.requires_grad]
    wanted: list[Any] = [*edges, *(inner[at] for at in known)]
    _check(own)
    probes = []
    for _ in range(draws):
        # Where nothing is made narrow, nothing is asked for.
        derived: Sequence[Tensor | None] = [None] * len(wanted)
        if own and wanted:
            drawn = [signs(g, generator) for g in own]
            derived = torch.autograd.grad(own, wanted, drawn, allow_unused=True, retain_graph=True)
        probes.append(Probe(derived[: len(edges)], dict(zip(known, derived[len(edges) :], strict=True))))
    return Probed([None if g is None else g.detach() for g in inner], probes)


def signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Returns 1 or -1 for each element, eight of one draw: a number each took as long as a fifth of a probe."""
    count = like.numel()
    drawn = torch.randint(0, 256, (-(-count // 8),), dtype=torch.uint8, generator=generator)
    return _EIGHT[drawn.int()].flatten()[:count].view(like.shape).to(like)


def _check(gradients: Sequence[Tensor]) -> None:
    """Raises where a gradient is marked as one that has none of its own: torch takes it for a constant where nothing is to raise."""
    todo, seen = [g.grad_fn for g in gradients], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("::Error"):
            raise _not_twice("it holds a torch.autograd.Function that is marked with once_differentiable")
        todo += [before for before, _ in node.next_functions]
