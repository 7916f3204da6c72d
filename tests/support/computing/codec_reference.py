"""Reference of the gradient codecs in numpy: the encoding of each byte in a message."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.support.computing.native_reference import mix, uniform

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
_LANES = 16


def _units(x: Floats, unit: int) -> list[Floats]:
    return [x[start : start + unit] for start in range(0, x.size, unit)]


def _folded(lanes: NDArray[np.floating]) -> np.floating:
    """Return the sum of sixteen lanes, by repeated addition of halves."""
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return lanes[0]


def _summed(x: NDArray[np.floating]) -> np.floating:
    """Return the sum over sixteen lanes, each summed in order."""
    rows = np.concatenate([x, np.zeros(-x.size % _LANES, x.dtype)]).reshape(-1, _LANES)
    lanes = np.zeros(_LANES, x.dtype)
    for row in rows:
        lanes = lanes + row
    return _folded(lanes)


def _scaling(
    scale: np.float32, levels: int
) -> tuple[np.float32, np.float32, np.float32, np.float32]:
    """Return the factors before and after rounding, the inverse of the step, and the step."""
    f = np.float32
    before, after = (f(2.0**64), f(2.0**-64)) if scale < 2.0**-64 else (f(1), f(1))
    if scale > 2.0**64:
        before, after = f(2.0**-64), f(2.0**64)
    moved = scale * before
    step = moved / f(levels)
    if scale > 2.0**64 and np.isinf(f(levels) * step * after):
        step = np.nextafter(step, f(0))
    return before, after, f(levels) / moved if moved > 0 else f(0), step


@np.errstate(all="ignore")
def qsgd_encoded(
    x: Floats, bits: int, unit: int, norm: str, layout: str, seed: int, stream: int, first: int = 0
) -> Bytes:
    scales, codes = [], []
    last = 2**bits - 1 if layout == "endpoints" else 2 ** (bits - 1) - 1
    group = max(128 // bits, 16)
    for index, values in enumerate(_units(x, unit)):
        padded = np.concatenate([values, np.zeros(-values.size % group, np.float32)])
        if not np.isfinite(values).all():
            scales.append(np.float32(np.nan))
            codes.append(np.zeros(padded.size, np.uint16))
            continue
        scale = np.abs(values).max()
        if norm == "two":
            total = np.sqrt(_summed(values.astype(np.float64) ** 2))
            scale = np.float32(min(total, np.finfo(np.float32).max))
        before, _, inverse, _ = _scaling(scale, last)
        r = uniform(padded.size, seed, stream, first + index * unit)
        if layout == "endpoints":
            u = padded * before * inverse * np.float32(0.5) - np.float32(0.5)
            point = np.floor(u) + 2 ** (bits - 1) + (r < u - np.floor(u))
            code = point.clip(0, last).astype(np.uint16)
        else:
            u = np.abs(padded) * before * inverse
            level = (np.floor(u) + (r < u - np.floor(u))).clip(max=last)
            code = level.astype(np.uint16) | np.signbit(padded).astype(np.uint16) << (bits - 1)
        scales.append(scale)
        codes.append(code)
    heads = np.array(scales, np.float32).view(np.uint32)
    heads[(heads & 0x7FFFFFFF) > 0x7F800000] = 0x7FC00000
    return np.concatenate([heads.view(np.uint8), *(_packed(code, bits) for code in codes)])


def _packed(codes: NDArray[np.uint16], bits: int) -> Bytes:
    if bits == 16:
        return codes.view(np.uint8)
    groups = codes.reshape(-1, 8 // bits, _LANES)
    return (
        sum((groups[:, k] << (k * bits) for k in range(8 // bits)), np.uint16(0))
        .astype(np.uint8)
        .reshape(-1)
    )


@np.errstate(all="ignore")
def qsgd_decoded(wire: Bytes, n: int, bits: int, unit: int, layout: str) -> Floats:
    last = 2**bits - 1 if layout == "endpoints" else 2 ** (bits - 1) - 1
    scales = wire[: 4 * -(-n // unit)].view(np.float32)
    offset, units = scales.nbytes, []
    for index, scale in enumerate(scales):
        size = min(unit, n - index * unit)
        group = max(128 // bits, 16)
        nbytes = -(-size // group) * group * bits // 8
        part = wire[offset : offset + nbytes]
        offset += nbytes
        if bits == 16:
            code = part.view(np.uint16).astype(np.int32)
        else:
            rows = part.reshape(-1, 1, _LANES) >> (
                np.arange(8 // bits, dtype=np.uint8)[:, None] * bits
            )
            code = (rows & (2**bits - 1)).reshape(-1).astype(np.int32)
        _, after, _, step = _scaling(scale, last)
        if layout == "endpoints":
            value = (2 * code - last).astype(np.float32) * step * after
        else:
            value = (code & last).astype(np.float32) * step * after
            value = np.where(code >> (bits - 1), -value, value)
        units.append(value[:size])
    return np.concatenate([*units, np.empty(0)]).astype(np.float32)


_SIGNS = 0x48414441
_WEYL = np.uint32(0x9E3779B1)


@np.errstate(all="ignore")
def sign_counter(seed: int, first: int) -> np.uint32:
    """Return the counter of the random word for the sign of value `first`, a multiple of 32."""
    word = np.array([_SIGNS], np.uint32) + np.uint32(0x9E3779B9)
    key = mix(np.uint32(seed % 2**32) ^ mix(np.uint32(seed >> 32) ^ mix(word)))
    return (mix(key) + np.uint32(first // 32) * _WEYL)[0]


@np.errstate(all="ignore")
def _negated(blocks: Floats, counter: np.uint32) -> Floats:
    """Return values with random signs; 32 consecutive values share a random word."""
    index = np.arange(blocks.size, dtype=np.uint32)
    words = mix(counter + index // np.uint32(32) * _WEYL)
    negative = (words >> index % np.uint32(32)) & np.uint32(1)
    return np.where(negative.reshape(blocks.shape), -blocks, blocks)


def _stage(blocks: Floats, stride: int) -> Floats:
    pairs = blocks.reshape(len(blocks), -1, 2, stride)
    low, high = pairs[:, :, 0], pairs[:, :, 1]
    return np.stack([low + high, low - high], 2).reshape(blocks.shape)


@np.errstate(all="ignore")
def rotated(x: Floats, unit: int, counter: np.uint32) -> Floats:
    """Return the randomized Hadamard transform of units; the last unit is padded with zeros."""
    blocks = np.concatenate([x, np.zeros(-x.size % unit, np.float32)]).reshape(-1, unit)
    blocks, stride = _negated(blocks, counter), 1
    while stride < unit:
        blocks, stride = _stage(blocks, stride), 2 * stride
    return blocks.reshape(-1)


@np.errstate(all="ignore")
def rotated_back(y: Floats, unit: int, counter: np.uint32) -> Floats:
    """Return the inverse of `rotated`."""
    blocks, stride = y.reshape(-1, unit), unit // 2
    while stride:
        blocks, stride = _stage(blocks, stride), stride // 2
    return _negated(blocks * np.float32(1 / unit), counter).reshape(-1)


@np.errstate(all="ignore")
def onebit_encoded(x: Floats, residual: Floats, unit: int) -> tuple[Bytes, Floats]:
    """Return the message of x + residual and the new error feedback."""
    means, words, rest = [], [], []
    for values, old in zip(_units(x, unit), _units(residual, unit), strict=True):
        v = values + old
        up = v >= 0
        sums = _summed(np.where(up, v, np.float32(0))), _summed(np.where(up, np.float32(0), v))
        high = sums[0] / np.float32(up.sum()) if up.any() else np.float32(0)
        low = sums[1] / np.float32((~up).sum()) if (~up).any() else np.float32(0)
        finite = np.isfinite(high) and np.isfinite(low)
        means += [high, low] if finite else [np.float32(np.nan)] * 2
        rest.append(v - np.where(up, high, low) if finite else old)
        padded = np.concatenate([up, np.zeros(-up.size % 32, bool)])
        words.append(np.packbits(padded, bitorder="little"))
    return np.concatenate([np.array(means, np.float32).view(np.uint8), *words]), np.concatenate(
        [*rest, np.empty(0)]
    ).astype(np.float32)


def onebit_decoded(wire: Bytes, n: int, unit: int) -> Floats:
    units = -(-n // unit)
    means = wire[: 8 * units].view(np.float32).reshape(units, 2)
    offset, decoded = 8 * units, [np.empty(0, np.float32)]
    for index in range(units):
        size = min(unit, n - index * unit)
        nbytes = -(-size // 32) * 4
        up = np.unpackbits(wire[offset : offset + nbytes], bitorder="little")[:size].astype(bool)
        decoded.append(np.where(up, means[index, 0], means[index, 1]))
        offset += nbytes
    return np.concatenate(decoded)


@np.errstate(all="ignore")
def truncated(x: Floats, bits: int) -> Floats:
    words = x.view(np.uint32)
    nan = np.isnan(x)
    result = words & np.uint32(2**32 - 2 ** (32 - bits)) | np.where(
        nan, np.uint32(0x00400000), np.uint32(0)
    )
    return result.view(np.float32)


@np.errstate(all="ignore")
def truncate_encoded(
    x: Floats, residual: Floats, bits: int, partition: int
) -> tuple[Bytes, Floats]:
    """Return the message of x + residual and the new error feedback."""
    v = x + residual
    sent = truncated(v, bits)
    parts = [np.empty(0, np.uint8)]
    for values in _units(sent, partition * 8 // bits):
        words = values.view(np.uint32)
        head = np.array([values.size << 3 | (bits - 12) // 4], np.uint32).view(np.uint8)
        planes = [(words >> (24 - 8 * k)).astype(np.uint8) for k in range(bits // 8)]
        if bits % 8:
            half = words >> (28 - bits // 8 * 8) & 15
            low, high = half[: -(-half.size // 2)], half[-(-half.size // 2) :]
            planes.append(
                (
                    low | np.concatenate([high, np.zeros(low.size - high.size, np.uint32)]) << 4
                ).astype(np.uint8)
            )
        payload = np.concatenate(planes)
        parts += [head, payload, np.zeros(-payload.size % 4, np.uint8)]
    return np.concatenate(parts), np.where(np.isfinite(sent), v - sent, residual).astype(np.float32)
