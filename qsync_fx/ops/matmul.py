"""Matrix products.

Only a product with a weight takes scaled formats. `linear`, and `addmm`, which adds a bias to one, are written for that; any other has one
where one of its factors is a parameter, which its row leaves to `classify`. Two activations the paper leaves unquantized, so their product
takes float formats only.

`einsum`, the product whose shape is written in its first argument.

Linear algebra, Fourier transforms, and complex and sparse tensors, which torch computes in no narrow float.

Recurrent networks, each of which torch keeps as one operator.

Convolutions: products of an activation and a weight, so they take every format.

Attention as one operator.

Its two products are of activations, so it takes float formats only. Its softmax is FP32 inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from qsync_fx.ops.contractions import (
    Contraction,
    contraction,
    einsum,
    grouped as groups,
    inner,
    labels,
    linear,
    matmul,
    plus,
    tensordot,
)
from qsync_fx.ops.spec import Flops, Kind, OperatorRow, dependent, fixed

WEIGHT = "a product of an activation and a weight: the plan chooses its precision"
ACTIVATIONS = "a product of two activations: the plan chooses among the float precisions"
PARAMETERS = "a product of two parameters: the plan chooses among the float precisions"
HELD = "a product with a buffer, or with what the model computes from its parameters: the plan chooses among the float precisions"
ODD = "a product of an activation and a weight, but not as a layer's: the plan chooses among the float precisions"


def last_dimension(args: tuple[Any, ...], output: Any) -> Any:
    """Operations of a product that contracts the last dimension of its first argument, if it has one (`inner`)."""
    return 2 * output.numel() * math.prod(args[0].shape[-1:])


def added(args: tuple[Any, ...], output: Any) -> Any:
    """The same where the first argument is what the product is added to."""
    return 2 * output.numel() * args[1].shape[-1]


def summed(args: tuple[Any, ...], output: Any) -> Any:
    """`addbmm(bias, [b, n, k], [b, k, m])` adds the `b` products up."""
    return 2 * output.numel() * args[1].shape[0] * args[1].shape[-1]


def grouped(args: tuple[Any, ...], output: Any) -> Any:
    """`_grouped_mm(a, b)`: whichever operand has two dimensions holds all groups one after the other."""
    first, second = args[:2]
    if first.dim() == second.dim() == 2:
        return 2 * first.numel() * second.shape[-1]
    return last_dimension(args, output)


def chain(args: tuple[Any, ...], output: Any) -> Any:
    """A product of several matrices, from left to right. torch picks the cheapest order: this is an upper bound."""
    first, *rest = args[0]
    # The first and the last may be vectors: a row, and a column.
    rows = first.shape[0] if first.dim() == 2 else 1
    inner, total = first.shape[-1], 0
    for matrix in rest:
        columns = matrix.shape[1] if matrix.dim() == 2 else 1
        total, inner = total + 2 * rows * inner * columns, columns
    return total


def bilinear(args: tuple[Any, ...], output: Any) -> Any:
    """`bilinear([..., i], [..., j], [o, i, j])`: a product with the weight, then one with the second input."""
    return 2 * output.numel() * args[2].shape[1] * (args[2].shape[2] + 1)


def tensor_dot(args: tuple[Any, ...], output: Any) -> Any:
    """`tensordot(a, b, dims_a, dims_b)` contracts `dims_a` of `a`."""
    return 2 * output.numel() * math.prod([args[0].shape[dimension] for dimension in args[2]])


Contracts = Callable[[Sequence[Any]], Contraction | str]


def weighted(
    name: str, flops: Flops, scaled: tuple[int, int], bias: int, contracts: Contracts
) -> OperatorRow:
    """A product of an activation and a weight, to which a bias may be added."""
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
    bias: int | None = None,
    reason: str = ACTIVATIONS,
    unscaled: str = "",
) -> OperatorRow:
    """A product of two tensors, of which `contracts` may find one to be a weight."""
    return OperatorRow(
        name,
        (f"aten::{name}",),
        Kind.ADJUSTABLE,
        reason,
        operands=operands,
        contracts=contracts,
        unscaled=unscaled,
        products=True,
        added=() if bias is None else (bias,),
        flops=flops,
    )


def _letters(first: str, second: str, result: str) -> Contracts:
    return lambda args: contraction((first, second), result, (args[0], args[1]))


SEVERAL = "a product of several matrices: the plan chooses among the float precisions"

_PRODUCT_ROWS = (
    weighted("linear", last_dimension, (0, 1), 2, linear),
    weighted("addmm", added, (1, 2), 0, partial(plus, "mk", "kn", "mn")),
    two("mm", last_dimension, _letters("mk", "kn", "mn")),
    two("bmm", last_dimension, _letters("emk", "ekn", "emn")),
    two("matmul", last_dimension, matmul),
    two("linalg_matmul", last_dimension, matmul),
    two("mv", last_dimension, _letters("nk", "k", "n")),
    two("inner", last_dimension, inner),
    two("baddbmm", added, partial(plus, "emk", "ekn", "emn"), (0, 1, 2), 0),
    two("addmv", added, partial(plus, "nk", "k", "n"), (0, 1, 2), 0),
    two("addbmm", summed, partial(plus, "emk", "ekn", "mn"), (0, 1, 2), 0),
    two("_grouped_mm", grouped, groups, (0, 1, 3), 3),
    OperatorRow(
        "grouped_mm",
        ("transformers::grouped_mm_fallback",),
        Kind.ADJUSTABLE,
        ACTIVATIONS,
        operands=(0, 1),
        contracts=lambda args: groups(args[:2]),
        products=True,
        flops=grouped,
    ),
    two(
        "chain_matmul", chain, None, (0,), reason=SEVERAL, unscaled="it multiplies several at once"
    ),
    two(
        "linalg_multi_dot",
        chain,
        None,
        (0,),
        reason=SEVERAL,
        unscaled="it multiplies several at once",
    ),
    two("tensordot", tensor_dot, tensordot),
    two(
        "bilinear",
        bilinear,
        None,
        (0, 1, 2, 3),
        3,
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
    """From left to right, as torch does without a path: a step multiplies once for each combination of labels it holds."""
    inputs, arrow, result = args[0].replace(" ", "").partition("->")
    terms = [
        labels(term, operand.dim())
        for term, operand in zip(inputs.split(","), args[1], strict=True)
    ]
    sizes: dict[str, Any] = {}
    for names, operand in zip(terms, args[1], strict=True):
        for name, size in zip(names, operand.shape, strict=True):
            # One of the operands may be broadcast. A symbolic size is not 1: torch would have made a number of it.
            if name not in sizes or (isinstance(sizes[name], int) and sizes[name] == 1):
                sizes[name] = size
    every = [name for names in terms for name in names]
    saved = {name for name in every if _kept(name, result if arrow else None, every)}
    live, total = set(terms[0]), 0
    for position, names in enumerate(terms[1:], start=2):
        later = saved.union(*terms[position:])
        # What only one of the two has, and nobody needs later, is summed before they meet.
        shared = live & set(names)
        live = (live | set(names)) & (later | shared)
        # Without a sum it is a product value by value, of one operation each.
        total = total + (1 if live <= later else 2) * math.prod(sizes[name] for name in live)
        live &= later
    return total


def _kept(name: str, result: str | None, every: list[str]) -> bool:
    """Whether a label is one of the result's; without an arrow, those are what occurs once."""
    if result is None:
        return name.startswith(".") or every.count(name) == 1
    return "..." in result if name.startswith(".") else name in result


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
        "cholesky cholesky_inverse cholesky_solve det logdet slogdet inverse pinverse geqrf orgqr ormqr qr svd "
        "lu_solve lu_unpack _lu_with_info triangular_solve matrix_exp matrix_power linalg_cholesky linalg_cholesky_ex "
        "linalg_cond linalg_det linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product "
        "linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu "
        "linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_matrix_power "
        "linalg_matrix_rank linalg_matrix_sqrth linalg_pinv linalg_polar linalg_qr linalg_slogdet linalg_solve "
        "linalg_solve_ex linalg_solve_triangular "
        "linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vander vander",
    ),
    *fixed(
        "a Fourier transform needs FP32: each result adds all inputs up",
        "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn fft_irfft fft_irfft2 "
        "fft_irfftn fft_hfft fft_hfft2 fft_hfftn fft_ihfft fft_ihfft2 fft_ihfftn fft_fftshift fft_ifftshift "
        "fft_fftfreq fft_rfftfreq stft istft",
    ),
    *fixed(
        "sparse tensors stay as they are",
        "to_sparse to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc to_dense",
    ),
    *fixed(
        "complex numbers have no narrow format",
        "complex real imag angle conj _conj _conj_copy conj_physical _conj_physical view_as_complex "
        "view_as_complex_copy view_as_real view_as_real_copy",
    ),
)


