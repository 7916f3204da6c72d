"""Rows of matrix products, convolutions, attention, linear algebra and recurrent networks.

Only a product with a weight accepts scaled formats; QSync does not quantize products of two
activations. `classify` finds weights that no argument position identifies.
"""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from qsync_fx.ops.spec import Flops, Kind, OperatorRow, Place, dependent, fixed

STRETCHED: Final = "1"


@dataclass(frozen=True)
class Contraction:
    """A product of two factors.

    Attributes:
        factors: the letters of both factors.
        result: the letters of the result.
        places: the argument positions of the factors.
        sizes: the size of every letter.
        bias: the shape of the addend; None without one.
        group: the letter of the groups of a grouped product, whose matrices offsets select per row
            of the first factor; "" for other products.
        weighs: whether it multiplies its product or its addend by a number.
    """

    factors: tuple[str, str]
    result: str
    places: tuple[Place, Place]
    sizes: dict[str, Any] = field(default_factory=dict)
    bias: tuple[Any, ...] | None = None
    group: str = ""
    weighs: bool = False

    @property
    def flops(self) -> Any:
        """The forward FLOPs: two per combination of the factors' letters, one without a sum."""
        letters = {*self.factors[0], *self.factors[1]} - {self.group, STRETCHED}
        operations = 1 if letters <= {*self.result} else 2
        return operations * math.prod(self.sizes[letter] for letter in letters)

    @property
    def summed(self) -> str:
        """The letters that are summed over, in the order of the second factor."""
        return "".join(c for c in self.factors[1] if c in self.factors[0] and c not in self.result)

    @property
    def batch(self) -> str:
        """The letters of both factors and the result: one product per index."""
        return "".join(c for c in self.result if c in self.factors[0] and c in self.factors[1])

    def unshared(self, factor: int) -> str:
        """Return the letters of the result that only one factor has, in its order."""
        ours, other = self.factors[factor], self.factors[1 - factor]
        return "".join(c for c in ours if c in self.result and c not in other)

    @property
    def swapped(self) -> Contraction:
        """The same contraction with swapped factors."""
        return dataclasses.replace(self, factors=self.factors[::-1], places=self.places[::-1])

    @property
    def equation(self) -> str:
        return f"{','.join(self.factors)}->{self.result}"

    @property
    def is_linear(self) -> bool:
        """Whether it computes `[..., K]` by `[N, K]` to `[..., N]`."""
        rows, channels, summed = self.unshared(0), self.unshared(1), self.summed
        as_layer = (f"{rows}{summed}", f"{channels}{summed}"), f"{rows}{channels}"
        return (self.factors, self.result) == as_layer and len(channels) == len(summed) == 1

    def separate(self, factor: int) -> list[int]:
        """Return the dimensions of a factor whose indices are separate matrices."""
        letters = self.batch
        if factor == 1:
            letters += self.group
        return [index for index, c in enumerate(self.factors[factor]) if c in letters]

    def channels(self, factor: int) -> list[int]:
        """Return the dimensions of a factor that a scale may vary along: they are not summed."""
        letters = self.result + self.group
        return [index for index, c in enumerate(self.factors[factor]) if c in letters]

    def unfit(self, weight: int) -> str:
        """Return why it is not a layer's product with that factor as the weight, or ""."""
        first, second = self.factors
        if self.weighs:
            return "it weighs its bias or its product, which a linear layer does not"
        if self.group not in second:
            return "its groups lie along what is summed over or along its output"
        shared = {*first} & {*second}
        if not {*first, *second} <= shared.union(self.result, self.group, STRETCHED):
            return "it sums over a dimension that only one of its factors has"
        if not self.summed:
            return "it sums over nothing"
        if self.group and weight == 0:
            return "its weight is in groups along the tokens"
        if not self.unshared(weight):
            return "its weight is a vector, so its output has no channels"
        if self.bias is None or (not self.group and self._is_bias(weight)):
            return ""
        return "it adds something else than a bias per output channel to its product"

    def _is_bias(self, weight: int) -> bool:
        channels, shape = self.unshared(weight), tuple(self.sizes[c] for c in self.unshared(weight))
        if len(channels) != 1 or not self.result.endswith(channels):
            return False
        if not self.batch:
            return self.bias == shape
        if len(self.result) != 3 or self.result[0] != self.batch:
            return False
        return self.bias == (self.sizes[self.batch], 1, *shape)


