"""Fusible quantizer for CUDA devices without kernels: equal to the reference bit for bit, fused by
Inductor into two kernels.

The tests compile it for the CPU, from the same Inductor loops as for Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.compile_fx import compile_fx

from qsync_fx.backend.cuda.runtime import quantize_launch
from qsync_fx.backend.cuda.runtime.device_state import assumed
from qsync_fx.backend.inductor import decompositions, fusible_quantize
from qsync_fx.backend.inductor.inductor_config import register_with_inductor
from qsync_fx.backend.numerics import philox, reference
from qsync_fx.formats import precision
from qsync_fx.rounding import rounding_mode
from tests.support import tiers

SEED = torch.tensor([0x7123456789ABCDEF])
STREAM = 2**31 + 5
EDGES = [0.0, -0.0, 1e-45, -1e-38, 1e-30, 3e38, 127.5, -0.5]


def reference_of(x: Tensor, fmt: str, rounding: str, keep: list[int]) -> tuple[Tensor, Tensor]:
    """Return the result of `reference.quantize` on a CUDA device, where random numbers are Philox
    numbers.
    """
    row, mode = precision(fmt), rounding_mode(rounding)
    q, scale = reference.empty_quantized(x, row.dtype), reference.scales(x, row, keep)
    random = philox.uniform(q, SEED, STREAM) if rounding == "stochastic" else None
    rounded = reference.to_grid(x.float() / scale, row, mode, random)
    return q.copy_(torch.where(scale.isnan(), torch.zeros_like(rounded), rounded)), scale


def same(results: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    def bits(t: Tensor) -> Tensor:
        return t.contiguous().view(torch.uint8 if t.dtype.itemsize == 1 else torch.int32)

    return all(
        actual.shape == expected.shape
        and actual.dtype == expected.dtype
        and torch.equal(bits(actual), bits(expected))
        for actual, expected in zip(results, want, strict=True)
    )


def samples() -> list[tuple[Tensor, list[int]]]:
    wide = torch.randn(37, 19)
    wide.view(-1)[: len(EDGES)] = torch.tensor(EDGES)
    broken = torch.randn(6, 33)
    broken[2, 3], broken[4, 0] = torch.nan, torch.inf
    broken[1] = 0
    images = torch.randn(2, 5, 3, 7).contiguous(memory_format=torch.channels_last)
    return [
        (wide, []),
        (wide.bfloat16(), [0]),
        (broken, [0]),
        (images.half(), [1]),
        (images, []),
        (torch.randn(9, 24).t(), []),
    ]


@pytest.mark.parametrize("rounding", ["stochastic", "nearest", "floor"])
@pytest.mark.parametrize("fmt", ["int8", "fp8"])
def test_operators_have_the_bits_of_the_reference(fmt: str, rounding: str) -> None:
    for x, keep in samples():
        assert same(
            fusible_quantize.quantize(x, SEED, STREAM, fmt, rounding, keep),
            reference_of(x, fmt, rounding, keep),
        )


@tiers.one_in(3)
@tiers.ALL
@pytest.mark.parametrize(
    ("fmt", "rounding"), [("int8", "stochastic"), ("int8", "nearest"), ("fp8", "stochastic")]
)
def test_inductor_code_also_has_the_property(fmt: str, rounding: str) -> None:
    register_with_inductor()
    cases = samples()

    def all_of_them(xs: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [
            fusible_quantize.quantize(x, SEED, STREAM, fmt, rounding, keep)
            for x, (_, keep) in zip(xs, cases, strict=True)
        ]

    torch.compiler.reset()
    compiled = torch.compile(all_of_them, fullgraph=True)
    for result, (x, keep) in zip(compiled([x for x, _ in cases]), cases, strict=True):
        assert same(result, reference_of(x, fmt, rounding, keep)), (x.shape, x.dtype, keep)


def test_quantizer_has_a_scale_pass_and_a_rounding_pass() -> None:
    """Check that random numbers, quotients and masks are not written to memory."""
    register_with_inductor()
    kernels: list[str] = []

    def compile_with(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        table = decompositions.for_inductor(torch.device("cpu"))
        return compile_fx(module, inputs, decompositions={**(table or {}), **written})

    written = {torch.ops.qsync.quantize.default: fusible_quantize.quantize}
    torch.compiler.reset()
    from torch._inductor.utils import run_and_get_code

    def quantize(x: Tensor) -> Any:
        return torch.ops.qsync.quantize.default(
            torch.relu(x) * 3, SEED, STREAM, "int8", "stochastic", []
        )

    x = torch.randn(64, 48)
    result, sources = run_and_get_code(torch.compile(quantize, backend=compile_with), x)
    assert same(result, reference_of(torch.relu(x) * 3, "int8", "stochastic", []))
    code = "\n".join(sources)
    kernels = [
        line
        for line in code.splitlines()
        if line.lstrip().startswith("cpp_fused") and "(" in line and "=" not in line.split("(")[0]
    ]
    assert (
        "qsync.quantize" not in code and "qsync.uniform" not in code and "qsync.divide" not in code
    )
    assert len(kernels) <= 2, kernels
    # Only the result has the size of the input; the scale and the maximum magnitude are small.
    allocations = [
        line for line in code.splitlines() if "empty_strided" in line and "= empty" in line
    ]
    assert len([line for line in allocations if "64" in line]) == 1, allocations


@pytest.mark.parametrize(
    ("arch", "fmt", "fuses"), [(None, "int8", True), ("sm_80", "int8", False), (None, "fp8", True)]
)
def test_operators_without_a_kernel_are_decomposed(arch: Any, fmt: str, fuses: bool) -> None:
    with torch._subclasses.FakeTensorMode(), assumed(arch):
        x = torch.empty(4, 8, device="cuda")
        assert quantize_launch.fused(x, precision(fmt)) is fuses
        table = fusible_quantize.decompositions(torch.device("cuda", 0))
        result = table[torch.ops.qsync.quantize.default](
            x, torch.empty(1, dtype=torch.int64, device="cuda"), 0, fmt, "nearest", []
        )
        assert (result is NotImplemented) is not fuses
    assert fusible_quantize.decompositions(torch.device("cpu")) == {}


def test_inductor_calls_the_operator_of_a_kernel() -> None:
    """Check that lowerings exist: Inductor creates no fallback for operators with a decomposition,
    even if it returns NotImplemented.
    """
    from torch._inductor.lowering import lowerings

    register_with_inductor()
    assert set(fusible_quantize.decompositions(torch.device("cuda", 0))) <= set(lowerings)
