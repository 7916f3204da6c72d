"""Rows of matrix products, convolutions, attention, linear algebra and recurrent networks.

Only a product with a weight accepts scaled formats; QSync does not quantize products of two
activations. `linear`, `addmm` and convolutions have a weight argument. In other products a factor
may be a parameter; the pass `classify` finds it. Attention multiplies activations, so it accepts
float formats only; its softmax is FP32 internally. Linear algebra, Fourier transforms, complex and
sparse tensors have no narrow format in torch.
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
        ours, other = self.factors[factor], self.factors[1 - factor]
        return "".join(c for c in ours if c in self.result and c not in other)

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
        shared = {*first} & {*second}
        if not {*first, *second} <= shared.union(self.result, self.group, STRETCHED):
            return "it sums over a dimension that only one of its factors has"
        if not self.summed:
            return "it sums over nothing"
        if self.group and weight == 0:
            return "its weight is in groups along the tokens"
        if not self.own(weight):
            return "its weight is a vector, so its output has no channels"
        if self.bias is None or (not self.group and self._is_bias(weight)):
            return ""
        return NOT_A_BIAS

    def _is_bias(self, weight: int) -> bool:
        channels, shape = self.own(weight), tuple(self.sizes[c] for c in self.own(weight))
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
) -> Contraction:
    """Return the contraction of two tensors with given letters; broadcast letters are replaced."""
    shapes = [tuple(t.shape) for t in value]
    sizes: dict[str, Any] = {}
    for letters, shape in zip(factors, shapes, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            # A symbolic size is not 1: torch would have specialized it.
            if letter not in sizes or _is_one(sizes[letter]):
                sizes[letter] = size
    first, second = map(list, factors)
    for renamed, shape in zip((first, second), shapes, strict=True):
        for index, size in enumerate(shape):
            if _is_one(size) and not _is_one(sizes[renamed[index]]):
                renamed[index] = STRETCHED
    addend = bias if bias is None else tuple(bias.shape)
    final = "".join(first), "".join(second)
    return Contraction(final, result, places, sizes, addend, group)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


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
    x, weight, bias = args[:3]
    rows = "".join(c for c in string.ascii_letters if c not in "nk")[: x.dim() - 1]
    channels = "n"[: weight.dim() - 1]
    return contraction((f"{rows}k", f"{channels}k"), f"{rows}{channels}", (x, weight), bias=bias)


def inner(args: Sequence[Any]) -> Contraction:
    """Return the contraction of `inner`, over the last dimensions."""
    first, second = args[:2]
    letters = string.ascii_letters.replace("k", "")
    a, b = letters[: first.dim() - 1], letters[first.dim() :][: second.dim() - 1]
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
    if len(inputs) < 2:
        return "it multiplies nothing"
    if len(inputs) > 2:
        return f"it multiplies {len(inputs)} tensors at once"
    terms, arrow, result = equation.replace(" ", "").partition("->")
    names = [labels(term, t.dim()) for term, t in zip(terms.split(","), inputs, strict=True)]
    every = [name for term in names for name in term]
    if any(len(set(term)) < len(term) for term in names):
        return "it takes a diagonal"
    ellipsis = {name for name in every if name.startswith(".")}
    hidden = sorted(ellipsis, key=lambda name: -int(name[1:]))
    before, dots, after = result.partition("...")
    out = [*before, *after]
    if not arrow:
        out = hidden + sorted(name for name in set(every) - ellipsis if every.count(name) == 1)
    elif dots:
        out = [*before, *hidden, *after]
    unused = iter(c for c in string.ascii_letters if c not in every)
    letter = {name: name for name in every} | {name: next(unused) for name in hidden}
    first, second, final = ("".join(letter[name] for name in term) for term in (*names, out))
    return contraction((first, second), final, (inputs[0], inputs[1]), ((1, 0), (1, 1)))


def grouped_product(args: Sequence[Any]) -> Contraction | str:
    """Return the contraction of a grouped product, such as experts.

    The rows of the first factor are concatenated groups, and each group has a matrix of the second
    factor.
    """
    first, second, _, bias = (*args, None, None)[:4]
    if first.dim() == second.dim() == 3:
        return contraction(("emk", "ekn"), "emn", (first, second), bias=bias)
    if (first.dim(), second.dim()) != (2, 3):
        return "its groups lie along what is summed over or along its output"
    return contraction(("sk", "ekn"), "sn", (first, second), bias=bias, group="e")


def labels(term: str, dimensions: int) -> list[str]:
    """Return one label per dimension; labels of an ellipsis are numbered from its end."""
    before, dots, after = term.partition("...")
    if not dots:
        return [*term]
    hidden = dimensions - len(before) - len(after)
    return [*before, *(f".{position}" for position in range(hidden, 0, -1)), *after]


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


def last_dimension(args: tuple[Any, ...], output: Any) -> Any:
    """Return the FLOPs of a product over its first argument's last dimension, if it has one."""
    return 2 * output.numel() * math.prod(args[0].shape[-1:])


