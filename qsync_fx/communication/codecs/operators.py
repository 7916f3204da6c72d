"""The codecs of gradients in torch operators, for devices that no kernel of ours is for: Inductor fuses them into kernels of the device.

A tensor is coded as rows, one a unit, the last of which may be shorter: what is missing there is zeros that are not sent.

Invariant: the same bytes as the kernels in cpp/codecs/kernels.cpp, and the same values of them, wherever a product and a sum are rounded
one after the other and a division as IEEE has it. Shapes follow from the number of values alone, so that nothing waits for the device.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

from qsync_fx.communication.codecs.codec import Draw

_LANES: Final = 16
_LOW: Final = 0xFFFFFFFF
_LARGEST: Final = torch.finfo(torch.float32).max
_QUIET: Final = 0x00400000
_EXPONENT: Final = 0x7F800000


def qsgd_encode(
    values: Tensor, bits: int, size: int, norm: Literal["max", "two"], layout: Literal["sign", "endpoints"], draw: Draw
) -> Tensor:
    """Returns the bytes of FP32 values, in units of `size`."""
    if not values.numel():
        return _bytes(values)
    rows = _rows(values, size)
    scale = _two_norm(rows) if norm == "two" else rows.abs().amax(1)
    finite = scale.isfinite()
    last = (1 << bits) - 1 if layout == "endpoints" else (1 << (bits - 1)) - 1
    before, _, moved = _moved(scale)
    # A number over a tensor is that number times the inverse of the tensor to torch, which rounds twice.
    inverse = torch.where(moved > 0, torch.full_like(moved, last) / moved, 0.0)
    r = _uniform(rows, draw)
    if layout == "endpoints":
        u = torch.where(finite[:, None], rows * before[:, None] * inverse[:, None] * 0.5 - 0.5, 0.0)
        code = (u.floor().int() + (1 << (bits - 1)) + (r < u - u.floor())).clamp(0, last)
    else:
        u = torch.where(finite[:, None], rows.abs() * before[:, None] * inverse[:, None], 0.0)
        code = (u.floor().int() + (r < u - u.floor())).clamp(max=last) | rows.signbit().int() << (bits - 1)
    code = torch.where(finite[:, None], code, 0)
    heads = torch.where(finite, scale, torch.nan)
    return torch.cat([_bytes(heads), _packed(code, bits, values.numel(), size)])


def qsgd_decode(wire: Tensor, n: int, bits: int, size: int, layout: Literal["sign", "endpoints"]) -> Tensor:
    """Returns n FP32 values."""
    if not n:
        return wire[:0].view(torch.float32)
    units = -(-n // size)
    scale = wire[: 4 * units].view(torch.float32)
    code = _unpacked(wire[4 * units :], bits, n, size)
    last = (1 << bits) - 1 if layout == "endpoints" else (1 << (bits - 1)) - 1
    _, after, moved = _moved(scale)
    step = moved / last
    # It was rounded up, and as many as there are would go beyond what FP32 holds.
    beyond = (after > 1) & (last * step * after > _LARGEST)
    step = torch.where(beyond, (step.view(torch.int32) - 1).view(torch.float32), step)[:, None]
    if layout == "endpoints":
        found = (2 * code - last).float() * step * after[:, None]
    else:
        found = (code & last).float() * step * after[:, None]
        found = torch.where(code >> (bits - 1) != 0, -found, found)
    return found.reshape(-1)[:n]


def onebit_encode(values: Tensor, residual: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Returns the bytes of values + residual, and what they leave of it."""
    if not (n := values.numel()):
        return _bytes(values), residual
    rows, old = _rows(values + residual, size), _rows(residual, size)
    valid = (torch.arange(rows.numel(), device=values.device) < n).view(rows.shape)
    up = (rows >= 0) & valid
    count = up.sum(1)
    others = valid.sum(1) - count
    above = _folded(torch.where(up, rows, 0.0))
    below = _folded(torch.where(valid & ~up, rows, 0.0))
    high = torch.where(count > 0, above / count, 0.0)
    low = torch.where(others > 0, below / others, 0.0)
    finite = (high.isfinite() & low.isfinite())[:, None]
    means = torch.where(finite, torch.stack([high, low], 1), torch.nan)
    left = torch.where(finite, rows - torch.where(up, high[:, None], low[:, None]), old)
    words = _fill(up.to(torch.uint8), 32).view(rows.shape[0], -1, 8)
    packed = (words << torch.arange(8, dtype=torch.uint8, device=values.device)).sum(2, dtype=torch.uint8)
    sent = n // size * (-(-size // 32) * 4) + -(-(n % size) // 32) * 4
    return torch.cat([_bytes(means.view(-1)), packed.view(-1)[:sent]]), left.reshape(-1)[:n]


