"""Rows of matrix products, convolutions, attention, linear algebra and recurrent networks.

Only a product with a weight accepts scaled formats; QSync does not quantize products of two
activations. `linear`, `addmm` and convolutions have a weight argument. In other products a factor
may be a parameter; the pass `classify` finds it. Attention multiplies activations, so it accepts
float formats only; its softmax is FP32 internally. Linear algebra, Fourier transforms, complex and
sparse tensors have no narrow format in torch.
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
    rows = first.shape[0] if first.dim() == 2 else 1
    inner, total = first.shape[-1], 0
    for matrix in rest:
        columns = matrix.shape[1] if matrix.dim() == 2 else 1
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
    bias: int | None = None,
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
    """Return the FLOPs of an einsum from left to right, as torch computes it without a path.

    Each step costs one operation per combination of its labels, two if it sums.
    """
    inputs, arrow, result = args[0].replace(" ", "").partition("->")
    terms = [
        labels(term, operand.dim())
        for term, operand in zip(inputs.split(","), args[1], strict=True)
    ]
    sizes: dict[str, Any] = {}
    for names, operand in zip(terms, args[1], strict=True):
        for name, size in zip(names, operand.shape, strict=True):
            # An operand may be broadcast. A symbolic size is not 1: torch would have specialized
            # it.
            if name not in sizes or (isinstance(sizes[name], int) and sizes[name] == 1):
                sizes[name] = size
    every = [name for names in terms for name in names]
    saved = {name for name in every if _kept(name, result if arrow else None, every)}
    live, total = set(terms[0]), 0
    for position, names in enumerate(terms[1:], start=2):
        later = saved.union(*terms[position:])
        # A label of one operand that no later step needs is summed before the product.
        shared = live & set(names)
        live = (live | set(names)) & (later | shared)
        # A product without a sum costs one operation per value.
        total = total + (1 if live <= later else 2) * math.prod(sizes[name] for name in live)
        live &= later
    return total


def _kept(name: str, result: str | None, every: list[str]) -> bool:
    """Return whether a label is in the result; without an arrow, if it occurs once."""
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
