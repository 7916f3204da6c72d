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
    observed: OperatorCall,
    change: RoundingSite,
    gradients: Mapping[Place, Tensor],
    handed: Precision | None = None,
) -> list[Erring]:
    """Returns what errs in a call of an operator.

    Args:
        gradients: of its tensors, by place, those that have one.
        handed: what the gradient of its result is in when it gets there, by whoever follows, who errs by that.
    """
    if change.inside is not None:
        return _measured(observed, change.inside, gradients, handed)
    result = []
    for item in change.rounded:
        tapped = observed.tensors.get(item.place)
        of = (
            gradients.get(item.place) if item.gradient else None if tapped is None else tapped.value
        )
        if of is not None and not (item.gradient and item.place == OUTPUT and item.fmt == handed):
            errs = noise if item.random else error
            values = errs(of, item.fmt, item.rounding, item.keep)
            result.append(
                Erring(item.place, item.gradient, values, item.random, item.rounding == "nearest")
            )
    return result


def erring_behind(
    observed: OperatorCall, follower: Follower, gradients: Mapping[Place, Tensor]
) -> list[Erring]:
    """Returns what errs in a call of an operator that computes in a narrow format as what it reads is narrow: beside that."""
    incoming, fmt = gradients.get(OUTPUT), follower.fmt
    if incoming is None:
        return []
    rounded = incoming.to(fmt.dtype).to(incoming.dtype)
    narrow = _run(observed, rounded, lambda t: t, lambda t, place: t.to(fmt.dtype))
    exact = _run(observed, rounded, lambda t: t.to(fmt.dtype).to(t.dtype), lambda t, place: t)
    result = _differences(narrow, exact)
    if follower.leaves:
        result.append(Erring(OUTPUT, True, error(incoming, fmt, "nearest"), random=False))
    return result


def _measured(
    observed: OperatorCall,
    fmt: Precision,
    gradients: Mapping[Place, Tensor],
    handed: Precision | None,
) -> list[Erring]:
    incoming = gradients.get(OUTPUT)
    if incoming is None:
        return []
    if handed is not None:
        incoming = incoming.to(handed.dtype).to(incoming.dtype)
    exact = _run(observed, incoming, lambda t: t, lambda t, place: t)
    # Only the tensor that the plan converts is narrow; parameters and statistics keep their format, as the backend has it.
    narrow = _run(
        observed,
        incoming,
        lambda t: t,
        lambda t, place: t.to(fmt.dtype) if place in observed.converted else t,
    )
    return _differences(narrow, exact)


def _differences(narrow: Mapping[Place, Tensor], exact: Mapping[Place, Tensor]) -> list[Erring]:
    """An operator's result errs in itself, and what it reads in the gradient."""
    return [
        Erring(place, place != OUTPUT, narrow[place].double() - item.double(), random=False)
        for place, item in exact.items()
    ]


def _run(
    observed: OperatorCall,
    incoming: Tensor,
    before: Callable[[Tensor], Tensor],
    change: Callable[[Tensor, Place], Tensor],
) -> dict[Place, Tensor]:
    """Returns an operator's result and the gradients of what it reads: `before` of its tensors, of which it gets what `change` makes."""
    inputs: list[Any] = [v.clone() if isinstance(v, Tensor) else v for v in observed.given]
    leaves: dict[Place, Tensor] = {}
    with torch.enable_grad():
        for place in observed.tensors.keys() - {OUTPUT}:
            value = argument_at(inputs, place)
            leaves[place] = before(value.detach()).requires_grad_()
            put(inputs, place, change(leaves[place], place))
        result: Tensor = observed.call(inputs)
        used = list(leaves)
        matches = torch.autograd.grad(
            result, [leaves[p] for p in used], incoming.to(result.dtype), allow_unused=True
        )
    return {OUTPUT: result.detach()} | {
        p: g for p, g in zip(used, matches, strict=True) if g is not None
    }


_EIGHT: Final = torch.tensor(
    [[1.0 - 2.0 * ((byte >> bit) & 1) for bit in range(8)] for byte in range(256)]
)
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
        return {
            place: g
            for place, number in numbers.items()
            if (g := self.gradients[number]) is not None
        }


def probed(
    loss: Tensor,
    parameters: Sequence[Tensor],
    edges: Sequence[GradientEdge],
    draws: int,
    generator: torch.Generator,
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
        where='the method "second_order"',
        do='find the sensitivity with method="injected", which costs a pass an operator and precision, or with method="depth"',
    )


def _probed(
    loss: Tensor,
    parameters: Sequence[Tensor],
    edges: Sequence[GradientEdge],
    draws: int,
    generator: torch.Generator,
) -> Probed:
    methods: list[Any] = [*parameters, *edges]
    result: Sequence[Tensor | None] = torch.autograd.grad(
        loss, methods, create_graph=True, allow_unused=True
    )
    # Where the loss is linear in everything, its gradients depend on nothing.
    owned, inner = (
        [g for g in result[: len(parameters)] if g is not None and g.requires_grad],
        result[len(parameters) :],
    )
    available = [index for index, g in enumerate(inner) if g is not None and g.requires_grad]
    wanted: list[Any] = [*edges, *(inner[index] for index in available)]
    _check(owned)
    probes = []
    for _ in range(draws):
        # Where nothing is made narrow, nothing is asked for.
        derived: Sequence[Tensor | None] = [None] * len(wanted)
        if owned and wanted:
            drawn = [signs(g, generator) for g in owned]
            derived = torch.autograd.grad(
                owned, wanted, drawn, allow_unused=True, retain_graph=True
            )
        probes.append(
            GradientProbe(
                derived[: len(edges)], dict(zip(available, derived[len(edges) :], strict=True))
            )
        )
    return Probed([None if g is None else g.detach() for g in inner], probes)


def signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Returns 1 or -1 for each element, eight of one draw: a number each took as long as a fifth of a probe."""
    count = like.numel()
    drawn = torch.randint(0, 256, (-(-count // 8),), dtype=torch.uint8, generator=generator)
    return _EIGHT[drawn.int()].flatten()[:count].view(like.shape).to(like)


def _check(gradients: Sequence[Tensor]) -> None:
    """Raises where a gradient is marked as one that has none of its own: torch takes it for a constant where nothing is to raise."""
    todo, visited = [g.grad_fn for g in gradients], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node.name().endswith("::Error"):
            raise _not_twice(
                "it holds a torch.autograd.Function that is marked with once_differentiable"
            )
        todo += [before for before, _ in node.next_functions]