def added(args: tuple[Any, ...], output: Any) -> Any:
    """Return the FLOPs of a product that is added to the first argument."""
    return 2 * output.numel() * args[1].shape[-1]


def summed(args: tuple[Any, ...], output: Any) -> Any:
    """Return the FLOPs of `addbmm(bias, [b, n, k], [b, k, m])`, which sums `b` products."""
    return 2 * output.numel() * args[1].shape[0] * args[1].shape[-1]


def grouped(args: tuple[Any, ...], output: Any) -> Any:
    """Return the FLOPs of `_grouped_mm(a, b)`; a 2-D operand concatenates the groups."""
    first, second = args[:2]
    if first.dim() == second.dim() == 2:
        return 2 * first.numel() * second.shape[-1]
    return last_dimension(args, output)


def chain(args: tuple[Any, ...], output: Any) -> Any:
    """Return the FLOPs of a product of several matrices from left to right.

    This is an upper bound: torch picks the cheapest order.
    """
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


def tensor_dot(args: tuple[Any, ...], output: Any) -> Any:
    """Return the FLOPs of `tensordot(a, b, dims_a, dims_b)`."""
    return 2 * output.numel() * math.prod([args[0].shape[dimension] for dimension in args[2]])


Contracts = Callable[[Sequence[Any]], Contraction | str]


def weighted(
    name: str, flops: Flops, scaled: tuple[int, int], bias: int, contracts: Contracts
) -> OperatorRow:
    """Return the row of a product of an activation and a weight with an optional bias."""
    return OperatorRow(
        name,
        (f"aten::{name}",),
        Kind.ADJUSTABLE,
        WEIGHT,
        operands=(0, 1, 2),
        scaled=scaled,
        contracts=contracts,
        products=True,
        added=(bias,),
        flops=flops,
    )


def two(
    name: str,
    flops: Flops,
    contracts: Contracts | None,
    operands: tuple[int, ...] = (0, 1),
    added: tuple[int, ...] = (),
    reason: str = ACTIVATIONS,
    unscaled: str = "",
) -> OperatorRow:
    """Return the row of a product of two tensors; `contracts` may identify one as a weight."""
    return OperatorRow(
        name,
        (f"aten::{name}",),
        Kind.ADJUSTABLE,
        reason,
        operands=operands,
        contracts=contracts,
        unscaled=unscaled,
        products=True,
        added=added,
        flops=flops,
    )


def _letters(first: str, second: str, result: str) -> Contracts:
    return lambda args: contraction((first, second), result, (args[0], args[1]))


SEVERAL = "a product of several matrices: the plan chooses among the float precisions"
SEVERAL_AT_ONCE = "it multiplies several at once"

