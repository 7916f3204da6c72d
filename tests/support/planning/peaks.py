"""What a training step really holds at most, by the allocator's own count, and what is foreseen of it.

Inductor's own kernels are neither built nor run unless that is asked for: what is allocated is the same, and takes seconds where compiling
them takes a minute. The gradient that the backward pass begins with is as large as the model's result, as under any loss but a plain sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering

import qsync_fx
from qsync_fx import Plan
from qsync_fx.predictor.mapper import states
from qsync_fx.predictor.memory import step_memory
from qsync_fx.predictor.model import model_graph
from qsync_fx.profiling.measuring.peak import measured_peak

FORMATS = ("fp32", "bf16", "int8")


@contextmanager
def unbuilt() -> Iterator[None]:
    """Lets Inductor's kernels do nothing, on buffers of zeros, so that indices that they would write are right to read."""
    build, compiled = AsyncCompile.cpp_pybinding, GraphLowering.compile_to_module

    def zeros(size: Any, stride: Any, dtype: Any) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype).zero_()

    def module(self: Any) -> Any:
        found: Any = compiled(self)
        found.empty_strided_cpu = zeros
        return found

    AsyncCompile.cpp_pybinding = lambda *_: lambda *arguments: None  # type: ignore[method-assign]
    GraphLowering.compile_to_module = module  # type: ignore[method-assign]
    try:
        with torch._inductor.config.patch(fx_graph_cache=False):
            yield
    finally:
        AsyncCompile.cpp_pybinding = build  # type: ignore[method-assign]
        GraphLowering.compile_to_module = compiled  # type: ignore[method-assign]


def real_and_foreseen(model: nn.Module, x: Tensor, plan: Plan, built: bool = False) -> tuple[int, int]:
    """Returns the most bytes that a step of a model holds beyond what is held before it, as counted and as foreseen."""
    torch._dynamo.reset()
    graph = model_graph(qsync_fx.explain(model.train(), x), FORMATS)
    with nullcontext() if built else unbuilt():
        compiled = torch.compile(model, backend="qsync", options={"plan": plan})  # type: ignore[dict-item]
        weights: list[Tensor] = []

        def step() -> None:
            result = compiled(x)
            if not weights:
                weights.append(torch.randn_like(result))
            (result * weights[0]).sum().backward()
            model.zero_grad(set_to_none=True)
            x.grad = None

        step()
        return measured_peak(step), step_memory(states(graph, plan)).step_bytes
