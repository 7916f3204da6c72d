"""Device model: constants from a TOML file, and predicted durations of operators.

Each prediction is a function of the constants in the file. Reading a file returns a device with
valid constants, or raises `DeviceError`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, get_args

from qsync_fx.devices.format_support import ANY, row_at
from qsync_fx.devices.roofline import (
    NO_HOST,
    ConvolutionSpec,
    FunctionalUnit,
    GemmShape,
    HostSpec,
    Layout,
    LinkSpec,
    MemorySpec,
    Product,
    ReductionSpec,
    RooflineMachine,
    Tiles,
    convolved,
    moved,
    multiplied,
    reduced,
)
from qsync_fx.errors import DeviceError, nearest, shown
from qsync_fx.formats import FORMATS, FP32, Precision, encoding, precision
from qsync_fx.serialization.schema import TomlSchema

PRODUCTS: tuple[Product, ...] = get_args(Product)
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True, eq=False)
class Device:
    """Device of the catalog, with a roofline cost model.

    Attributes:
        title: name for reports.
        source: origin of the constants.
        processors: multiprocessors of a GPU, cores of a CPU.
        clock: cycles per second under load.
        units: functional unit for products, by the name of the format's encoding.
        capability: compute capability of a GPU.
        calibrated_as: device of the catalog that provides missing fitted constants.
        products: constants of matrix products, by encoding.
        convolutions: constants of each product of a convolution, by encoding.
        link: interconnect to devices of the same kind.
        host: time in which the host issues work; by default it is never waited for.
        path: path of the device file; "" without one.
    """

    name: str
    title: str
    kind: Literal["gpu", "cpu"]
    source: str
    processors: int
    clock: float
    memory: MemorySpec
    units: Mapping[str, FunctionalUnit]
    capability: tuple[int, int] | None = None
    calibrated_as: str | None = None
    products: Mapping[str, Tiles] = field(default_factory=dict)
    convolutions: Mapping[str, Mapping[str, ConvolutionSpec]] = field(default_factory=dict)
    reductions: Sequence[ReductionSpec] = ()
    link: LinkSpec | None = None
    host: HostSpec = NO_HOST
    path: str = ""

    def __str__(self) -> str:
        return self.name

    def unit(self, fmt: str | Precision) -> Precision:
        """Return the format whose unit multiplies values of `fmt`: `fmt` or its compute dtype."""
        requested = precision(fmt)
        tried = encoding(requested)
        while tried.name not in self.units and tried is not FP32:
            carrier = encoding(row_at(self.capability or ANY, tried).carrier)
            if carrier is tried:
                return FP32
            tried = carrier
        return tried

    @property
    def target(self) -> str | None:
        """Value of the option "target": the name, or the path of a file; None for a CPU.

        Profiles store it, because the catalog may be elsewhere on the machine that reads them.
        """
        # device_catalog imports this module.
        from qsync_fx.devices.device_catalog import name_of

        if self.kind == "cpu":
            return None
        return name_of(self) or self.path or self.name

    def gemm_seconds(
        self, m: int, n: int, k: int, precision: str | Precision, layout: Layout = "nn"
    ) -> float:
        """Return the seconds of the product of an m x k and a k x n matrix of a precision."""
        _check(1, m=m, n=n, k=k)
        if layout not in LAYOUTS:
            raise DeviceError(f"unknown layout {layout!r}", do=nearest(str(layout), LAYOUTS))
        return _gemm(self, m, n, k, self.unit(precision).name, layout)

    def conv_seconds(
        self,
        n: int,
        c: int,
        h: int,
        w: int,
        k: int,
        r: int,
        s: int,
        stride: int | tuple[int, int],
        padding: int | tuple[int, int],
        precision: str | Precision,
        product: Product = "output",
    ) -> float:
        """Return the seconds of a convolution, or of one of its two gradients.

        Args:
            n, c, h, w: batch, channels, height and width of the input.
            k, r, s: output channels, height and width of the kernel window.
            stride, padding: one number, or (vertical, horizontal).
        """
        sizes = (n, c, h, w, k, r, s, *_pair(stride), *_pair(padding))
        return self.convolutions_seconds([sizes], precision, product)[0]

    def convolutions_seconds(
        self,
        sizes: Sequence[tuple[int, ...]],
        precision: str | Precision,
        product: Product = "output",
    ) -> list[float]:
        """Return the seconds of several convolutions, as `conv_seconds`.

        Sizes are n, c, h, w, k, r, s, vertical and horizontal stride, and vertical and horizontal
        padding. Many convolutions in one call are faster than one call for each.
        """
        if product not in PRODUCTS:
            raise DeviceError(f"unknown product {product!r}", do=nearest(str(product), PRODUCTS))
        for each in sizes:
            _check_convolution(each)
        if not sizes:
            return []
        return list(_convolutions(self, tuple(sizes), self.unit(precision).name, product))

    def allreduce_seconds(self, nbytes: float, ranks: int) -> float:
        """Return the seconds of an all-reduce of `nbytes` bytes over devices in one server."""
        _check(1, ranks=ranks)
        _check(0, nbytes=nbytes)
        result = reduced(self.reductions, self.link, nbytes, ranks)
        if result is None:
            message = f"the device file of {self.name} has no data on all-reduces"
            do = "add a table [link] with bandwidth and latency, or [[reductions]], to the file"
            raise DeviceError(message, where=f"device {self.name}", do=do)
        return result

    def memory_seconds(self, nbytes: float) -> float:
        """Return the seconds of an operator that reads and writes `nbytes` bytes in total."""
        _check(0, nbytes=nbytes)
        return moved(self.memory, nbytes)

    def work_seconds(self, flops: float, nbytes: float, precision: str | Precision) -> float:
        """Return the seconds by the roofline model: maximum of compute time and memory time."""
        _check(0, flops=flops)
        unit = self.unit(precision).name
        return max(self.memory_seconds(nbytes), flops / (self.units[unit].peak * _USUAL.efficiency))

    def cast_seconds(self, before: str | Precision, after: str | Precision, numel: int) -> float:
        """Return the seconds to cast or quantize `numel` values.

        Quantization to a scaled format reads the values twice, first for the scale.
        """
        _check(0, numel=numel)
        source, target = precision(before), precision(after)
        if encoding(source) is encoding(target) or not numel:
            return 0.0
        read = source.dtype.itemsize * numel
        seconds = self.memory_seconds(read + target.dtype.itemsize * numel)
        if target.scaled:
            seconds += self.memory_seconds(read)
        return seconds

    def machine(self, unit: str) -> RooflineMachine:
        """Return the constants of this device for products of a unit's format."""
        peak, bandwidth = self.units[unit].peak, self.memory.bandwidth
        return RooflineMachine(self.processors, self.clock, peak, bandwidth)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _check(least: int, **sizes: float) -> None:
    for name, size in sizes.items():
        if not least <= size < float("inf"):
            message = f"{name} is {size!r}, but must be a finite number of {least} or more"
            raise DeviceError(message, do=f"use {least} or more")


