"""Contractions: products of two tensors in einsum notation, one letter per dimension.

All products share one analysis of summed dimensions, channels, and fitness as a layer. Invariant:
it depends on the arguments' shapes alone. A letter that both factors have is a dimension of equal
size; a broadcast dimension of size 1 has the letter `STRETCHED`.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from qsync_fx.ops.spec import Place

STRETCHED: Final = "1"

NOT_A_BIAS: Final = "it adds something else than a bias per output channel to its product"


@dataclass(frozen=True)
class Contraction:
    """A product of two factors.

    Attributes:
        factors: the letters of both factors.
        result: the letters of the result.
        places: the argument positions of the factors.
        sizes: the size of every letter.
        bias: the shape of the addend; None without one.
        group: the letter of the second factor's dimension that offsets select per row of the first;
            "" unless it is a grouped product.
    """

    factors: tuple[str, str]
    result: str
    places: tuple[Place, Place]
    sizes: dict[str, Any] = field(default_factory=dict)
    bias: tuple[Any, ...] | None = None
    group: str = ""

    @property
    def summed(self) -> str:
        """The letters that are summed over, in the order of the second factor."""
        return "".join(c for c in self.factors[1] if c in self.factors[0] and c not in self.result)

    @property
    def batch(self) -> str:
        """The letters of both factors and the result, in its order: separate products per index."""
        return "".join(c for c in self.result if c in self.factors[0] and c in self.factors[1])

    def own(self, factor: int) -> str:
        """Return the letters of the result that only one factor has, in its order."""
        return "".join(
            c
            for c in self.factors[factor]
            if c in self.result and c not in self.factors[1 - factor]
        )

    @property
    def turned(self) -> Contraction:
        """The same contraction with swapped factors."""
        return dataclasses.replace(self, factors=self.factors[::-1], places=self.places[::-1])

    @property
    def equation(self) -> str:
        return f"{','.join(self.factors)}->{self.result}"

    @property
    def is_linear(self) -> bool:
        """Whether it computes `[..., K]` by `[N, K]` to `[..., N]`."""
        rows, channels, summed = self.own(0), self.own(1), self.summed
        as_layer = (f"{rows}{summed}", f"{channels}{summed}"), f"{rows}{channels}"
        return (self.factors, self.result) == as_layer and len(channels) == len(summed) == 1

    def separate(self, factor: int) -> list[int]:
        """Return the dimensions of a factor whose indices are separate matrices."""
        letters = self.batch + (self.group if factor == 1 else "")
        return [index for index, c in enumerate(self.factors[factor]) if c in letters]

    def channels(self, factor: int) -> list[int]:
        """Return the dimensions of a factor that a scale may vary along: they are not summed."""
        letters = self.result + self.group
        return [index for index, c in enumerate(self.factors[factor]) if c in letters]

    def unfit(self, weight: int) -> str:
        """Return why it is not a layer's product with that factor as the weight, or ""."""
        for this, other in ((0, 1), (1, 0)):
            if any(
                c not in self.factors[other] + self.result + self.group + STRETCHED
                for c in self.factors[this]
            ):
                return "it sums over a dimension that only one of its factors has"
        if not self.summed:
            return "it sums over nothing"
        if self.group and weight == 0:
            return "its weight is in groups along the tokens"
        if not self.own(weight):
            return "its weight is a vector, so its output has no channels"
        return "" if self.bias is None or (not self.group and self._is_bias(weight)) else NOT_A_BIAS

    def _is_bias(self, weight: int) -> bool:
        assert self.bias is not None
        channels, shape = self.own(weight), tuple(self.sizes[c] for c in self.own(weight))
        if len(channels) != 1 or not self.result.endswith(channels):
            return False
        if not self.batch:
            return self.bias == shape
        each = tuple(self.sizes[c] for c in self.batch)
        return (
            len(self.result) == 3
            and self.result[0] == self.batch
            and self.bias == (*each, 1, *shape)
        )