_RECURRENT_ROWS = fixed(
    "a recurrent network carries its state from step to step, and its rounding errors with it",
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
)


CONVOLUTION_REASON = "a convolution of an activation by a weight: the plan chooses its precision"


def forward(args: tuple[Any, ...], output: Any) -> Any:
    """Each output value is a product over `weight[0]`, whose shape [in / groups, *kernel] accounts for groups."""
    return 2 * output.numel() * math.prod(args[1].shape[1:])


def transposed(args: tuple[Any, ...], output: Any) -> Any:
    """Each input value is spread over `weight[0]`, here of shape [out / groups, *kernel]."""
    return 2 * args[0].numel() * math.prod(args[1].shape[1:])


def either(args: tuple[Any, ...], output: Any) -> Any:
    """`convolution(input, weight, bias, stride, padding, dilation, transposed, ...)`."""
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
    """Query [..., Lq, E], key [..., Lk, E], value [..., Lk, Ev]: scores, then their product with the values.

    A causal mask halves neither: kernels differ in what they skip, and torch counts both whole too.
    """
    query, key, value = args[:3]
    return 2 * math.prod(output.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def attention_gradients(args: tuple[Any, ...], output: Any) -> Any:
    """Both gradients of both products; a fused kernel computes the scores once more, torch's plain one keeps them.

    On the CPU dropout is what the fused kernel does not take.
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