@functools.lru_cache(maxsize=1024)
def constants(device: Device, unit: str) -> tuple[Device, str]:
    """Return the device and unit whose fitted constants apply to products of `unit`.

    They are searched on the device itself, then on the devices that it is calibrated as: first of
    the unit, then of a similar unit. The device itself and "" if there are none.
    """
    from qsync_fx.devices.device_catalog import get

    narrow = precision(unit).bits < 32
    current, visited = device, [device.name]
    while True:
        similar = [fmt for fmt in current.products if (precision(fmt).bits < 32) is narrow]
        for name in (unit, *similar):
            if name in current.products and name in current.convolutions:
                return current, name
        if not current.calibrated_as:
            return device, ""
        current = get(current.calibrated_as)
        if current.name in visited:
            message = f"the devices {' and '.join(visited)} refer to each other for their constants"
            do = "define the constants in one of their files"
            raise DeviceError(message, where=f"device {device.name}", do=do)
        visited.append(current.name)


@functools.lru_cache(maxsize=65536)
def _gemm(device: Device, m: int, n: int, k: int, unit: str, layout: Layout) -> float:
    source, name = constants(device, unit)
    fmt = precision(unit)
    by = source.products.get(name, _USUAL)
    operand_bytes, result_bytes = fmt.dtype.itemsize, 4
    if fmt.kind == "float":
        result_bytes = max(fmt.output.dtype.itemsize, operand_bytes)
    on = device.machine(unit)
    return float(multiplied(by, on, m, n, k, layout, operand_bytes, result_bytes)[0])


def _check_convolution(sizes: tuple[int, ...]) -> None:
    n, c, h, w, k, r, s, down, across, above, left = sizes
    _check(1, n=n, c=c, h=h, w=w, k=k, r=r, s=s, stride=min(down, across))
    _check(0, padding=min(above, left))
    if r > h + 2 * above or s > w + 2 * left:
        message = f"the window of {r} x {s} is larger than the input of {h} x {w}"
        do = "use a smaller window, or a larger input or padding"
        raise DeviceError(f"{message} with padding {above}, {left}", do=do)


@functools.lru_cache(maxsize=4096)
def _convolutions(
    device: Device, sizes: tuple[tuple[int, ...], ...], unit: str, product: Product
) -> tuple[float, ...]:
    source, name = constants(device, unit)
    fmt = precision(unit)
    fitted = source.convolutions.get(name, {})
    by = fitted.get(product) or fitted.get(PRODUCTS[0]) or _USUAL
    shape = GemmShape.of(*zip(*sizes, strict=True))
    tensor_cores = device.kind == "gpu" and fmt is not FP32
    on, width = device.machine(unit), fmt.dtype.itemsize
    return tuple(convolved(by, on, shape, product, width, tensor_cores).tolist())


