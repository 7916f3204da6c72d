"""The CPU's emulation of the kernels, which tests on a GPU compare with: its fma against libm's, its results against FP64."""

from __future__ import annotations

import ctypes
import math

import cuda_emulation as emulation
import torch
from hypothesis import given, settings, strategies as st


def libm_fma(x: float, y: float, z: float) -> float:
    libm = ctypes.CDLL("libm.so.6")
    libm.fmaf.restype, libm.fmaf.argtypes = ctypes.c_float, (ctypes.c_float,) * 3
    found: float = libm.fmaf(x, y, z)
    return found


FLOAT = st.floats(width=32)
NEAR = st.builds(
    lambda mantissa, exponent: math.ldexp(mantissa, exponent), st.integers(-(1 << 24), 1 << 24), st.integers(-60, 60)
)


@settings(max_examples=500)
@given(st.one_of(st.tuples(FLOAT, FLOAT, FLOAT), st.tuples(NEAR, NEAR, NEAR)))
def test_the_emulated_fma_rounds_once(values: tuple[float, float, float]) -> None:
    expected = libm_fma(*values)
    found = emulation.fma(*(torch.tensor(value, dtype=torch.float32) for value in values)).item()
    assert found == expected or (math.isnan(found) and math.isnan(expected))


@given(st.data())
def test_the_emulation_against_fp64(data: st.DataObject) -> None:
    """Whatever the sizes: within the rounding of each step of what FP64 gives; INT8 sums are exact."""
    m, n, k = (data.draw(st.integers(1, 40)) for _ in range(3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**40)))
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator) for shape in ((m, k), (k, n)))
    a_scale = torch.rand(m, 1, generator=generator) / 64  # no sum leaves FP16
    b_scale, bias = torch.rand(n, generator=generator), torch.randn(n, generator=generator)
    activation = data.draw(st.sampled_from(["none", "relu", "gelu"]))
    out = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    found = emulation.gemm(a, b, a_scale, b_scale, bias, activation, out)
    scaled = (a.double() @ b.double()) * a_scale.double() * b_scale.double()
    exact = scaled + bias.double()
    exact = {"none": exact, "relu": exact.relu(), "gelu": torch.nn.functional.gelu(exact)}[activation]
    error = (found.double() - exact).abs()
    step = torch.finfo(out).eps
    assert (error <= step * exact.abs() + 4 * torch.finfo(torch.float32).eps * (scaled.abs() + bias.abs() + 1)).all()
    assert torch.equal(emulation.gemm(a, b), (a.long() @ b.long()).float())


def test_the_emulation_keeps_what_is_not_a_number() -> None:
    """A group whose scale is NaN (its input was not finite) is NaN after scales, bias, ReLU and rounding."""
    a, b = torch.zeros(2, 16, dtype=torch.int8), torch.ones(16, 3, dtype=torch.int8)
    scale = torch.tensor([math.nan, 1.0])
    for activation in ("none", "relu", "gelu"):
        found = emulation.gemm(a, b, scale, None, torch.ones(3), activation, torch.bfloat16)  # type: ignore[arg-type]
        assert found[0].isnan().all() and not found[1].isnan().any()