_PRODUCT_ROWS = (
    weighted("linear", last_dimension, (0, 1), 2, linear_product),
    weighted("addmm", added, (1, 2), 0, partial(plus, "mk", "kn", "mn")),
    two("mm", last_dimension, _letters("mk", "kn", "mn")),
    two("bmm", last_dimension, _letters("emk", "ekn", "emn")),
    two("matmul", last_dimension, matrix_product),
    two("linalg_matmul", last_dimension, matrix_product),
    two("mv", last_dimension, _letters("nk", "k", "n")),
    two("inner", last_dimension, inner),
    two("baddbmm", added, partial(plus, "emk", "ekn", "emn"), (0, 1, 2), (0,)),
    two("addmv", added, partial(plus, "nk", "k", "n"), (0, 1, 2), (0,)),
    two("addbmm", summed, partial(plus, "emk", "ekn", "mn"), (0, 1, 2), (0,)),
    two("_grouped_mm", grouped, grouped_product, (0, 1, 3), (3,)),
    OperatorRow(
        "grouped_mm",
        ("transformers::grouped_mm_fallback",),
        Kind.ADJUSTABLE,
        ACTIVATIONS,
        operands=(0, 1),
        contracts=lambda args: grouped_product(args[:2]),
        products=True,
        flops=grouped,
    ),
    two("chain_matmul", chain, None, (0,), (), SEVERAL, SEVERAL_AT_ONCE),
    two("linalg_multi_dot", chain, None, (0,), (), SEVERAL, SEVERAL_AT_ONCE),
    two("tensordot", tensor_dot, tensordot),
    two(
        "bilinear",
        bilinear,
        None,
        (0, 1, 2, 3),
        (3,),
        "a product of two activations and a weight: the plan chooses among the float precisions",
        "it multiplies its inputs by each other too",
    ),
    *dependent(
        "an outer product works value by value, so it takes the precision of its inputs",
        "outer ger kron addr",
    ),
    *fixed("a product of vectors that may cancel", "dot vdot linalg_vecdot cross linalg_cross"),
)


def einsum_contraction(args: tuple[Any, ...], output: Any) -> Any:
    """Return the FLOPs of an einsum from left to right, as torch computes it without a path.

    Each step costs one operation per combination of its labels, two if it sums.
    """
    inputs, arrow, result = args[0].replace(" ", "").partition("->")
    pairs = zip(inputs.split(","), args[1], strict=True)
    terms = [labels(term, operand.dim()) for term, operand in pairs]
    sizes: dict[str, Any] = {}
    for names, operand in zip(terms, args[1], strict=True):
        for name, size in zip(names, operand.shape, strict=True):
            # An operand may be broadcast.
            if name not in sizes or _is_one(sizes[name]):
                sizes[name] = size
    every = [name for names in terms for name in names]
    ellipsis = {name for name in every if name.startswith(".")}
    saved = ellipsis | {name for name in every if every.count(name) == 1}
    if arrow:
        saved = {*result}
        if "..." in result:
            saved |= ellipsis
    live, total = set(terms[0]), 0
    for position, names in enumerate(terms[1:], start=2):
        later = saved.union(*terms[position:])
        # A label of one operand that no later step needs is summed before the product.
        shared = live & set(names)
        live = (live | set(names)) & (later | shared)
        # A product without a sum costs one operation per value.
        operations = 1 if live <= later else 2
        total = total + operations * math.prod(sizes[name] for name in live)
        live &= later
    return total


_EINSUM_ROWS = (
    OperatorRow(
        "einsum",
        ("aten::einsum",),
        Kind.ADJUSTABLE,
        ACTIVATIONS,
        operands=(1,),
        contracts=einsum,
        products=True,
        flops=einsum_contraction,
    ),
)


_LINALG_ROWS = (
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
)


_RECURRENT_ROWS = fixed(
    "a recurrent network carries its state from step to step, and its rounding errors with it",
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
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
    """Return the FLOPs of the two products of attention.

    Shapes: query [..., Lq, E], key [..., Lk, E], value [..., Lk, Ev]. A causal mask does not halve
    them: kernels skip different parts, and torch counts the full product too.
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


_ATTENTION_ROWS = (
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


ROWS = (
    *_ATTENTION_ROWS,
    *_CONVOLUTION_ROWS,
    *_EINSUM_ROWS,
    *_LINALG_ROWS,
    *_PRODUCT_ROWS,
    *_RECURRENT_ROWS,
)