_USUAL = ConvolutionSpec(
    efficiency=0.7,
    source="usual efficiency of libraries for matrix products; no fitted device of this kind",
)


def read(path: Path) -> Device:
    """Return the device that a file describes; raise `DeviceError` if the file is invalid."""
    return replace(DEVICE.load(path), path=str(path))


_POSITIVE: Final = frozenset(
    "bytes bandwidth fraction peak efficiency step splits memory misaligned alignment alone places "
    "ordinary processors clock".split()
)
"""Constants that must be positive; others must not be negative."""
_LEAST: Final = {"overlap": 1, "ranks": 2}
_MOST: Final = {"fraction": 1, "alone": 1}
_ALLOWED: Final = {
    "smallest": (32, 64, 128),
    "winograd_smallest": (32, 64, 128),
    "pointwise": (0, 32, 64, 128),
}


def _check_constants(value: Any) -> str | None:
    """Return why a table of a device file is invalid; None if it is valid."""
    if not value.source.strip():
        return " does not name the origin of its constants (source)"
    for name, number in vars(value).items():
        if type(number) not in (int, float):
            continue
        constant = f" has {name} = {number}, which"
        if name in _POSITIVE and number <= 0:
            return f"{constant} is not positive"
        if number < _LEAST.get(name, 0):
            return f"{constant} is below {_LEAST.get(name, 0)}"
        if number > _MOST.get(name, number):
            return f"{constant} exceeds {_MOST[name]}"
        if number not in _ALLOWED.get(name, (number,)):
            return f"{constant} is not one of {', '.join(map(str, _ALLOWED[name]))}"
    return None


def _unknown(names: Iterable[str], available: Sequence[str] | Mapping[str, Any]) -> str | None:
    """Return the first unknown name in quotes, with the nearest available one."""
    for name in names:
        if name not in available:
            return f"{shown(name)}: {nearest(name[:40], available)}"
    return None


def _tiles(tiles: Tiles) -> str | None:
    if wrong := _unknown(tiles.layouts, LAYOUTS):
        return f" has an unknown layout {wrong}"
    if any(not factor > 0 for factor in tiles.layouts.values()):
        return " has a layout with a factor that is not positive"
    return _check_constants(tiles)


def _reduction(reduction: ReductionSpec) -> str | None:
    sizes, seconds = reduction.bytes, reduction.seconds
    if len(sizes) != len(seconds) or not sizes:
        return f" has {len(sizes)} sizes but {len(seconds)} times"
    if sizes[0] <= 0 or any(a >= b for a, b in pairwise(sizes)):
        return " has sizes that are not positive and increasing"
    if seconds[0] <= 0 or any(a > b for a, b in pairwise(seconds)):
        return " has times that are not positive or decrease with the size"
    return _check_constants(reduction)


def _device(device: Device) -> str | None:
    if device.path:
        return " has an unknown field 'path': remove it"
    if not device.name or not all(letter.isalnum() or letter in "-_." for letter in device.name):
        return f" has the name {shown(device.name)}: use only letters, digits, '-', '_' and '.'"
    if device.kind == "gpu" and device.capability is None:
        return " has no capability, which a GPU needs"
    if device.kind != "gpu" and device.capability is not None:
        return " has a capability, which only a GPU has"
    major, minor = device.capability or (1, 0)
    if not (0 < major < 99 and 0 <= minor < 10):
        return f" has an invalid capability = {[major, minor]}; an example is [7, 5] for a T4"
    for table in ("units", "products", "convolutions"):
        if wrong := _unknown(getattr(device, table), FORMATS):
            return f" has {table} of an unknown format {wrong}"
    if "fp32" not in device.units:
        return " has no unit for fp32"
    if wrong := _unknown((p for by in device.convolutions.values() for p in by), PRODUCTS):
        return f" has convolutions with an unknown product {wrong}"
    return _check_constants(device)


DEVICE: Final = TomlSchema(
    Device,
    noun="device file",
    error=DeviceError,
    remedy="run 'qsync docs howto-device' for the fields of a device file",
    name=None,
    largest=2**20,
    smaller="describe one device per file",
    checks={
        **dict.fromkeys((MemorySpec, FunctionalUnit, LinkSpec, HostSpec), _check_constants),
        **dict.fromkeys((Tiles, ConvolutionSpec), _tiles),
        ReductionSpec: _reduction,
        Device: _device,
    },
)
"""Schema of a device file; `path` is no field of the file."""
