"""Dead taps of a convolution, which read only padding: detection, zero gradients, and no oneDNN
kernel that gets one.

oneDNN does not write gradients of dead taps. The tests set them to infinity, which uninitialized
memory can contain.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import qsync_fx
from qsync_fx.backend.operators.conv_gradients import Geometry, least_sizes, unsafe_dimensions
from qsync_fx.backend.operators.products_in_fp32 import IN_FP32
from tests.support import tiers


def taps_of_one_dimension(padded: int, other: int, k: int, s: int, p: int, d: int) -> list[bool]:
    """Return whether each tap reads data, by trying every pair of positions."""
    return [any(0 <= i * d - p + s * j < padded for j in range(other)) for i in range(k)]


def alive(size: list[int], kernel: list[int], geometry: Geometry) -> Tensor:
    """Return the mask of taps that read data, in the shape of the kernel."""
    stride, padding, dilation, transposed, more, _ = geometry
    result = torch.ones(kernel, dtype=torch.bool)
    for index, (n, k, s, p, d) in enumerate(
        zip(size, kernel, stride, padding, dilation, strict=True)
    ):
        padded, other = n, (n + 2 * p - d * (k - 1) - 1) // s + 1
        if transposed:
            padded, other = (n - 1) * s - 2 * p + d * (k - 1) + more[index] + 1, n
        met = torch.tensor(taps_of_one_dimension(padded, other, k, s, p, d))
        result &= met.view(-1, *[1] * (len(kernel) - index - 1))
    return result


@st.composite
def geometries(draw: st.DrawFn) -> tuple[list[int], list[int], Geometry]:
    spatial, transposed = draw(st.integers(1, 3)), draw(st.booleans())

    def each(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=spatial, max_size=spatial))

    size, kernel, stride, padding, dilation = (
        each(1, 7),
        each(1, 5),
        each(1, 4),
        each(0, 6),
        each(1, 3),
    )
    more = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
    for n, k, s, p, d, extra in zip(size, kernel, stride, padding, dilation, more, strict=True):
        assume(
            (n - 1) * s - 2 * p + d * (k - 1) + extra + 1 > 0
            if transposed
            else n + 2 * p - d * (k - 1) > 0
        )
    return (
        size,
        kernel,
        (stride, padding, dilation, transposed, more if transposed else [0] * spatial, 1),
    )


@given(geometries())
def test_dead_taps_read_only_padding(case: tuple[list[int], list[int], Geometry]) -> None:
    size, kernel, geometry = case
    expected = alive(size, kernel, geometry)
    least = least_sizes(kernel, geometry)
    alive_taps = [
        [n >= least_size for least_size in taps] for n, taps in zip(size, least, strict=True)
    ]
    assert [all(taps) for taps in itertools.product(*alive_taps)] == expected.flatten().tolist()
    # After explicit padding of the dimensions with dead taps no tap is dead.
    stride, padding, dilation, transposed, more, groups = geometry
    unsafe = unsafe_dimensions(kernel, size, geometry)
    remaining = [0 if pad else p for pad, p in zip(unsafe, padding, strict=True)]
    padded = [
        n + 2 * (p - r) * (not transposed) for n, p, r in zip(size, padding, remaining, strict=True)
    ]
    assert alive(padded, kernel, (stride, remaining, dilation, transposed, more, groups)).all()


@given(geometries(), st.integers(0, 2**32))
def test_dead_taps_have_no_gradient(case: tuple[list[int], list[int], Geometry], seed: int) -> None:
    torch.manual_seed(seed)
    size, kernel, geometry = case
    x, weight = torch.randn(3, 2, *size), torch.randn(2, 2, *kernel).requires_grad_()
    [gradient] = torch.autograd.grad(
        torch.ops.aten.convolution(x, weight, None, *geometry).square().sum(), weight
    )
    assert (gradient[:, :, ~alive(size, kernel, geometry)] == 0).all()


_BY_TORCH = torch.ops.aten.convolution_backward.default
BACKWARD = _BY_TORCH, IN_FP32[_BY_TORCH]


class Spoilt(TorchDispatchMode):
    """Dispatch mode that sets gradients of dead taps to infinity; counts these and all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.taps = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in BACKWARD or result[1] is None:
            return result
        _, x, weight, _, *geometry, _ = args
        self.calls += 1
        if weight.dtype.itemsize < 4 and any(step > 1 for step in geometry[0]):
            dead = ~alive(list(x.shape[2:]), list(weight.shape[2:]), tuple(geometry))
            result[1][:, :, dead] = torch.inf
            self.taps += int(dead.sum())
        return result


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one pixel": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 1, 1)),
    "one column": (lambda: nn.Conv2d(4, 6, (3, 5), stride=(2, 3), padding=(1, 2)), (2, 4, 7, 1)),
    "1d": (lambda: nn.Conv1d(4, 6, 5, stride=2, padding=3), (2, 4, 1)),
    "3d": (lambda: nn.Conv3d(4, 6, 3, stride=2, padding=1), (2, 4, 1, 5, 2)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 2, 2)),
    "dilation": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=2, dilation=2), (2, 4, 2, 1)),
    "transposed": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
        (2, 4, 1, 1),
    ),
    "transposed, cropped": (lambda: nn.ConvTranspose1d(4, 6, 5, stride=3, padding=2), (2, 4, 1)),
    "no batch": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (4, 1, 1)),
}
FORMATS = ("bf16", "int8", "fp8", "int8_grad")


