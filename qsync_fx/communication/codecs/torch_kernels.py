"""Gradient codecs as torch operators, for devices without native kernels; the host never waits.

A tensor is coded as rows, one for each unit; the last row is padded with zeros that are not sent.
Invariant: the bytes and values of cpp/codecs/kernels.cpp, even if a compiler contracts FP32 (FMA).
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch import Tensor

from qsync_fx.communication.codecs import hadamard
from qsync_fx.communication.codecs.codec import Draw
from qsync_fx.torch_internals import maybe_mark_dynamic

Norm = Literal["max", "two"]
Layout = Literal["sign", "endpoints"]
_failed: Final[list[str]] = []


def fused(function: Callable[..., Any], rows: Tensor, wanted: bool = True) -> Callable[..., Any]:
    """Return `function`, compiled if `rows` is on a GPU; its first arguments have as many rows."""
    # A single row is little work, and Dynamo would specialize for it.
    is_worthwhile = rows.device.type == "cuda" and wanted and rows.shape[0] > 1
    if not is_worthwhile or _failed or torch.compiler.is_compiling():
        return function
    return functools.partial(run, function)


def run(function: Callable[..., Any], *value: Any) -> Any:
    """Return `function(*value)`, fused if possible; the tensors are the first arguments."""
    tensors = [value for value in value if isinstance(value, Tensor)]
    try:
        return _compiled(function, value[len(tensors) :])(*tensors)
    except Exception as error:  # noqa: BLE001  any compiler failure: run eagerly
        if not _failed:
            reason = next(iter(str(error).splitlines()), "")
            _failed.append(reason)
            text = "gradients on the GPU are encoded by unfused operators, several times slower, "
            text += f"because Inductor failed ({type(error).__name__}: {reason}). "
            warnings.warn(f"{text}Install the Triton version of this torch", stacklevel=2)
        return function(*value)


@functools.cache
def _compiled(function: Any, others: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a function compiled for any number of rows, specialized for the other arguments."""
    # Dynamo makes integers symbolic that differ between calls of a code with the same name, and
    # soon has too many. A separate name for each set of arguments avoids this.
    name = f"{function.__name__} of {others}"
    owned = types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
    inner: Any = torch.compile(owned, fullgraph=True)

    def called(*tensors: Tensor) -> Any:
        for tensor in tensors:
            if tensor.shape[0] > 1:
                maybe_mark_dynamic(tensor, 0)
        return inner(*tensors, *others)

    return called


_LANES: Final = 16
_FOLDED: Final = 128  # largest unit whose order of summation is unrolled for the compiler
_LOW: Final = 0xFFFFFFFF
_WEYL: Final = 0x9E3779B1
_SIGNS: Final = 0x48414441  # random stream of signs, the same for all streams of values
_LARGEST: Final = torch.finfo(torch.float32).max


def qsgd_encode(
    values: Tensor,
    bits: int,
    size: int,
    norm: Norm,
    layout: Layout,
    draw: Draw,
    rotated: bool = False,
) -> Tensor:
    """Return the bytes of FP32 values, in units of `size`, transformed first if `rotated`."""
    if not (n := values.numel()):
        return _bytes(values)
    rows, start = _rows(values, size), _start(draw, values.device)
    if rotated:
        heads, packed = fused(rotated_rows, rows)(rows, start, bits, norm, layout)
        signs = start[0, 2:].to(torch.int32)
        return torch.cat([_bytes(signs), _bytes(heads), packed.reshape(-1)])
    heads, packed = fused(qsgd_rows, rows)(rows, start, bits, norm, layout)
    full, rest = n // size, n % size
    sent = (full * _groups(size, bits) + _groups(rest, bits)) * bits // 8
    return torch.cat([_bytes(heads), packed.reshape(-1)[:sent]])