def onebit_decode(wire: Tensor, n: int, size: int) -> Tensor:
    """Returns n FP32 values."""
    if not n:
        return wire[:0].view(torch.float32)
    units, words = -(-n // size), -(-size // 32) * 4
    means = wire[: 8 * units].view(torch.float32).view(units, 2)
    packed = torch.nn.functional.pad(wire[8 * units :], (0, 8 * units + units * words - wire.numel())).view(
        units, words, 1
    )
    up = (packed >> torch.arange(8, dtype=torch.uint8, device=wire.device) & 1).view(units, -1)[:, :size] != 0
    return torch.where(up, means[:, :1], means[:, 1:]).reshape(-1)[:n]


def truncated(values: Tensor, bits: int) -> Tensor:
    """Returns the highest bits of FP32 values as values: what `truncate_encode` sends of them."""
    word = values.view(torch.int32)
    kept = word & -(1 << (32 - bits))
    return torch.where((word & 0x7FFFFFFF) > _EXPONENT, kept | _QUIET, kept).view(torch.float32)


def truncate_encode(values: Tensor, bits: int, partition: int) -> Tensor:
    """Returns the bytes of FP32 values at one level, in partitions of so many bytes."""
    per = partition * 8 // bits
    whole = values.numel() // per * per
    parts = [values[:whole].view(-1, per)] if whole else []
    parts += [values[whole:].view(1, -1)] if whole < values.numel() else []
    return torch.cat([_planes(truncated(part, bits).view(torch.int32), bits) for part in parts] or [_bytes(values)])


def truncate_decode(wire: Tensor, n: int, bits: int, partition: int) -> Tensor:
    """Returns n FP32 values that were all sent at one level."""
    per, found = partition * 8 // bits, [wire.new_empty(0).view(torch.float32)]
    at = n // per * _partition_bytes(per, bits)
    if at:
        found.append(_joined(wire[:at].view(n // per, -1), per, bits))
    if n % per:
        found.append(_joined(wire[at:].view(1, -1), n % per, bits))
    return torch.cat(found)


def _rows(values: Tensor, size: int) -> Tensor:
    return _fill(values.view(1, -1), size).view(-1, size)


def _fill(rows: Tensor, by: int) -> Tensor:
    """Returns rows with zeros behind them, to a multiple of so many."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % by))


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _moved(scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what values are multiplied by before and after, and the scale between: neither it nor its inverse is denormal."""
    small, large = scale < 2.0**-64, scale > 2.0**64
    before = torch.where(small, 2.0**64, torch.where(large, 2.0**-64, 1.0))
    after = torch.where(small, 2.0**-64, torch.where(large, 2.0**64, 1.0))
    return before, after, scale * before


def _two_norm(rows: Tensor) -> Tensor:
    return _folded(rows.double().square()).sqrt().clamp(max=_LARGEST).float().where(rows.isfinite().all(1), torch.nan)


def _folded(rows: Tensor) -> Tensor:
    """Returns sums of rows as sixteen lanes make them: each from its first value to its last, then halves onto halves."""
    lanes = _fill(rows, _LANES).view(rows.shape[0], -1, _LANES)
    total = torch.zeros_like(lanes[:, 0])
    for at in range(lanes.shape[1]):
        total = total + lanes[:, at]
    while total.shape[1] > 1:
        low, high = total.chunk(2, 1)
        total = low + high
    return total.squeeze(1)


def _mix(word: Tensor) -> Tensor:
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D & _LOW
    word = word ^ (word >> 15)
    word = word * 0x846CA68B & _LOW
    return word ^ (word >> 16)


def _uniform(rows: Tensor, draw: Draw) -> Tensor:
    """Returns the random number of each value, in [0, 1): that of its index, as on the CPU, whatever the device."""
    seed = torch.tensor([draw.seed & _LOW, draw.seed >> 32, draw.stream + 0x9E3779B9 & _LOW], device=rows.device)
    key = _mix(seed[0] ^ _mix(seed[1] ^ _mix(seed[2])))
    index = torch.arange(rows.numel(), device=rows.device).view(rows.shape) + draw.first
    word = _mix((index & _LOW) * 0x9E3779B1 + _mix(key ^ (index >> 32)) & _LOW)
    return (word >> 8).float() * 2.0**-24


def _groups(size: int, bits: int) -> int:
    """Returns how many values a unit takes, filled up."""
    group = max(128 // bits, _LANES)
    return -(-size // group) * group


def _packed(code: Tensor, bits: int, n: int, size: int) -> Tensor:
    units, wide = code.shape[0], _groups(size, bits)
    code = torch.nn.functional.pad(code, (0, wide - size))
    if bits == 16:
        found = _bytes(code.to(torch.int16))
    else:
        shifts = torch.arange(8 // bits, device=code.device)[:, None] * bits
        found = (code.view(units, -1, 8 // bits, _LANES) << shifts).sum(2).to(torch.uint8)
    whole, rest = n // size, n % size
    return found.reshape(-1)[: (whole * wide + _groups(rest, bits)) * bits // 8]


def _unpacked(wire: Tensor, bits: int, n: int, size: int) -> Tensor:
    units, wide = -(-n // size), _groups(size, bits)
    padded = torch.nn.functional.pad(wire, (0, units * wide * bits // 8 - wire.numel()))
    if bits == 16:
        return (padded.view(torch.int16).int() & 0xFFFF).view(units, -1)[:, :size]
    shifts = torch.arange(8 // bits, device=wire.device)[:, None] * bits
    code = padded.view(units, -1, 1, _LANES).int() >> shifts & (1 << bits) - 1
    return code.view(units, -1)[:, :size]


def _partition_bytes(per: int, bits: int) -> int:
    return 4 + -(-(per * (bits // 8) + (-(-per // 2) if bits % 8 else 0)) // 4) * 4


def _planes(words: Tensor, bits: int) -> Tensor:
    """Returns the bytes of partitions, one a row."""
    rows, per = words.shape
    head = torch.tensor([per << 3 | (bits - 12) // 4], dtype=torch.int32, device=words.device).view(torch.uint8)
    planes = [head.expand(rows, 4), *((words >> 24 - 8 * k & 255).to(torch.uint8) for k in range(bits // 8))]
    if bits % 8:
        half = words >> 28 - bits // 8 * 8 & 15
        low, high = half[:, : -(-per // 2)], torch.nn.functional.pad(half[:, -(-per // 2) :], (0, per % 2))
        planes.append((low | high << 4).to(torch.uint8))
    return _fill(torch.cat(planes, 1), 4).view(-1)


def _joined(rows: Tensor, per: int, bits: int) -> Tensor:
    planes = rows[:, 4:].int()
    word = torch.zeros_like(planes[:, :per])
    for k in range(bits // 8):
        word = word | planes[:, k * per : (k + 1) * per] << 24 - 8 * k
    if bits % 8:
        both = planes[:, bits // 8 * per :][:, : -(-per // 2)]
        half = torch.cat([both & 15, both >> 4], 1)[:, :per]
        word = word | half << 28 - bits // 8 * 8
    return word.view(torch.float32).reshape(-1)
