"""From a file of TOML, which anyone may have written, to a device.

Invariant: whatever the bytes, reading ends in a device whose constants make sense, or in a `DeviceError` that says what is wrong, where in
the file, and what to do.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from qsync_fx.codec.toml import TomlSchema
from qsync_fx.devices.analytic.convolutions import FEATURES
from qsync_fx.devices.constants import Convolution, Link, Memory, Reduction, Tiles, Unit
from qsync_fx.devices.device import LAYOUTS, PRODUCTS, Device
from qsync_fx.errors import DeviceError, nearest, shown
from qsync_fx.precision import FORMATS


def read(path: Path) -> Device:
    """Returns the device that a file describes; raises `DeviceError`."""
    return replace(DEVICE.load(path), path=str(path))


_EDGES = (32, 64, 128)


def _positive(value: Any, *names: str) -> str | None:
    wrong = next((name for name in names if not getattr(value, name) > 0), None)
    return None if wrong is None else f" has {wrong} = {getattr(value, wrong)}, which is to be above 0"


def _from_zero(value: Any, *names: str) -> str | None:
    wrong = next((name for name in names if not getattr(value, name) >= 0), None)
    return None if wrong is None else f" has {wrong} = {getattr(value, wrong)}, which is to be 0 or more"


def _sourced(value: Any) -> str | None:
    return None if value.source.strip() else " does not say where its constants come from (source)"


def _memory(memory: Memory) -> str | None:
    if memory.fraction > 1:
        return f" has fraction = {memory.fraction}: nothing is faster than the bandwidth"
    return (
        _sourced(memory)
        or _positive(memory, "bytes", "bandwidth", "fraction")
        or _from_zero(memory, "cache", "cache_bandwidth", "launch", "host")
    )


def _unit(unit: Unit) -> str | None:
    return _sourced(unit) or _positive(unit, "peak")


def _tiles(tiles: Tiles) -> str | None:
    if tiles.smallest not in _EDGES:
        return f" has smallest = {tiles.smallest}: tiles have an edge of at least 32, 64 or 128"
    if not 0 < tiles.alone <= 1:
        return f" has alone = {tiles.alone}, which is to be above 0, and 1 at most"
    if tiles.overlap < 1:
        return f" has overlap = {tiles.overlap}, which is to be 1 or more"
    if wrong := next((name for name in tiles.layouts if name not in LAYOUTS), None):
        return f" has a layout {shown(wrong)}: {nearest(wrong[:40], LAYOUTS)}"
    if any(not factor > 0 for factor in tiles.layouts.values()):
        return " has a layout that takes no time"
    return (
        _sourced(tiles)
        or _positive(tiles, "efficiency", "step", "splits", "memory", "misaligned", "alignment")
        or _from_zero(tiles, "small_tiles", "latency", "prologue", "reduction", "launch", "throttle")
    )


def _convolution(by: Convolution) -> str | None:
    if wrong := next((name for name in by.corrections if name not in FEATURES), None):
        return f" corrects by {shown(wrong)}: {nearest(wrong[:40], FEATURES)}"
    for name, edges in (("pointwise", (0, *_EDGES)), ("winograd_smallest", _EDGES)):
        if getattr(by, name) not in edges:
            return f" has {name} = {getattr(by, name)}: tiles have an edge of at least 32, 64 or 128"
    own = {field.name for field in fields(Convolution)} - {field.name for field in fields(Tiles)} - {"corrections"}
    return _tiles(by) or _positive(by, "places", "ordinary") or _from_zero(by, *sorted(own))


def _reduction(reduction: Reduction) -> str | None:
    at, seconds = reduction.bytes, reduction.seconds
    if len(at) != len(seconds) or not at:
        return f" has {len(at)} sizes and {len(seconds)} times"
    if reduction.ranks < 2:
        return f" has ranks = {reduction.ranks}: it takes two"
    if at[0] <= 0 or any(a >= b for a, b in pairwise(at)):
        return " has sizes that do not grow from above 0"
    if seconds[0] <= 0 or any(a > b for a, b in pairwise(seconds)):
        return " has times that fall as sizes grow, or are 0"
    return _sourced(reduction)


def _link(link: Link) -> str | None:
    return _sourced(link) or _positive(link, "bandwidth") or _from_zero(link, "latency")


def _device(device: Device) -> str | None:
    if device.path:
        return " has an unknown field 'path': leave it out"
    if not device.name or not all(letter.isalnum() or letter in "-_." for letter in device.name):
        return f" has the name {shown(device.name)}: letters, digits, '-', '_' and '.' make one"
    if (device.capability is None) is (device.kind == "gpu"):
        return " is a GPU's exactly where it has a compute capability"
    if device.capability is not None and not (0 < device.capability[0] < 99 and 0 <= device.capability[1] < 10):
        return f" has capability = {list(device.capability)}: [7, 5] is that of a T4"
    for field in ("units", "products", "convolutions"):
        if wrong := next((name for name in getattr(device, field) if name not in FORMATS), None):
            return f" has {field} of {shown(wrong)}: {nearest(wrong[:40], FORMATS)}"
    if "fp32" not in device.units:
        return " has no unit for fp32"
    if wrong := next((p for by in device.convolutions.values() for p in by if p not in PRODUCTS), None):
        return f" has convolutions with a product {shown(wrong)}: {nearest(wrong[:40], PRODUCTS)}"
    return _sourced(device) or _positive(device, "processors", "clock")


DEVICE: Final = TomlSchema(
    Device,
    noun="device file",
    error=DeviceError,
    remedy="see docs/howto-device.md for what a device file holds",
    name=None,
    largest=2**20,
    smaller="a device takes a page",
    checks={
        Memory: _memory,
        Unit: _unit,
        Tiles: _tiles,
        Convolution: _convolution,
        Reduction: _reduction,
        Link: _link,
        Device: _device,
    },
)
"""Such a file. Its path is its own: a file does not say it."""