def contraction(
    factors: tuple[str, str],
    result: str,
    value: tuple[Any, Any],
    places: tuple[Place, Place] = (0, 1),
    bias: Any = None,
    group: str = "",
) -> Contraction:
    """Return the contraction of two tensors with given letters; broadcast letters are replaced."""
    shapes = [tuple(t.shape) for t in value]
    sizes: dict[str, Any] = {}
    for letters, shape in zip(factors, shapes, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            # A symbolic size is not 1: torch would have specialized it.
            if letter not in sizes or _is_one(sizes[letter]):
                sizes[letter] = size
    first, second = (
        "".join(
            STRETCHED if _is_one(size) and not _is_one(sizes[letter]) else letter
            for letter, size in zip(letters, shape, strict=True)
        )
        for letters, shape in zip(factors, shapes, strict=True)
    )
    return Contraction(
        (first, second), result, places, sizes, None if bias is None else tuple(bias.shape), group
    )


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def matmul(args: Sequence[Any]) -> Contraction:
    """Return the contraction of `matmul`: matrices in the last two dimensions, others broadcast."""
    first, second = args[:2]
    rows, columns = "m" if first.dim() > 1 else "", "n" if second.dim() > 1 else ""
    letters = [c for c in string.ascii_letters if c not in "mkn"]
    extra = [max(0, t.dim() - 2) for t in (first, second)]
    every = "".join(letters[: max(extra)])
    before = [every[len(every) - count :] for count in extra]
    factors = (f"{before[0]}{rows}k", f"{before[1]}k{columns}")
    return contraction(factors, f"{every}{rows}{columns}", (first, second))


def linear(args: Sequence[Any]) -> Contraction:
    x, weight, bias = args[:3]
    rows = "".join(c for c in string.ascii_letters if c not in "nk")[: x.dim() - 1]
    channels = "n" if weight.dim() == 2 else ""
    return contraction((f"{rows}k", f"{channels}k"), f"{rows}{channels}", (x, weight), bias=bias)


def inner(args: Sequence[Any]) -> Contraction:
    """Return the contraction of `inner`, over the last dimensions."""
    first, second = args[:2]
    letters = string.ascii_letters.replace("k", "")
    a, b = letters[: first.dim() - 1], letters[first.dim() :][: second.dim() - 1]
    return contraction(
        (f"{a}k" if first.dim() else "", f"{b}k" if second.dim() else ""), a + b, (first, second)
    )


def tensordot(args: Sequence[Any]) -> Contraction:
    first, second, dims_a, dims_b = args[:4]
    letters = iter(string.ascii_letters)
    a = [next(letters) for _ in range(first.dim())]
    b = [next(letters) for _ in range(second.dim())]
    for index, to in zip(dims_b, dims_a, strict=True):
        b[index] = a[to]
    saved = [c for c in a if c not in b] + [c for c in b if c not in a]
    return contraction(("".join(a), "".join(b)), "".join(saved), (first, second))


def plus(first: str, second: str, result: str, args: Sequence[Any]) -> Contraction | str:
    """Return the contraction of `addmm` and its variants, or why it is not a layer's.

    They compute `beta * args[0] + alpha * args[1] @ args[2]`.
    """
    bias, a, b, beta, alpha = args[:5]
    if beta != 1 or alpha != 1:
        return "it weighs its bias or its product, which a linear layer does not"
    return contraction((first, second), result, (a, b), (1, 2), bias)


def einsum(args: Sequence[Any]) -> Contraction | str:
    equation, inputs = args[:2]
    if len(inputs) != 2:
        return (
            f"it multiplies {len(inputs)} tensors at once"
            if inputs[1:]
            else "it multiplies nothing"
        )
    terms, arrow, result = equation.replace(" ", "").partition("->")
    names = [labels(term, t.dim()) for term, t in zip(terms.split(","), inputs, strict=True)]
    every = [name for term in names for name in term]
    if any(len(set(term)) < len(term) for term in names):
        return "it takes a diagonal"
    hidden = sorted(
        {name for name in every if name.startswith(".")}, key=lambda name: -int(name[1:])
    )
    if not arrow:
        out = hidden + sorted(name for name in set(every) - set(hidden) if every.count(name) == 1)
    else:
        before, dots, after = result.partition("...")
        out = [*before, *(hidden if dots else []), *after]
    unused = iter(c for c in string.ascii_letters if c not in every)
    letter = {name: next(unused) if name in hidden else name for name in dict.fromkeys(every)}
    first, second, final = ("".join(letter[name] for name in term) for term in (*names, out))
    return contraction((first, second), final, (inputs[0], inputs[1]), ((1, 0), (1, 1)))


def grouped(args: Sequence[Any]) -> Contraction | str:
    """Return the contraction of a grouped product, such as experts.

    The rows of the first factor are concatenated groups, and each group has a matrix of the second
    factor.
    """
    first, second = args[:2]
    bias = args[3] if len(args) > 3 else None
    if first.dim() == second.dim() == 3:
        return contraction(("emk", "ekn"), "emn", (first, second), bias=bias)
    if (first.dim(), second.dim()) != (2, 3):
        return "its groups lie along what is summed over or along its output"
    return contraction(("sk", "ekn"), "sn", (first, second), bias=bias, group="e")


def labels(term: str, dimensions: int) -> list[str]:
    """Return one label per dimension; labels of an ellipsis are numbered from its end."""
    before, dots, after = term.partition("...")
    hidden = dimensions - len(before) - len(after) if dots else 0
    return [*before, *(f".{position}" for position in range(hidden, 0, -1)), *after]
