"""Errors of an operator's tensors in a precision, and probes of their effect on the gradients.

For random signs r, p = r'G is a sum of all parameters' gradients G. Its derivative by a tensor t is
H'r with H = dG/dt. The mean of (e'H'r)**2 over r is the squared norm of an error e's effect on G.
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
from qsync_fx.torch_internals import tree_map_only


@dataclass(frozen=True)
class Erring:
    """Errors of the tensor at a place, or of its gradient.

    Attributes:
        values: variance of each element if `random`, else its error; FP64.
        ordered: whether they come from a single rounding to nearest, which preserves order.
    """

    place: Place
    gradient: bool
    values: Tensor
    random: bool
    ordered: bool = False

    @property
    def square(self) -> Tensor:
        return self.values if self.random else self.values.square()


def erring(
    observed: OperatorCall,
    change: RoundingSite,
    gradients: Mapping[Place, Tensor],
    handed: Precision | None = None,
) -> list[Erring]:
    """Return the errors in a call of an operator, given the gradients of its tensors by place.

    Products round their operands and results, so their errors follow from the tensors by formula.
    Norms and softmax compute internally in the narrow format; they are rerun in it and compared.
    If the result's gradient arrives in the format `handed`, the follower accounts for that error.
    """
    if change.inside is not None:
        return _measured(observed, change.inside, gradients, handed)
    result = []
    values = {place: tapped.value for place, tapped in observed.tensors.items()}
    tensors: dict[bool, Mapping[Place, Tensor]] = {False: values, True: gradients}
    for item in change.rounded:
        place, is_nearest = item.place, item.rounding == "nearest"
        tensor = tensors[item.gradient].get(place)
        if tensor is None or (item.gradient and place == OUTPUT and item.fmt == handed):
            continue
        measure = noise if item.random else error
        errors = measure(tensor, item.fmt, item.rounding, item.keep)
        result.append(Erring(place, item.gradient, errors, item.random, is_nearest))
    return result


def erring_behind(
    observed: OperatorCall, follower: Follower, gradients: Mapping[Place, Tensor]
) -> list[Erring]:
    """Return the additional errors of a follower that computes in a narrow format."""
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

    def converted(tensor: Tensor, place: Place) -> Tensor:
        # Parameters and statistics stay wide, as in the backend.
        return tensor.to(fmt.dtype) if place in observed.converted else tensor

    exact = _run(observed, incoming, lambda t: t, lambda t, place: t)
    return _differences(_run(observed, incoming, lambda t: t, converted), exact)


def _differences(narrow: Mapping[Place, Tensor], exact: Mapping[Place, Tensor]) -> list[Erring]:
    errors = {place: narrow[place].double() - item.double() for place, item in exact.items()}
    return [Erring(place, place != OUTPUT, item, random=False) for place, item in errors.items()]


def _run(
    observed: OperatorCall,
    incoming: Tensor,
    before: Callable[[Tensor], Tensor],
    change: Callable[[Tensor, Place], Tensor],
) -> dict[Place, Tensor]:
    """Return an operator's result and its inputs' gradients, given the result's gradient.

    `before` maps inputs to the leaves that are differentiated, `change` these to arguments.
    """
    inputs: list[Any] = [tree_map_only(Tensor, torch.clone, value) for value in observed.arguments]
    leaves: dict[Place, Tensor] = {}
    with torch.enable_grad():
        for place in observed.tensors.keys() - {OUTPUT}:
            value = argument_at(inputs, place)
            leaves[place] = before(value.detach()).requires_grad_()
            put(inputs, place, change(leaves[place], place))
        result: Tensor = observed.call(inputs)
        gradients = torch.autograd.grad(
            result, list(leaves.values()), incoming.to(result.dtype), allow_unused=True
        )
    pairs = zip(leaves, gradients, strict=True)
    return {OUTPUT: result.detach()} | {place: g for place, g in pairs if g is not None}


_EIGHT: Final = torch.tensor(
    [[1.0 - 2.0 * ((byte >> bit) & 1) for bit in range(8)] for byte in range(256)]
)
"""The eight signs for each value of a byte, [256, 8]."""


@dataclass(frozen=True)
class GradientProbe:
    """Derivatives of a random sum of gradients: by tensors, and by gradients at an edge."""

    by_value: Sequence[Tensor | None]
    by_gradient: Mapping[int, Tensor | None]


@dataclass(frozen=True)
class Probed:
    """Gradients of the loss by the tensor at each edge, None if there is none, and probes."""

    gradients: Sequence[Tensor | None]
    probes: Sequence[GradientProbe]

    def of(self, numbers: Mapping[Place, int]) -> dict[Place, Tensor]:
        gradients = {place: self.gradients[number] for place, number in numbers.items()}
        return {place: g for place, g in gradients.items() if g is not None}


def probed(
    loss: Tensor,
    parameters: Sequence[Tensor],
    edges: Sequence[GradientEdge],
    draws: int,
    generator: torch.Generator,
) -> Probed:
    """Differentiate a loss, and `draws` random sums of its parameters' gradients.

    Raises:
        ProfileError: an operator of the model has no second derivative.
    """
    try:
        return _probed(loss, parameters, edges, draws, generator)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise _not_twice(str(error).partition("\n")[0]) from error


def _not_twice(why: str) -> ProfileError:
    return ProfileError(
        f"the model cannot be differentiated twice: {why}",
        where='the method "second_order"',
        do='estimate with method="injected", one pass per operator and precision, or "paper"',
    )


def _probed(
    loss: Tensor,
    parameters: Sequence[Tensor],
    edges: Sequence[GradientEdge],
    draws: int,
    generator: torch.Generator,
) -> Probed:
    inputs: list[Any] = [*parameters, *edges]
    result: Sequence[Tensor | None] = torch.autograd.grad(
        loss, inputs, create_graph=True, allow_unused=True
    )
    inner = result[len(parameters) :]
    # If the loss is linear in everything, its gradients are constants.
    owned = [g for g in result[: len(parameters)] if g is not None and g.requires_grad]
    available = [index for index, g in enumerate(inner) if g is not None and g.requires_grad]
    wanted: list[Any] = [*edges, *(inner[index] for index in available)]
    _check(owned)
    probes = []
    for _ in range(draws):
        # Without narrowed tensors there is no derivative to compute.
        derived: Sequence[Tensor | None] = [None] * len(wanted)
        if owned and wanted:
            drawn = [signs(g, generator) for g in owned]
            derived = torch.autograd.grad(
                owned, wanted, drawn, allow_unused=True, retain_graph=True
            )
        by_gradient = dict(zip(available, derived[len(edges) :], strict=True))
        probes.append(GradientProbe(derived[: len(edges)], by_gradient))
    return Probed([g if g is None else g.detach() for g in inner], probes)


def signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return random signs, drawn eight at a time: one draw each would cost a fifth of a probe."""
    count = like.numel()
    drawn = torch.randint(0, 256, (-(-count // 8),), dtype=torch.uint8, generator=generator)
    return _EIGHT[drawn.int()].flatten()[:count].view(like.shape).to(like)


def _check(gradients: Sequence[Tensor]) -> None:
    """Raise `ProfileError` if a gradient comes from a once_differentiable function.

    torch raises only if its error node runs, and otherwise treats the gradient as a constant.
    """
    todo, visited = [g.grad_fn for g in gradients], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node.name().endswith("::Error"):
            raise _not_twice("it has a torch.autograd.Function with once_differentiable")
        todo += [before for before, _ in node.next_functions]