def contraction(
    factors: tuple[str, str],
    result: str,
    value: tuple[Any, Any],
    places: tuple[Place, Place] = (0, 1),
    bias: Any = None,
    group: str = "",
    weighs: bool = False,
) -> Contraction:
    """Return the contraction of two tensors with given letters; broadcast letters are replaced."""
    shapes = [tuple(t.shape) for t in value]
    sizes: dict[str, Any] = {}
    for letters, shape in zip(factors, shapes, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            if letter not in sizes or _is_one(sizes[letter]):
                sizes[letter] = size
    first, second = map(list, factors)
    for renamed, shape in zip((first, second), shapes, strict=True):
        for index, size in enumerate(shape):
            if _is_one(size) and not _is_one(sizes[renamed[index]]):
                renamed[index] = STRETCHED
    addend = bias if bias is None else tuple(bias.shape)
    final = "".join(first), "".join(second)
    return Contraction(final, result, places, sizes, addend, group, weighs)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1  # torch specializes symbolic sizes of 1


def matrix_product(args: Sequence[Any]) -> Contraction:
    """Return the contraction of `matmul`: matrices in the last two dimensions, others broadcast."""
    first, second = args[:2]
    rows, columns = "m"[: first.dim() - 1], "n"[: second.dim() - 1]
    letters = [c for c in string.ascii_letters if c not in "mkn"]
    extra = [max(0, t.dim() - 2) for t in (first, second)]
    every = "".join(letters[: max(extra)])
    before = [every[len(every) - count :] for count in extra]
    factors = (f"{before[0]}{rows}k", f"{before[1]}k{columns}")
    return contraction(factors, f"{every}{rows}{columns}", (first, second))


def linear_product(args: Sequence[Any]) -> Contraction:
    x, weight, bias = (*args, None)[:3]
    rows = "".join(c for c in string.ascii_letters if c not in "nk")[: x.dim() - 1]
    channels = "n"[: weight.dim() - 1]
    return contraction((f"{rows}k", f"{channels}k"), f"{rows}{channels}", (x, weight), bias=bias)


def inner(args: Sequence[Any]) -> Contraction:
    """Return the contraction of `inner`, over the last dimensions."""
    first, second = args[:2]
    letters = string.ascii_letters.replace("k", "")
    a, b = letters[: max(first.dim() - 1, 0)], letters[first.dim() :][: max(second.dim() - 1, 0)]
    factors = (f"{a}{'k'[: first.dim()]}", f"{b}{'k'[: second.dim()]}")
    return contraction(factors, a + b, (first, second))


def tensordot(args: Sequence[Any]) -> Contraction:
    first, second, dims_a, dims_b = args[:4]
    letters = iter(string.ascii_letters)
    a = [next(letters) for _ in range(first.dim())]
    b = [next(letters) for _ in range(second.dim())]
    for index, to in zip(dims_b, dims_a, strict=True):
        b[index] = a[to]
    saved = [c for c in a if c not in b] + [c for c in b if c not in a]
    return contraction(("".join(a), "".join(b)), "".join(saved), (first, second))


def plus(first: str, second: str, result: str, args: Sequence[Any]) -> Contraction:
    """Return the contraction of `beta * args[0] + alpha * args[1] @ args[2]`, such as `addmm`."""
    bias, a, b, beta, alpha = (*args, 1, 1)[:5]
    weighs = beta != 1 or alpha != 1
    return contraction((first, second), result, (a, b), (1, 2), bias, weighs=weighs)


def einsum(args: Sequence[Any]) -> Contraction | str:
    """Return the contraction of an einsum of two factors, or why it is another computation."""
    if len(args[1]) != 2:
        return f"it multiplies {len(args[1])} tensors at once"
    terms, result = _einsum_labels(args)
    if any(len(set(term)) < len(term) for term in terms):
        return "it takes a diagonal"
    unused = (c for c in string.ascii_letters if c not in args[0])
    letter = {name: name for term in terms for name in term}
    letter |= {name: next(unused) for name in letter if name.startswith(".")}
    first, second, final = ("".join(letter[name] for name in term) for term in (*terms, result))
    return contraction((first, second), final, tuple(args[1]), ((1, 0), (1, 1)))


def einsum_flops(args: Sequence[Any], output: Any) -> Any:
    """Return the FLOPs of an einsum from left to right, as torch computes it without a path."""
    terms, result = _einsum_labels(args)
    sizes: dict[str, Any] = {}
    for names, operand in zip(terms, args[1], strict=True):
        for name, size in zip(names, operand.shape, strict=True):
            if _is_one(sizes.get(name, 1)):  # an operand may be broadcast
                sizes[name] = size
    live, total = set(terms[0]), 0
    for position, names in enumerate(terms[1:], start=2):
        live |= {*names}
        later = {*result}.union(*terms[position:])
        operations = 1 if live <= later else 2
        total += operations * math.prod(sizes[name] for name in live)
        live &= later
    return total


def _einsum_labels(args: Sequence[Any]) -> tuple[list[list[str]], list[str]]:
    """Return one label per dimension of operands and result; ".2", ".1" for an ellipsis."""
    inputs, arrow, result = args[0].replace(" ", "").partition("->")
    terms = []
    for term, operand in zip(inputs.split(","), args[1], strict=True):
        before, _, after = term.partition("...")
        hidden = operand.dim() - len(before) - len(after)
        terms.append([*before, *(f".{position}" for position in range(hidden, 0, -1)), *after])
    every = [name for term in terms for name in term]
    numbers = {int(name[1:]) for name in every if name.startswith(".")}
    ellipsis = [f".{number}" for number in sorted(numbers, reverse=True)]
    before, dots, after = result.partition("...")
    if not arrow:
        single = (name for name in every if name not in ellipsis and every.count(name) == 1)
        return terms, [*ellipsis, *sorted(single)]
    if not dots:
        return terms, [*result]
    return terms, [*before, *ellipsis, *after]


_GROUPED: Final = {
    (3, 3): (("emk", "ekn"), "emn", ""),
    (2, 3): (("sk", "ekn"), "sn", "e"),
    (3, 2): (("emk", "kn"), "mn", "e"),
    (2, 2): (("mk", "kn"), "emn", "e"),
}


def grouped_product(args: Sequence[Any]) -> Contraction:
    """Return the contraction of a grouped product; a 2-D factor concatenates the groups."""
    first, second, _, bias = (*args, None, None)[:4]
    factors, result, group = _GROUPED[first.dim(), second.dim()]
    return contraction(factors, result, (first, second), bias=bias, group=group)


WEIGHT = "a product of an activation and a weight: the plan chooses its precision"
ACTIVATIONS = "a product of two activations: the plan chooses among the float precisions"
PARAMETERS = "a product of two parameters: the plan chooses among the float precisions"
HELD = (
    "a product with a buffer, or with what the model computes from its parameters: the plan "
    "chooses among the float precisions"
)
ODD = (
    "a product of an activation and a weight, but not as a layer's: the plan chooses among the "
    "float precisions"
)


def chain(args: tuple[Any, ...], output: Any) -> Any:
    """Return the FLOPs of several matrices from left to right; torch picks the cheapest order."""
    first, *rest = args[0]
    # The first operand may be a row vector, the last a column vector.
    rows, inner, total = math.prod(first.shape[:-1]), first.shape[-1], 0
    for matrix in rest:
        columns = math.prod(matrix.shape[1:])
        total, inner = total + 2 * rows * inner * columns, columns
    return total


def bilinear(args: tuple[Any, ...], output: Any) -> Any:
    """Return the FLOPs of `bilinear([..., i], [..., j], [o, i, j])`, as two products."""
    return 2 * output.numel() * args[2].shape[1] * (args[2].shape[2] + 1)


Contracts = Callable[[Sequence[Any]], Contraction | str]


def product(
    name: str,
    contracts: Contracts | None,
    operands: tuple[int, ...] = (0, 1),
    added: tuple[int, ...] = (),
    *,
    scaled: tuple[int, ...] = (),
    reason: str = ACTIVATIONS,
    unscaled: str = "",
    flops: Flops | None = None,
    target: str = "",
) -> OperatorRow:
    """Return the row of a product; without `scaled`, `contracts` may identify a weight."""

    def contraction_flops(args: tuple[Any, ...], output: Any) -> Any:
        return contracts(args).flops  # type: ignore[misc, union-attr]

    return OperatorRow(
        name,
        (target or f"aten::{name}",),
        Kind.ADJUSTABLE,
        reason,
        operands=operands,
        scaled=scaled,
        contracts=contracts,
        unscaled=unscaled,
        products=True,
        added=added,
        flops=flops or contraction_flops,
    )


def _letters(first: str, second: str, result: str) -> Contracts:
    return lambda args: contraction((first, second), result, (args[0], args[1]))


SEVERAL = "a product of several matrices: the plan chooses among the float precisions"
SEVERAL_AT_ONCE = "it multiplies several at once"
BILINEAR = "a product of two activations and a weight: the plan chooses among the float precisions"

_several = partial(
    product, contracts=None, operands=(0,), reason=SEVERAL, unscaled=SEVERAL_AT_ONCE, flops=chain
)


CONVOLUTION_REASON = "a convolution of an activation by a weight: the plan chooses its precision"


def forward(args: tuple[Any, ...], output: Any) -> Any:
    """Return the FLOPs of a convolution; `weight[0]` is [in / groups, *kernel] per output value."""
    return 2 * output.numel() * math.prod(args[1].shape[1:])


def transposed(args: tuple[Any, ...], output: Any) -> Any:
    """Return the FLOPs of a transposed convolution; `weight[0]` is [out / groups, *kernel]."""
    return 2 * args[0].numel() * math.prod(args[1].shape[1:])


def either(args: tuple[Any, ...], output: Any) -> Any:
    """Return the FLOPs of `convolution`, whose argument 6 is `transposed`."""
    return transposed(args, output) if args[6] else forward(args, output)


def row(name: str, flops: Flops) -> OperatorRow:
    return OperatorRow(
        name,
        (f"aten::{name}",),
        Kind.ADJUSTABLE,
        CONVOLUTION_REASON,
        operands=(0, 1, 2),
        scaled=(0, 1),
        products=True,
        added=(2,),
        flops=flops,
    )


_CONVOLUTION_ROWS = (
    row("conv1d", forward),
    row("conv2d", forward),
    row("conv3d", forward),
    row("conv_transpose1d", transposed),
    row("conv_transpose2d", transposed),
    row("conv_transpose3d", transposed),
    row("convolution", either),
    row("_convolution", either),
)


ATTENTION_REASON = (
    "attention multiplies activations by each other: the plan chooses among the float precisions"
)


def attention(args: tuple[Any, ...], output: Any) -> Any:
    """Return the FLOPs of both products of query [.., L, E], key [.., S, E] and value [.., S, V].

    A causal mask does not halve them: torch counts the full product too.
    """
    query, key, value = args[:3]
    return 2 * math.prod(output.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def attention_gradients(args: tuple[Any, ...], output: Any) -> Any:
    """Return the FLOPs of both gradients of both products.

    A fused kernel recomputes the scores. Torch's plain attention saves them; the CPU uses it for
    dropout.
    """
    query, key, value, _, dropout = args[:5]
    pairs = 2 * math.prod(output.shape[:-1]) * key.shape[-2]
    again = 0 if query.device.type == "cpu" and dropout else query.shape[-1]
    return pairs * (2 * query.shape[-1] + 2 * value.shape[-1] + again)


ROWS = (
    product("linear", linear_product, (0, 1, 2), (2,), scaled=(0, 1), reason=WEIGHT),
    product(
        "addmm", partial(plus, "mk", "kn", "mn"), (0, 1, 2), (0,), scaled=(1, 2), reason=WEIGHT
    ),
    product("mm", _letters("mk", "kn", "mn")),
    product("bmm", _letters("emk", "ekn", "emn")),
    product("matmul", matrix_product),
    product("linalg_matmul", matrix_product),
    product("mv", _letters("nk", "k", "n")),
    product("inner", inner),
    product("baddbmm", partial(plus, "emk", "ekn", "emn"), (0, 1, 2), (0,)),
    product("addmv", partial(plus, "nk", "k", "n"), (0, 1, 2), (0,)),
    product("addbmm", partial(plus, "emk", "ekn", "mn"), (0, 1, 2), (0,)),
    product("_grouped_mm", grouped_product, (0, 1, 3), (3,)),
    product(
        "grouped_mm",
        lambda args: grouped_product(args[:2]),
        target="transformers::grouped_mm_fallback",
    ),
    _several("chain_matmul"),
    _several("linalg_multi_dot"),
    product("tensordot", tensordot),
    product("einsum", einsum, (1,), flops=einsum_flops),
    product(
        "bilinear",
        None,
        (0, 1, 2, 3),
        (3,),
        reason=BILINEAR,
        unscaled="it multiplies its inputs by each other too",
        flops=bilinear,
    ),
    *dependent(
        "an outer product works value by value, so it takes the precision of its inputs",
        "outer ger kron addr",
    ),
    *fixed("a product of vectors that may cancel", "dot vdot linalg_vecdot cross linalg_cross"),
    *fixed(
        "linear algebra needs FP32: rounding errors grow with the condition of the matrix",
        "cholesky cholesky_inverse cholesky_solve det logdet slogdet inverse pinverse geqrf orgqr "
        "ormqr qr svd lu_solve lu_unpack _lu_with_info triangular_solve matrix_exp matrix_power "
        "linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig linalg_eigh "
        "linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex "
        "linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu "
        "linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp "
        "linalg_matrix_power linalg_matrix_rank linalg_matrix_sqrth linalg_pinv linalg_polar "
        "linalg_qr linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd "
        "linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vander vander",
    ),
    *fixed(
        "a Fourier transform needs FP32: each result adds all inputs up",
        "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn "
        "fft_irfft fft_irfft2 fft_irfftn fft_hfft fft_hfft2 fft_hfftn fft_ihfft fft_ihfft2 "
        "fft_ihfftn fft_fftshift fft_ifftshift fft_fftfreq fft_rfftfreq stft istft",
    ),
    *fixed(
        "sparse tensors stay as they are",
        "to_sparse to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc to_dense",
    ),
    *fixed(
        "complex numbers have no narrow format",
        "complex real imag angle conj _conj _conj_copy conj_physical _conj_physical "
        "view_as_complex view_as_complex_copy view_as_real view_as_real_copy",
    ),
    *fixed(
        "a recurrent network carries its state from step to step, and its rounding errors with it",
        "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    ),
    *_CONVOLUTION_ROWS,
    OperatorRow(
        "scaled_dot_product_attention",
        ("aten::scaled_dot_product_attention",),
        Kind.ADJUSTABLE,
        ATTENTION_REASON,
        operands=(0, 1, 2, 3),
        products=True,
        added=(3,),
        flops=attention,
        gradient_flops=attention_gradients,
    ),
)
