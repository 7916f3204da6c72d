"""Formulas that Inductor is given on the CPU in place of its own, where those end in scalar code; on CUDA, those of quantizers that there
is no kernel for.

Invariant: what is computed is the same, but for the order in which overlapping windows of a pooling are summed, and the type; and for the
numbers that dropout draws, where that is asked for. A table has a name that torch's caches on disk know a graph by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from qsync_fx.backend.inductor import depthwise, fusing
from qsync_fx.backend.inductor.dropout import decomposition, in_bits
from qsync_fx.backend.inductor.relu import threshold_backward
from qsync_fx.backend.operators.gradients.embedding import embedding_gradient
from qsync_fx.backend.operators.gradients.max_pool import max_pool2d_gradient

aten = torch.ops.aten


def _max_pool2d_backward(
    gradient: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """torch's kernel, as in eager mode: Inductor's scatter, or gather, is not vectorized, and was a tenth of a ResNet-18 step."""
    result = max_pool2d_gradient(gradient, indices, x.shape, kernel, stride, padding, dilation, ceil_mode)
    # The kernel follows the gradient, torch's operator the input.
    return result.contiguous(memory_format=suggest_memory_format(x))


class Table(dict[OpOverload, Callable[..., Any]]):
    """A table that is pickled as what it was made of: torch 2.13 has it in the key of a graph in its caches, and none of its operators
    can be pickled, so that no graph was ever found there."""

    def __init__(self, table: Mapping[OpOverload, Callable[..., Any]], made_of: tuple[Any, ...]) -> None:
        super().__init__(table)
        self._made_of = made_of

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return for_inductor, self._made_of


def for_inductor(device: torch.device, fast_dropout: bool = False, keep_less: bool = False) -> Table | None:
    """Returns Inductor's table of decompositions with ours in it, those of the options too; None where its own is right."""
    from torch._inductor.decomposition import select_decomp_table

    made_of = device, fast_dropout, keep_less
    if device.type != "cpu":
        written = fusing.decompositions(device)
        return Table({**select_decomp_table(), **written}, made_of) if written else None

    table, dropping = select_decomp_table(), aten.native_dropout.default
    if fast_dropout:
        table = {**table, dropping: decomposition(bits=keep_less)}
    elif keep_less and dropping in table:
        # It is missing where Inductor draws as torch does, under which setting a graph is read from torch's caches.
        table = {**table, dropping: in_bits(table[dropping])}
    ours: dict[OpOverload, Callable[..., Any]] = {
        aten.convolution_backward.default: depthwise.convolution_backward,
        aten.threshold_backward.default: threshold_backward,
        aten.max_pool2d_with_indices_backward.default: _max_pool2d_backward,
        aten.embedding_dense_backward.default: embedding_gradient,
    }
    return Table({**table, **ours}, made_of)
