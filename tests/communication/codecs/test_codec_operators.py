"""Codecs as torch operators, eager and compiled by Inductor: bit-identical to native kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from qsync_fx import _C
from qsync_fx.communication.codecs import buffers, torch_kernels
from qsync_fx.communication.codecs.codec import Codec, Draw
from qsync_fx.communication.codecs.onebit import Reshaped
from qsync_fx.communication.codecs.qsgd import Qsgd
from tests.support import tiers
from tests.support.computing.native_reference import SEEDS, STREAMS, vectors

BITS = st.sampled_from([2, 4, 8, 16])
UNITS = st.sampled_from([64, 128, 512])
NORMS, LAYOUTS = st.sampled_from(["max", "two"]), st.sampled_from(["sign", "endpoints"])
FIRST = st.sampled_from([0, 512, 2**31 - 512, 2**32 - 2048])


def kernels(
    codec: Codec, x: torch.Tensor, draw: Draw, residual: torch.Tensor | None = None
) -> tuple[Any, Any]:
    """Return the message that the native kernels encode, and the values that they decode."""
    wire, values = torch.zeros(codec.nbytes(x.numel()), dtype=torch.uint8), torch.empty_like(x)
    codec.encode(x, wire, draw, residual)
    codec.decode(wire, values)
    return wire, values


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    signs = (
        actual.isnan() | (actual.signbit() == expected.signbit())
        if actual.is_floating_point()
        else None
    )
    assert signs is None or bool(signs.all())


@given(st.data(), BITS, UNITS, NORMS, LAYOUTS, SEEDS, STREAMS, FIRST)
def test_qsgd(
    data: Any, bits: int, size: int, norm: Any, layout: Any, seed: int, stream: int, first: int
) -> None:
    x, draw = data.draw(vectors(data.draw(st.integers(0, 1200)))), Draw(seed, stream, first)
    wire, values = kernels(Qsgd(bits, size, norm, layout), x, draw)
    same(torch_kernels.qsgd_encode(x, bits, size, norm, layout, draw), wire)
    same(torch_kernels.qsgd_decode(wire, x.numel(), bits, size, layout), values)


@given(st.data(), BITS, st.sampled_from([128, 256, 512]), NORMS, LAYOUTS, SEEDS, STREAMS, FIRST)
def test_rotated_qsgd(
    data: Any, bits: int, size: int, norm: Any, layout: Any, seed: int, stream: int, first: int
) -> None:
    x, draw = data.draw(vectors(data.draw(st.integers(0, 1200)))), Draw(seed, stream, first)
    wire, values = kernels(Qsgd(bits, size, norm, layout, rotated=True), x, draw)
    same(torch_kernels.qsgd_encode(x, bits, size, norm, layout, draw, True), wire)
    same(torch_kernels.qsgd_decode(wire, x.numel(), bits, size, layout, True), values)


@given(st.data(), st.sampled_from([1, 3, 16, 33, 64, 100, 512]))
def test_onebit(data: Any, size: int) -> None:
    x = data.draw(vectors(data.draw(st.integers(0, 700))))
    residual = torch.randn(x.numel(), generator=torch.Generator().manual_seed(1))
    updated = residual.clone()
    wire, values = kernels(Reshaped(size), x, Draw(), updated)
    message, remainder = torch_kernels.onebit_encode(x, residual, size)
    same(message, wire)
    same(remainder, updated)
    same(torch_kernels.onebit_decode(wire, x.numel(), size), values)


@tiers.ALL
@pytest.mark.parametrize(
    ("bits", "layout", "sizes"),
    tiers.chosen(
        [],
        [(2, "sign", (1000,)), (16, "endpoints", (4096,))],
        [
            (bits, layout, (1000, 4096))
            for bits in (2, 4, 8, 16)
            for layout in ("sign", "endpoints")
        ],
    ),
)
def test_inductor_makes_the_same_bytes(bits: int, layout: Any, sizes: tuple[int, ...]) -> None:
    draw = Draw(12345, 67, 89)
    for n in sizes:
        x = torch.randn(n, generator=torch.Generator().manual_seed(n)) * torch.logspace(-44, 38, n)
        wire, values = kernels(Qsgd(bits, 512, "max", layout), x, draw)
        same(
            torch.compile(torch_kernels.qsgd_encode, fullgraph=True)(
                x, bits, 512, "max", layout, draw
            ),
            wire,
        )
        same(
            torch.compile(torch_kernels.qsgd_decode, fullgraph=True)(wire, n, bits, 512, layout),
            values,
        )


@tiers.ALL
def test_inductor_makes_the_same_bytes_of_a_rotation() -> None:
    """The functions are compiled as for a GPU, with a dynamic number of units."""
    draw, size = Draw(12345, 67, 512), 128
    for units in (3, 32):
        n = units * size
        x = torch.randn(n, generator=torch.Generator().manual_seed(n)) * torch.logspace(-44, 33, n)
        wire, values = kernels(Qsgd(4, size, rotated=True), x, draw)
        start = torch_kernels._start(draw, x.device)
        encode = torch_kernels._compiled(torch_kernels.rotated_rows, (4, "max", "sign"))
        scale, packed = encode(x.view(units, size), start)
        same(torch.cat([scale.view(torch.uint8), packed.flatten()]), wire[4:])
        decode = torch_kernels._compiled(torch_kernels.rotated_values, (4, size, "sign"))
        signs = wire[:4].view(torch.int32)
        same(decode(scale, packed, signs).flatten(), values)


@tiers.ALL
def test_inductor_makes_the_same_bits_of_signs() -> None:
    x = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    residual = torch.randn(1001, generator=torch.Generator().manual_seed(1))
    updated = residual.clone()
    wire, values = kernels(Reshaped(64), x, Draw(), updated)
    message, remainder = torch.compile(torch_kernels.onebit_encode, fullgraph=True)(x, residual, 64)
    same(message, wire)
    same(remainder, updated)
    same(torch.compile(torch_kernels.onebit_decode, fullgraph=True)(wire, 1001, 64), values)


@pytest.mark.parametrize(
    "codec",
    [
        Qsgd(4, 512),
        Qsgd(4, 512, rotated=True),
        Qsgd(8, 512, "two", "endpoints"),
        Reshaped(64),
    ],
)
def test_codecs_fall_back_to_operators_without_kernels(
    codec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operators encode and decode values of all devices but the CPU."""
    x = torch.randn(1300, generator=torch.Generator().manual_seed(0))
    residuals = [torch.ones(1300), torch.ones(1300)]
    wire, values = kernels(codec, x, Draw(1, 2, 512), residuals[0])
    monkeypatch.setattr(buffers, "native", lambda values: False)
    monkeypatch.setattr(_C, f"{'onebit' if isinstance(codec, Reshaped) else 'qsgd'}_encode", None)
    message, decoded = kernels(codec, x, Draw(1, 2, 512), residuals[1])
    same(message, wire)
    same(decoded, values)
    same(residuals[1], residuals[0])
    total = values.clone()
    codec.decode(wire, total, add=True)
    same(total, values + values)