def gradients(
    step: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, around: Any
) -> list[Tensor]:
    torch.manual_seed(2)
    y = step(x)
    with around:
        return list(torch.autograd.grad(y.float().square().sum(), list(model.parameters())))


def check(model: nn.Module, x: Tensor, **compile_kwargs: Any) -> None:
    """Assert that gradients are close to eager mode and zero at dead taps, and that no kernel call
    has dead taps.
    """
    torch._dynamo.reset()
    torch.manual_seed(1)
    step = torch.compile(model, backend="qsync", **compile_kwargs)
    gradients(step, model, x, Spoilt())  # compiles
    corrupted = Spoilt()
    torch.manual_seed(1)
    results = gradients(step, model, x, corrupted)
    assert corrupted.taps == 0 < corrupted.calls
    plain = gradients(model, model, x, nullcontext())
    for actual, exact in zip(results, plain, strict=True):
        assert actual.isfinite().all()
        assert (actual - exact).norm() <= 0.3 * exact.norm()
        assert (actual[exact == 0] == 0).all()


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_of_dead_taps_are_zero(layer: str, precision: str) -> None:
    make, shape = LAYERS[layer]
    torch.manual_seed(0)
    check(
        make(),
        torch.randn(shape),
        dynamic=False,
        options={"precision": precision, "inner_backend": "aot_eager"},
    )


@pytest.mark.parametrize("inner_backend", ["eager", pytest.param("inductor", marks=tiers.ALL)])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_with_every_inner_compiler(precision: str, inner_backend: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS["one pixel"]
    check(
        make(),
        torch.randn(shape),
        dynamic=False,
        options={"precision": precision, "inner_backend": inner_backend},
    )


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("transposed", [False, True])
def test_symbolic_sizes(precision: str, transposed: bool) -> None:
    torch.manual_seed(0)
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    model = kind(4, 6, 3, stride=2, padding=1)
    torch._dynamo.reset()
    step = torch.compile(
        model,
        backend="qsync",
        dynamic=True,
        options={"precision": precision, "inner_backend": "aot_eager"},
    )
    torch.manual_seed(3)
    for size in ((5, 4), (2, 4), (3, 2), (2, 2)):
        x = torch.randn(2, 4, *size)
        results = gradients(step, model, x, Spoilt())
        exact = gradients(model, model, x, nullcontext())
        assert all(
            actual.isfinite().all() and (actual[expected == 0] == 0).all()
            for actual, expected in zip(results, exact, strict=True)
        )
        assert all(
            (actual - expected).norm() <= 0.3 * expected.norm()
            for actual, expected in zip(results, exact, strict=True)
        )


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.conv(x)


def test_autocast_region_of_the_model() -> None:
    torch.manual_seed(0)
    check(
        Autocast(), torch.randn(2, 4, 1, 1), dynamic=False, options={"inner_backend": "aot_eager"}
    )


def text(model: nn.Module, x: Tensor, precision: str) -> str:
    torch._dynamo.reset()
    return str(qsync_fx.explain(model, x, options={"precision": precision}).graph("lower"))


def test_no_padding_if_kernels_fit_their_data() -> None:
    model, pixel, image = (
        nn.Conv2d(4, 6, 3, stride=2, padding=1),
        torch.randn(2, 4, 1, 1),
        torch.randn(2, 4, 3, 3),
    )
    assert "padded_convolution" in text(model, pixel, "bf16")
    assert "padded_convolution" not in text(model, image, "bf16")
    assert "padded_convolution" not in text(model, pixel, "fp32")
    assert "padded_convolution" in text(nn.Conv2d(4, 6, 3, padding=1), pixel, "bf16")
    assert "padded_convolution" not in text(nn.Conv2d(4, 6, 3, padding=1), image, "bf16")
    with torch.no_grad():
        assert "padded_convolution" not in text(model, pixel, "bf16")
