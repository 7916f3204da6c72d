"""Codec kernels compared bitwise with their reference, for each ISA, thread count and chunking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from qsync_fx import _C
from tests.support.computing import codec_reference as reference
from tests.support.computing.native_reference import SEEDS, STREAMS, vectors

native: Any = _C
every_isa = pytest.mark.parametrize("isa", _C.available_isas())
SIZES = st.one_of(st.integers(0, 300), st.integers(0, 300), st.integers(0, 9000))
BITS = st.sampled_from([2, 4, 8, 16])
UNITS = st.sampled_from([64, 128, 512, 8192])
NORMS, LAYOUTS = st.sampled_from(["max", "two"]), st.sampled_from(["sign", "endpoints"])
_EDGE = 4


class Guarded:
    """Buffer between two guard regions that detect writes out of bounds."""

    def __init__(self, nbytes: int) -> None:
        self._all = np.full(nbytes + 2 * _EDGE, 77, np.uint8)
        self.bytes = self._all[_EDGE : _EDGE + nbytes]
        self.address = self.bytes.ctypes.data

    def taken(self) -> NDArray[np.uint8]:
        assert (self._all[:_EDGE] == 77).all()
        assert (self._all[_EDGE + self.bytes.size :] == 77).all()
        return self.bytes.copy()


def encoded(nbytes: int, call: Callable[[int], None]) -> NDArray[np.uint8]:
    wire = Guarded(nbytes)
    call(wire.address)
    return wire.taken()


def decoded(
    n: int, call: Callable[[int], None], start: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    values = Guarded(4 * n)
    values.bytes.view(np.float32)[:] = 5 if start is None else start
    call(values.address)
    return values.taken().view(np.float32)


def same(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(actual, expected)


def qsgd(
    x: torch.Tensor,
    bits: int,
    unit: int,
    *encoder_arguments: Any,
    first: int = 0,
    threads: int = 1,
    isa: Any = None,
    rotated: bool = False,
) -> Any:
    n = x.numel()
    return encoded(
        native.qsgd_bytes(n, bits, unit, rotated),
        lambda wire: native.qsgd_encode(
            x.data_ptr(), wire, n, bits, unit, *encoder_arguments, first, threads, isa, rotated
        ),
    )


@every_isa
@settings(max_examples=30)
@given(
    data=st.data(),
    n=SIZES,
    bits=BITS,
    unit=UNITS,
    norm=NORMS,
    layout=LAYOUTS,
    seed=SEEDS,
    stream=STREAMS,
)
def test_qsgd(
    isa: str,
    data: st.DataObject,
    n: int,
    bits: int,
    unit: int,
    norm: str,
    layout: str,
    seed: int,
    stream: int,
) -> None:
    x = data.draw(vectors(n))
    first, threads = data.draw(st.sampled_from([0, 64, 2**31])), data.draw(st.integers(1, 4))
    wire = qsgd(x, bits, unit, norm, layout, seed, stream, first=first, threads=threads, isa=isa)
    np.testing.assert_array_equal(
        wire, reference.qsgd_encoded(x.numpy(), bits, unit, norm, layout, seed, stream, first)
    )
    expected = reference.qsgd_decoded(wire, n, bits, unit, layout)
    for add in (False, True):
        values = decoded(
            n,
            lambda y, add=add: native.qsgd_decode(
                wire.ctypes.data, y, n, bits, unit, layout, add, threads, isa
            ),
        )
        same(values, expected + np.float32(5) if add else expected)


@every_isa
@settings(max_examples=30)
@given(
    data=st.data(),
    n=SIZES,
    bits=BITS,
    unit=st.sampled_from([128, 256, 512, 1024, 2048, 4096]),
    norm=NORMS,
    layout=LAYOUTS,
    seed=SEEDS,
    stream=STREAMS,
)
def test_rotated_qsgd(
    isa: str,
    data: st.DataObject,
    n: int,
    bits: int,
    unit: int,
    norm: str,
    layout: str,
    seed: int,
    stream: int,
) -> None:
    x, threads = data.draw(vectors(n)), data.draw(st.integers(1, 4))
    first = data.draw(st.sampled_from([0, 4096, 2**31]))
    settings_of_code = bits, unit, norm, layout, seed, stream
    wire = qsgd(x, *settings_of_code, first=first, threads=threads, isa=isa, rotated=True)
    if not n:
        assert not wire.size
        return
    counter = reference.sign_counter(seed, first)
    blocks = reference.rotated(x.numpy(), unit, counter)
    coded = reference.qsgd_encoded(blocks, *settings_of_code, first)
    assert wire[:4].view(np.uint32) == counter
    np.testing.assert_array_equal(wire[4:], coded)
    blocks = reference.qsgd_decoded(coded, blocks.size, bits, unit, layout)
    expected = reference.rotated_back(blocks, unit, counter)[:n]
    for add in (False, True):
        values = decoded(
            n,
            lambda y, add=add: native.qsgd_decode(
                wire.ctypes.data, y, n, bits, unit, layout, add, threads, isa, rotated=True
            ),
        )
        same(values, expected + np.float32(5) if add else expected)


@every_isa
@settings(max_examples=25)
@given(data=st.data(), n=SIZES, unit=st.sampled_from([1, 3, 7, 64, 100, 512, 5000]))
def test_one_bit(isa: str, data: st.DataObject, n: int, unit: int) -> None:
    x, old, threads = (
        data.draw(vectors(n)),
        data.draw(vectors(n, finite=True)),
        data.draw(st.integers(1, 4)),
    )
    residual = Guarded(4 * n)
    residual.bytes.view(np.float32)[:] = old.numpy()
    nbytes = native.onebit_bytes(n, unit)
    wire = encoded(
        nbytes,
        lambda wire: native.onebit_encode(
            x.data_ptr(), residual.address, wire, n, unit, threads, isa
        ),
    )
    expected, remainder = reference.onebit_encoded(x.numpy(), old.numpy(), unit)
    same_means(wire, expected, -(-n // unit))
    same(residual.taken().view(np.float32), remainder)
    without = encoded(
        nbytes, lambda wire: native.onebit_encode(x.data_ptr(), 0, wire, n, unit, threads, isa)
    )
    same_means(
        without,
        reference.onebit_encoded(x.numpy(), np.zeros(n, np.float32), unit)[0],
        -(-n // unit),
    )
    values = reference.onebit_decoded(wire, n, unit)
    for add in (False, True):
        result = decoded(
            n,
            lambda y, add=add: native.onebit_decode(
                wire.ctypes.data, y, n, unit, add, threads, isa
            ),
        )
        same(result, values + np.float32(5) if add else values)


def same_means(actual: NDArray[np.uint8], expected: NDArray[np.uint8], units: int) -> None:
    """Compare means as numbers, with NaN equal to NaN, and signs as bits."""
    same(actual[: 8 * units].view(np.float32), expected[: 8 * units].view(np.float32))
    np.testing.assert_array_equal(actual[8 * units :], expected[8 * units :])


@every_isa
@settings(max_examples=25)
@given(
    data=st.data(),
    n=SIZES,
    bits=st.sampled_from(range(12, 36, 4)),
    partition=st.sampled_from([420, 1260, 13_440]),
)
def test_truncation(isa: str, data: st.DataObject, n: int, bits: int, partition: int) -> None:
    x, old, threads = (
        data.draw(vectors(n)),
        data.draw(vectors(n, finite=True)),
        data.draw(st.integers(1, 4)),
    )
    residual = Guarded(4 * n)
    residual.bytes.view(np.float32)[:] = old.numpy()
    nbytes = native.truncate_bytes(n, bits, partition)
    call = native.truncate_encode
    wire = encoded(
        nbytes,
        lambda wire: call(x.data_ptr(), residual.address, wire, n, bits, partition, threads, isa),
    )
    expected, remainder = reference.truncate_encoded(x.numpy(), old.numpy(), bits, partition)
    with np.errstate(all="ignore"):
        values = reference.truncated(x.numpy() + old.numpy(), bits)
    if not np.isnan(values).any():
        np.testing.assert_array_equal(wire, expected)
    same(residual.taken().view(np.float32), remainder)
    for add in (False, True):
        result = decoded(
            n,
            lambda y, add=add: native.truncate_decode(
                wire.ctypes.data, nbytes, y, n, add, threads, isa
            ),
        )
        same(result, values + np.float32(5) if add else values)


@given(data=st.data(), bits=BITS, unit=UNITS, layout=LAYOUTS, seed=SEEDS, cut=st.integers(0, 4))
def test_chunks_equal_the_full_tensor(
    data: st.DataObject, bits: int, unit: int, layout: str, seed: int, cut: int
) -> None:
    n, position = 4 * unit - 5, min(cut * unit, 4 * unit - 5)
    x = data.draw(vectors(n, finite=True))
    expected = reference.qsgd_decoded(
        qsgd(x, bits, unit, "max", layout, seed, 3), n, bits, unit, layout
    )
    parts = [
        reference.qsgd_decoded(
            qsgd(part, bits, unit, "max", layout, seed, 3, first=first),
            part.numel(),
            bits,
            unit,
            layout,
        )
        for part, first in ((x[:position], 0), (x[position:], position))
    ]
    same(np.concatenate(parts), expected)


@every_isa
@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("threads", [1, 2])
def test_long_messages_are_decoded_as_chunks(isa: str, shift: int, threads: int) -> None:
    """With `last`, stores to aligned addresses bypass the caches, and other stores do not."""
    n, unit = 2**19 + 77, 512
    x = torch.randn(n, generator=torch.Generator().manual_seed(1))
    room = torch.full((n + 64,), 5.0)
    begin = (-room.data_ptr() % 64 + shift) // 4
    values = room[begin : begin + n]
    assert values.data_ptr() % 64 == shift
    decodings: dict[str, tuple[Any, Callable[..., None]]] = {
        f"qsgd{bits}": (
            qsgd(x, bits, unit, "max", "sign", 1, 2, isa=isa),
            lambda wire, y, n, bits=bits: native.qsgd_decode(
                wire, y, n, bits, unit, "sign", False, threads, isa, True
            ),
        )
        for bits in (2, 4, 8, 16)
    }
    onebit = encoded(
        native.onebit_bytes(n, unit),
        lambda wire: native.onebit_encode(x.data_ptr(), 0, wire, n, unit, 1, isa),
    )
    decodings["1bit"] = (
        onebit,
        lambda wire, y, n: native.onebit_decode(wire, y, n, unit, False, threads, isa, True),
    )
    for name, (wire, decode) in decodings.items():
        added = torch.zeros(n)
        if name == "1bit":
            native.onebit_decode(wire.ctypes.data, added.data_ptr(), n, unit, True, 1, isa)
        else:
            native.qsgd_decode(
                wire.ctypes.data, added.data_ptr(), n, int(name[4:]), unit, "sign", True, 1, isa
            )
        decode(wire.ctypes.data, values.data_ptr(), n)
        assert torch.equal(values, added), name
        assert (room[:begin] == 5).all() and (room[begin + n :] == 5).all()


@every_isa
def test_denormals_do_not_depend_on_flushing(isa: str) -> None:
    x = torch.tensor([1e-39, -3e-40, 2e-45, 1e-38] * 32)
    expected = qsgd(x, 8, 64, "max", "sign", 1, 2, isa=isa)
    assert torch.set_flush_denormal(True)
    try:
        message = qsgd(x, 8, 64, "max", "sign", 1, 2, isa=isa)
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(message, expected)
    assert np.abs(reference.qsgd_decoded(message, 128, 8, 64, "sign")).max() == np.float32(1e-38)


def test_streams_and_steps_draw_other_numbers() -> None:
    x = torch.linspace(-1, 1, 4096)
    wires = {
        qsgd(x, 8, 512, "max", "sign", seed, stream, first=first).tobytes()
        for seed, stream, first in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 512))
    }
    assert len(wires) == 4


@pytest.mark.parametrize(
    "call",
    [
        lambda: native.qsgd_bytes(5, 3, 64),
        lambda: native.qsgd_bytes(5, 4, 100),
        lambda: native.qsgd_bytes(5, 4, 64, rotated=True),
        lambda: native.qsgd_encode(1, 1, 0, 4, 192, rotated=True),
        lambda: native.qsgd_decode(1, 1, 0, 4, 192, rotated=True),
        lambda: native.onebit_bytes(5, 0),
        lambda: native.truncate_bytes(5, 14, 420),
        lambda: native.truncate_bytes(5, 12, 100),
        lambda: native.qsgd_encode(0, 0, 5, 4, 64),
        lambda: native.qsgd_encode(1, 1, 0, 4, 64, "infinity"),
        lambda: native.qsgd_encode(1, 1, 64, 4, 64, first=2**32),
        lambda: native.qsgd_encode(1, 1, 0, 4, 64, isa="none"),
    ],
)
def test_invalid_arguments_are_errors(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        call()


@pytest.mark.parametrize("harm", ["level", "count", "cut", "more"])
def test_invalid_headers_are_errors_without_overflow(harm: str) -> None:
    x = torch.randn(1000)
    nbytes = native.truncate_bytes(1000, 12, 420)
    wire = encoded(
        nbytes, lambda wire: native.truncate_encode(x.data_ptr(), 0, wire, 1000, 12, 420)
    )
    headers = wire.view(np.uint32)
    size = nbytes - 8 if harm == "cut" else nbytes
    if harm == "level":
        headers[0] |= 7
    if harm == "count":
        headers[0] += 8
    values = Guarded(4000)
    n = 999 if harm == "more" else 1000
    with pytest.raises(ValueError, match="headers"):
        native.truncate_decode(wire.ctypes.data, size, values.address, n)
    values.taken()
