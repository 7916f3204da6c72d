"""What one call of an operator errs by in a precision: of each tensor that it rounds the variance or, where nothing is random, the error.

Products round what they read and what they give, which formulas tell of the tensors alone. A norm or a softmax computes on in the narrow
format inside, in as many roundings as its kernel has, and so does what the cascade makes narrow: these are run in that format, on the
tensors at hand, and compared.

Invariant: looks at one operator, and changes nothing.

Derivatives of random sums of gradients: how the tensors of one run reach the gradients of all parameters.

For random signs r, one a parameter, p = r'G is a sum of all gradients G. Its derivative by a tensor t is H'r, H the derivative of G by t,
and its derivative by the gradient of t says how an error in that gets through. In the mean over signs the square of an element of H'r is
the square norm of what the element does to G, and the square of e'H'r that of what an error e of all elements does.

Invariant: each probe costs one backward pass through the backward pass, whatever the number of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qsync_fx.errors import ProfileError
from qsync_fx.formats import Precision
from qsync_fx.graph.fx_utils import argument_at
from qsync_fx.ops.spec import Place
from qsync_fx.predictor.indicator.rounding_variance import error, noise
from qsync_fx.profiler.tensor_capture.rounding_sites import Follower, RoundingSite
from qsync_fx.profiler.tensor_capture.tensor_hooks import OUTPUT, OperatorCall, put


@dataclass(frozen=True)
class Erring:
    """
    Attributes:
        place: of the tensor.
        gradient: whether it is its gradient that errs.
        values: of each element the variance, or the error where nothing is random.
        random: which of the two.
        ordered: whether it is that of one rounding to nearest, which moves nothing past a value of the format's grid.
    """

    place: Place
    gradient: bool
    values: Tensor
    random: bool
    ordered: bool = False

    @property
    def square(self) -> Tensor:
        """The expected square of each element's error."""
        return self.values if self.random else self.values.square()


def erring(
    seen: OperatorCall, change: RoundingSite, gradients: Mapping[Place, Tensor], handed: Precision | None = None
) -> list[Erring]:
    """Returns what errs in a call of an operator.

    Args:
        gradients: of its tensors, by place, those that have one.
        handed: what the gradient of its result is in when it gets there, by whoever follows, who errs by that.
    """
    if change.inside is not None:
        return _measured(seen, change.inside, gradients, handed)
    found = []
    for one in change.rounded:
        tapped = seen.tensors.get(one.place)
        of = gradients.get(one.place) if one.gradient else None if tapped is None else tapped.value
        if of is not None and not (one.gradient and one.place == OUTPUT and one.fmt == handed):
            errs = noise if one.random else error
            values = errs(of, one.fmt, one.rounding, one.keep)
            found.append(Erring(one.place, one.gradient, values, one.random, one.rounding == "nearest"))
    return found


def erring_behind(seen: OperatorCall, follower: Follower, gradients: Mapping[Place, Tensor]) -> list[Erring]:
    """Returns what errs in a call of an operator that computes in a narrow format as what it reads is narrow: beside that."""
    incoming, fmt = gradients.get(OUTPUT), follower.fmt
    if incoming is None:
        return []
    rounded = incoming.to(fmt.dtype).to(incoming.dtype)
    narrow = _run(seen, rounded, lambda t: t, lambda t, place: t.to(fmt.dtype))
    exact = _run(seen, rounded, lambda t: t.to(fmt.dtype).to(t.dtype), lambda t, place: t)
    found = _differences(narrow, exact)
    if follower.leaves:
        found.append(Erring(OUTPUT, True, error(incoming, fmt, "nearest"), random=False))
    return found


def _measured(
    seen: OperatorCall, fmt: Precision, gradients: Mapping[Place, Tensor], handed: Precision | None
) -> list[Erring]:
    incoming = gradients.get(OUTPUT)
    if incoming is None:
        return []
    if handed is not None:
        incoming = incoming.to(handed.dtype).to(incoming.dtype)
    exact = _run(seen, incoming, lambda t: t, lambda t, place: t)
    # Only the tensor that the plan converts is narrow; parameters and statistics keep their format, as the backend has it.
    narrow = _run(seen, incoming, lambda t: t, lambda t, place: t.to(fmt.dtype) if place in seen.converted else t)
    return _differences(narrow, exact)


def _differences(narrow: Mapping[Place, Tensor], exact: Mapping[Place, Tensor]) -> list[Erring]:
    """An operator's result errs in itself, and what it reads in the gradient."""
    return [
        Erring(place, place != OUTPUT, narrow[place].double() - one.double(), random=False)
        for place, one in exact.items()
    ]


def _run(
    seen: OperatorCall, incoming: Tensor, before: Callable[[Tensor], Tensor], change: Callable[[Tensor, Place], Tensor]
) -> dict[Place, Tensor]:
    """Returns an operator's result and the gradients of what it reads: `before` of its tensors, of which it gets what `change` makes."""
    given: list[Any] = [v.clone() if isinstance(v, Tensor) else v for v in seen.given]
    leaves: dict[Place, Tensor] = {}
    with torch.enable_grad():
        for place in seen.tensors.keys() - {OUTPUT}:
            value = argument_at(given, place)
            leaves[place] = before(value.detach()).requires_grad_()
            put(given, place, change(leaves[place], place))
        result: Tensor = seen.call(given)
        used = list(leaves)
        found = torch.autograd.grad(result, [leaves[p] for p in used], incoming.to(result.dtype), allow_unused=True)
    return {OUTPUT: result.detach()} | {p: g for p, g in zip(used, found, strict=True) if g is not None}


_EIGHT: Final = torch.tensor([[1.0 - 2.0 * ((byte >> bit) & 1) for bit in range(8)] for byte in range(256)])
"""The signs that a byte stands for."""


@dataclass(frozen=True)
class GradientProbe:
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
    probes: Sequence[GradientProbe]

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
        probes.append(GradientProbe(derived[: len(edges)], dict(zip(known, derived[len(edges) :], strict=True))))
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
