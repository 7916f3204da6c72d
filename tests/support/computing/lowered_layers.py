"""Layers of lowered operators for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from qsync_fx.formats import FORMATS
from qsync_fx.graph.fx_utils import memory_order
from tests.support.computing.products_in_fp64 import SEED, Operand, operand

FORMATS_OF_PRODUCTS = [row.name for row in FORMATS.values() if not row.plain]
every_format = pytest.mark.parametrize("fmt", FORMATS_OF_PRODUCTS)
STREAM = 5
OUT = {name: FORMATS[name].output.dtype for name in FORMATS_OF_PRODUCTS}


@dataclass(frozen=True)
class Geometry:
    """Arguments of a convolution."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool = False
    output_padding: list[int] = field(default_factory=lambda: [0])
    groups: int = 1

    @property
    def arguments(self) -> tuple[Any, ...]:
        padding = self.output_padding * (len(self.stride) if len(self.output_padding) == 1 else 1)
        return self.stride, self.padding, self.dilation, self.transposed, padding, self.groups


@dataclass(frozen=True)
class Layer:
    """Layer in a format; `geometry` is None for linear."""

    fmt: str
    geometry: Geometry | None = None
    channel: bool = False
    rounding: str = "stochastic"
    out_dtype: torch.dtype | None = None

    def operands(self, x: Tensor, weight: Tensor, seed: Tensor = SEED) -> tuple[Operand, Operand]:
        keep_x, keep_weight = self.keep(x, weight) if self.channel else ([], [])
        return (
            operand(x, self.fmt, self.rounding, keep_x, 0, seed),
            operand(weight, self.fmt, self.rounding, keep_weight, 1, seed),
        )

    def keep(self, x: Tensor, weight: Tensor) -> tuple[list[int], list[int]]:
        if self.geometry is None:
            return list(range(x.dim() - 1)), [0]
        keep_x = [0] if x.dim() == weight.dim() else []
        if self.geometry.transposed:
            return keep_x, [1] if self.geometry.groups == 1 else []
        return keep_x, [0]

    def order(self, x: Tensor, weight: Tensor) -> list[int]:
        """Return the dimensions of torch's convolution output from outermost to innermost in
        memory.
        """
        assert self.geometry is not None
        if torch.compiler.is_dynamo_compiling():
            # Dynamo traces neither the change of modes nor `memory_order`.
            last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
            follows = last is not None and any(
                t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in (x, weight)
            )
            return [0, *range(2, x.dim()), 1] if follows else list(range(x.dim()))
        unbatched = weight.dim() - x.dim()
        with _disable_current_modes(), torch.no_grad():
            batched = x.unsqueeze(0) if unbatched else x
            y = torch.ops.aten.convolution.default(
                batched, weight.to(x.dtype), None, *self.geometry.arguments
            )
        order = memory_order(y) or list(range(y.dim()))
        return [dim - unbatched for dim in order if dim >= unbatched]

    def arguments(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor = SEED
    ) -> tuple[Any, ...]:
        a, b = self.operands(x, weight, seed)
        geometry = (
            () if self.geometry is None else (*self.geometry.arguments, self.order(x, weight))
        )
        out_dtype = self.out_dtype or OUT[self.fmt]
        return (
            x,
            weight,
            bias,
            a.q,
            a.scale,
            b.q,
            b.scale,
            seed,
            STREAM,
            *geometry,
            self.fmt,
            self.rounding,
            out_dtype,
        )

    @property
    def operator(self) -> Any:
        return (
            torch.ops.qsync.linear if self.geometry is None else torch.ops.qsync.convolution
        ).default

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, seed: Tensor = SEED
    ) -> Tensor:
        output: Tensor = self.operator(*self.arguments(x, weight, bias, seed))
        return output


def leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_()


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Yield the names of called operators."""
    calls: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Recorder():
        yield calls