def rotated_rows(
    rows: Tensor, start: Tensor, bits: int, norm: Norm, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return the same as `qsgd_rows`, for transformed rows."""
    rows = hadamard.transform(rows, _negative(rows, start[0, 2]))
    return qsgd_rows(rows, start, bits, norm, layout)


def qsgd_rows(
    rows: Tensor, start: Tensor, bits: int, norm: Norm, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return scales [units], FP32, and codes [units, bytes], uint8, of rows [units, size], FP32.

    `start` [1, 3], int64, is the key of the random numbers, the index of the first value, and the
    counter of its sign.
    """
    scale = _two_norm(rows) if norm == "two" else rows.abs().amax(1)
    finite = scale.isfinite()
    last = _largest_code(bits, layout)
    before, _, moved = _moved(scale)
    inverse = torch.where(moved > 0, _over(torch.full_like(moved, last), moved), 0.0)
    if layout == "endpoints":
        u = torch.where(finite[:, None], rows * before[:, None] * inverse[:, None] * 0.5 - 0.5, 0.0)
        code = (_rounded(u, start) + (1 << (bits - 1))).clamp(0, last)
    else:
        u = torch.where(finite[:, None], rows.abs() * before[:, None] * inverse[:, None], 0.0)
        code = _rounded(u, start).clamp(max=last) | rows.signbit().int() << (bits - 1)
    code = torch.where(finite[:, None], code, 0)
    return torch.where(finite, scale, torch.nan), _packed(code, bits)


def qsgd_decode(
    wire: Tensor, n: int, bits: int, size: int, layout: Layout, rotated: bool = False
) -> Tensor:
    """Return n FP32 values."""
    if not n:
        return wire[:0].view(torch.float32)
    signs, wire = wire[:4].view(torch.int32), wire[4:] if rotated else wire
    units, wide = -(-n // size), _groups(size, bits) * bits // 8
    scale, packed = wire[: 4 * units].view(torch.float32), _padded(wire[4 * units :], units, wide)
    result: Tensor
    if rotated:
        result = fused(rotated_values, packed)(scale, packed, signs, bits, size, layout)
    else:
        result = fused(qsgd_values, packed)(scale, packed, bits, size, layout)
    return result.reshape(-1)[:n]


def rotated_values(
    scale: Tensor, packed: Tensor, signs: Tensor, bits: int, size: int, layout: Layout
) -> Tensor:
    """Return the same as `qsgd_values`, transformed back; `signs` [1], int32, is their counter."""
    rows = qsgd_values(scale, packed, bits, size, layout)
    return hadamard.inverse(rows, _negative(rows, signs[0].long()))


def rotated(values: Tensor, size: int, draw: Draw) -> Tensor:
    """Return the transform of FP32 values, padded with zeros, as blocks [blocks, size]."""
    rows = _rows(values, size)
    return hadamard.transform(rows, _negative(rows, _start(draw, values.device)[0, 2]))


def qsgd_values(scale: Tensor, packed: Tensor, bits: int, size: int, layout: Layout) -> Tensor:
    """Return the values of units, [units, size], FP32, from scales [units] and codes."""
    code = _unpacked(packed, bits, size)
    last = _largest_code(bits, layout)
    _, after, moved = _moved(scale)
    step = _over(moved, last)
    # A step that was rounded up would overflow FP32 at the largest code.
    beyond = (after > 1) & (last * step * after > _LARGEST)
    step = torch.where(beyond, (step.view(torch.int32) - 1).view(torch.float32), step)[:, None]
    if layout == "endpoints":
        level, negative = (2 * code - last).abs(), 2 * code < last
    else:
        level, negative = code & last, code >> (bits - 1) != 0
    result = level.float() * step * after[:, None]
    # Signs are set as bits, so that a compiler cannot contract the product with an addition.
    sign = torch.where(negative, torch.iinfo(torch.int32).min, 0).to(torch.int32)
    return (result.view(torch.int32) ^ sign).view(torch.float32)


def _largest_code(bits: int, layout: str) -> int:
    return (1 << {"sign": bits - 1, "endpoints": bits}[layout]) - 1


def onebit_encode(values: Tensor, residual: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the bytes of `values + residual`, and the new error feedback."""
    if not (n := values.numel()):
        return _bytes(values), residual
    rows, old = _rows(values, size), _rows(residual, size)
    count = torch.full((1,), n, device=values.device)
    means, packed, left = fused(onebit_rows, rows, size <= _FOLDED)(rows, old, count)
    sent = n // size * (-(-size // 32) * 4) + -(-(n % size) // 32) * 4
    return torch.cat([_bytes(means.view(-1)), packed.reshape(-1)[:sent]]), left.reshape(-1)[:n]


def onebit_rows(value: Tensor, old: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return means [units, 2], signs [units, bytes], uint8, and error feedback [units, size].

    `value` and `old`, the feedback, are [units, size], FP32; `n` [1] counts values without padding.
    """
    rows = value + old
    valid = (torch.arange(rows.numel(), device=rows.device) < n).view(rows.shape)
    up = (rows >= 0) & valid
    count = up.sum(1)
    others = valid.sum(1) - count
    above = _folded(torch.where(up, rows, 0.0))
    below = _folded(torch.where(valid & ~up, rows, 0.0))
    high = torch.where(count > 0, _over(above, count), 0.0)
    low = torch.where(others > 0, _over(below, others), 0.0)
    finite = (high.isfinite() & low.isfinite())[:, None]
    means = torch.where(finite, torch.stack([high, low], 1), torch.nan)
    left = torch.where(finite, rows - torch.where(up, high[:, None], low[:, None]), old)
    words = _fill(up.to(torch.uint8), 32).view(rows.shape[0], -1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
    return means, (words << shifts).sum(2, dtype=torch.uint8), left


def onebit_decode(wire: Tensor, n: int, size: int) -> Tensor:
    """Return n FP32 values."""
    if not n:
        return wire[:0].view(torch.float32)
    units, words = -(-n // size), -(-size // 32) * 4
    means = wire[: 8 * units].view(torch.float32).view(units, 2)
    packed = _padded(wire[8 * units :], units, words)
    result: Tensor = fused(onebit_values, packed, size <= _FOLDED)(means, packed, size)
    return result.reshape(-1)[:n]


def onebit_values(means: Tensor, packed: Tensor, size: int) -> Tensor:
    """Return the values of units, [units, size], FP32, from means [units, 2] and packed signs."""
    bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
    return torch.where(bits.view(packed.shape[0], -1)[:, :size] != 0, means[:, :1], means[:, 1:])


def _rows(values: Tensor, size: int) -> Tensor:
    return _fill(values.view(1, -1), size).view(-1, size)


def _padded(packed: Tensor, units: int, nbytes: int) -> Tensor:
    """Return the codes of units as rows of `nbytes`, with zeros for those that are not sent."""
    missing = units * nbytes - packed.numel()
    return torch.nn.functional.pad(packed, (0, missing)).view(units, nbytes)


def _fill(rows: Tensor, by: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, missing)) if (missing := -rows.shape[1] % by) else rows


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _moved(scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return factors before encoding and after decoding, and a scale that is not denormal."""
    small, large = scale < 2.0**-64, scale > 2.0**64
    before = torch.where(small, 2.0**64, torch.where(large, 2.0**-64, 1.0))
    after = torch.where(small, 2.0**-64, torch.where(large, 2.0**64, 1.0))
    return before, after, scale * before


def _two_norm(rows: Tensor) -> Tensor:
    norm = _folded(rows.double().square()).sqrt().clamp(max=_LARGEST).float()
    return norm.where(rows.isfinite().all(1), torch.nan)


def _folded(rows: Tensor) -> Tensor:
    """Return row sums in the order of the native kernels: sixteen lanes, then pairwise halves."""
    lanes = _fill(rows, _LANES).view(rows.shape[0], -1, _LANES)
    total = torch.zeros_like(lanes[:, 0])
    for index in range(lanes.shape[1]):
        total = total + lanes[:, index]
    while total.shape[1] > 1:
        low, high = total.chunk(2, 1)
        total = low + high
    return total.squeeze(1)


def _mix(word: Any) -> Any:
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D & _LOW
    word = word ^ (word >> 15)
    word = word * 0x846CA68B & _LOW
    return word ^ (word >> 16)


def _start(draw: Draw, device: torch.device) -> Tensor:
    key, signs = _key(draw.seed, draw.stream), _mix(_key(draw.seed, _SIGNS))
    signs = signs + draw.first // 32 * _WEYL & _LOW
    signed = (signs ^ 0x80000000) - 0x80000000  # as int32
    return torch.tensor([[key, draw.first, signed]], device=device)


def _key(seed: int, stream: int) -> Any:
    return _mix(seed & _LOW ^ _mix(seed >> 32 ^ _mix(stream + 0x9E3779B9 & _LOW)))


def _negative(rows: Tensor, counter: Tensor) -> Tensor:
    """Return which values the transform negates: a bit of a random word for each 32 values."""
    index = torch.arange(rows.numel(), device=rows.device).view(rows.shape)
    word = _mix((index >> 5) * _WEYL + counter & _LOW)
    result: Tensor = word >> (index & 31) & 1 != 0
    return result


def _rounded(u: Tensor, start: Tensor) -> Tensor:
    """Round `u` stochastically by the index of each value, equally on all devices."""
    # A value rounds up if its 24-bit random number is below its fraction. The comparison uses
    # integers, because a compiler may contract a float difference with the product before it.
    index = torch.arange(u.numel(), device=u.device).view(u.shape) + start[0, 1]
    word = _mix((index & _LOW) * _WEYL + _mix(index >> 32 ^ start[0, 0]) & _LOW)
    rounded: Tensor = (u * 2.0**24).ceil().long() + 0xFFFFFF - (word >> 8) >> 24
    return rounded.int()


def _over(x: Tensor, y: Tensor | float) -> Tensor:
    """Return FP32 quotients with IEEE rounding, unlike those of compilers for GPUs."""
    return (x.double() / y).float()


def _groups(size: int, bits: int) -> int:
    group = max(128 // bits, _LANES)
    return -(-size // group) * group


def _packed(code: Tensor, bits: int) -> Tensor:
    code = _fill(code, _groups(1, bits))
    if bits == 16:
        return _bytes(code.to(torch.int16))
    shifts = torch.arange(8 // bits, device=code.device)[:, None] * bits
    words = code.view(code.shape[0], -1, 8 // bits, _LANES) << shifts
    return words.sum(2).to(torch.uint8).view(code.shape[0], -1)


def _unpacked(packed: Tensor, bits: int, size: int) -> Tensor:
    if bits == 16:
        return (packed.view(torch.int16).int() & 0xFFFF)[:, :size]
    shifts = torch.arange(8 // bits, device=packed.device)[:, None] * bits
    code = packed.view(packed.shape[0], -1, 1, _LANES).int() >> shifts & (1 << bits) - 1
    return code.view(packed.shape[0], -1)[:, :size]
