"""Inductor without kernel compilation, for measuring allocations in seconds instead of minutes.

The allocations are the same as in a normal run. Invariant: after the context torch is unchanged,
and code that was compiled inside is not cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering


@contextmanager
def without_kernels() -> Iterator[None]:
    """Replace Inductor's C++ kernels by no-ops that write to zero-initialized buffers.

    The zeros keep indices valid that a skipped kernel would have written.
    """
    build, compiled = AsyncCompile.cpp_pybinding, GraphLowering.compile_to_module

    def zeros(size: Any, stride: Any, dtype: Any) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype).zero_()

    def module(self: Any) -> Any:
        result: Any = compiled(self)
        result.empty_strided_cpu = zeros
        return result

    AsyncCompile.cpp_pybinding = lambda *_: lambda *arguments: None  # type: ignore[method-assign]
    GraphLowering.compile_to_module = module  # type: ignore[method-assign]
    try:
        with torch._inductor.config.patch(fx_graph_cache=False):
            yield
    finally:
        AsyncCompile.cpp_pybinding = build  # type: ignore[method-assign]
        GraphLowering.compile_to_module = compiled  # type: ignore[method-assign]
