"""Device model: constants from a TOML file, and predicted durations of operators.

Invariant: each prediction is a function of the constants in the file. Reading a file returns a
device with valid constants, or raises a `DeviceError` that names the problem, its location and a
remedy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, get_args

from qsync_fx.devices.format_support import ANY, row_at
from qsync_fx.devices.roofline import (
    FEATURES,
    ConvolutionSpec,
    FunctionalUnit,
    GemmShape,
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
        name: identifier.
        title: name for reports.
        kind: "gpu" or "cpu".
        source: origin of the constants.
        processors: multiprocessors of a GPU, cores of a CPU.
        clock: cycles per second under load.
        memory: constants of the memory.
        units: functional unit for products, by the name of the format's encoding.
        capability: compute capability of a GPU.
        calibrated_as: device of the catalog that provides missing fitted constants.
        products: constants of matrix products, by encoding.
        convolutions: constants of each product of a convolution, by encoding.
        reductions: measured all-reduces.
        link: interconnect to devices of the same kind.
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
        """Value of the option "target" for this device; None for a CPU, which needs none.

        It is the name, or the path of a file that no name finds. Profiles store it, because the
        catalog may be located elsewhere on the machine that reads them.
        """
        # device_catalog imports this module.
        from qsync_fx.devices.device_catalog import name_of

        if self.kind == "cpu":
            return None
        return name_of(self) or self.path or self.name

    def gemm_seconds(
        self, m: int, n: int, k: int, precision: str | Precision, layout: Layout = "nn"
    ) -> float:
        """Return the seconds of the product of an m x k and a k x n matrix.

        Args:
            precision: format of the operands.
            layout: which operand is transposed, in BLAS notation; see `Layout`.
        """
        _check(m=m, n=n, k=k)
        _one_of("layout", layout, LAYOUTS, "gemm_seconds")
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
            precision: format of the operands.
            product: forward output, input gradient or weight gradient.
        """
        down, across = _pair(stride)
        above, beside = _pair(padding)
        _check(n=n, c=c, h=h, w=w, k=k, r=r, s=s, **{"stride": down, "stride across": across})
        if min(above, beside) < 0:
            message = f"the padding is {min(above, beside)}, but must not be negative"
            raise DeviceError(message, where="conv_seconds", do="use a padding of 0 or more")
        if r > h + 2 * above or s > w + 2 * beside:
            raise DeviceError(
                f"the window of {r} x {s} is larger than the input of {h} x {w} with padding "
                f"{above}, {beside}",
                where="conv_seconds",
                do="use a smaller window, or a larger input or padding",
            )
        _one_of("product", product, PRODUCTS, "conv_seconds")
        sizes = (n, c, h, w, k, r, s, down, across, above, beside)
        return _convolution(self, sizes, self.unit(precision).name, product)

    def allreduce_seconds(self, nbytes: float, ranks: int) -> float:
        """Return the seconds of an all-reduce of `nbytes` bytes over devices in one server."""
        _check(ranks=ranks)
        _check_bytes(nbytes)
        result = reduced(self.reductions, self.link, nbytes, ranks)
        if result is None:
            raise DeviceError(
                f"the device file of {self.name} has no data on all-reduces",
                where=f"device {self.name}",
                do="add a table [link] with bandwidth and latency, or [[reductions]], to the file",
            )
        return result

    def memory_seconds(self, nbytes: float) -> float:
        """Return the seconds of an operator that reads and writes `nbytes` bytes in total."""
        _check_bytes(nbytes)
        return moved(self.memory, nbytes)

    def work_seconds(self, flops: float, nbytes: float, precision: str | Precision) -> float:
        """Return the seconds by the roofline model: maximum of compute time and memory time."""
        _check_bytes(flops, "flops")
        unit = self.unit(precision).name
        return max(self.memory_seconds(nbytes), flops / (self.units[unit].peak * _USUAL.efficiency))

    def cast_seconds(self, before: str | Precision, after: str | Precision, numel: int) -> float:
        """Return the seconds to cast or quantize `numel` values.

        Quantization to a scaled format reads the values twice, first for the scale.
        """
        _check_bytes(numel, "numel")
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
    """Return the vertical and the horizontal size."""
    return (size, size) if isinstance(size, int) else size


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise DeviceError(
                f"{name} is {size!r}, but must be a positive integer",
                where=f"the argument {name}",
                do="use an integer of 1 or more",
            )


def _one_of(description: str, value: str, available: Sequence[str], where: str) -> None:
    if value not in available:
        message, do = f"unknown {description} {value!r}", nearest(str(value), available)
        raise DeviceError(message, where=where, do=do)


def _check_bytes(size: float, name: str = "nbytes") -> None:
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size < float("inf"):
        raise DeviceError(
            f"{name} is {size!r}, but must be a finite number of 0 or more",
            where=f"the argument {name}",
            do="use a number of 0 or more",
        )


def constants(device: Device, unit: str) -> tuple[Device, str]:
    """Return the device and unit whose fitted constants apply to products of `unit`.

    They are searched on the device itself, then on the devices that it is calibrated as: first of
    the unit, then of another unit that is likewise narrower than 32 bits or not.

    Returns:
        The device itself and "" if no constants are found.
    """
    from qsync_fx.devices.device_catalog import get

    narrow = precision(unit).bits < 32
    current: Device = device
    visited: list[str] = []
    while True:
        if current.name in visited:
            raise DeviceError(
                f"the devices {' and '.join(visited)} refer to each other for their constants",
                where=f"device {device.name}",
                do="define the constants in one of their files",
            )
        visited.append(current.name)
        similar = [fmt for fmt in current.products if (precision(fmt).bits < 32) is narrow]
        for name in (unit, *similar):
            if name in current.products and name in current.convolutions:
                return current, name
        if not current.calibrated_as:
            return device, ""
        current = get(current.calibrated_as)


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


@functools.lru_cache(maxsize=65536)
def _convolution(device: Device, sizes: tuple[int, ...], unit: str, product: Product) -> float:
    source, name = constants(device, unit)
    fmt = precision(unit)
    fitted = source.convolutions.get(name, {})
    by = fitted.get(product) or fitted.get(PRODUCTS[0]) or _USUAL
    on, shape, width = device.machine(unit), GemmShape.of(*sizes), fmt.dtype.itemsize
    tensor_cores = device.kind == "gpu" and fmt is not FP32
    return float(convolved(by, on, shape, product, width, tensor_cores)[0])


_USUAL = ConvolutionSpec(
    efficiency=0.7,
    source="usual efficiency of libraries for matrix products; no fitted device of this kind",
)


def read(path: Path) -> Device:
    """Return the device that a file describes; raise `DeviceError` if the file is invalid."""
    return replace(DEVICE.load(path), path=str(path))


_EDGES = (32, 64, 128)


def _positive(value: Any, *names: str) -> str | None:
    for name in names:
        if not getattr(value, name) > 0:
            return f" has {name} = {getattr(value, name)}, which is not positive"
    return None


def _from_zero(value: Any, *names: str) -> str | None:
    for name in names:
        if not getattr(value, name) >= 0:
            return f" has {name} = {getattr(value, name)}, which is negative"
    return None


def _sourced(value: Any) -> str | None:
    if value.source.strip():
        return None
    return " does not name the origin of its constants (source)"


def _unknown(names: Iterable[str], available: Sequence[str] | Mapping[str, Any]) -> str | None:
    """Return the first unknown name in quotes, with the nearest available one."""
    for name in names:
        if name not in available:
            return f"{shown(name)}: {nearest(name[:40], available)}"
    return None


def _memory(memory: MemorySpec) -> str | None:
    if memory.fraction > 1:
        return f" has fraction = {memory.fraction}, which exceeds 1"
    return (
        _sourced(memory)
        or _positive(memory, "bytes", "bandwidth", "fraction")
        or _from_zero(memory, "cache", "cache_bandwidth", "launch", "host")
    )


def _unit(unit: FunctionalUnit) -> str | None:
    return _sourced(unit) or _positive(unit, "peak")


def _tiles(tiles: Tiles) -> str | None:
    if tiles.smallest not in _EDGES:
        return f" has smallest = {tiles.smallest}, which is not 32, 64 or 128"
    if not 0 < tiles.alone <= 1:
        return f" has alone = {tiles.alone}, which is not above 0 and at most 1"
    if tiles.overlap < 1:
        return f" has overlap = {tiles.overlap}, which is below 1"
    if wrong := _unknown(tiles.layouts, LAYOUTS):
        return f" has an unknown layout {wrong}"
    if any(not factor > 0 for factor in tiles.layouts.values()):
        return " has a layout with a factor that is not positive"
    return (
        _sourced(tiles)
        or _positive(tiles, "efficiency", "step", "splits", "memory", "misaligned", "alignment")
        or _from_zero(tiles, "small_tiles", "latency", "prologue")
        or _from_zero(tiles, "reduction", "launch", "throttle")
    )


def _parsed_convolution(by: ConvolutionSpec) -> str | None:
    if wrong := _unknown(by.corrections, FEATURES):
        return f" has a correction for an unknown feature {wrong}"
    for name, edges in (("pointwise", (0, *_EDGES)), ("winograd_smallest", _EDGES)):
        if getattr(by, name) not in edges:
            allowed = ", ".join(map(str, edges))
            return f" has {name} = {getattr(by, name)}, which is not one of {allowed}"
    inherited = {field.name for field in fields(Tiles)} | {"corrections"}
    owned = {field.name for field in fields(ConvolutionSpec)} - inherited
    return _tiles(by) or _positive(by, "places", "ordinary") or _from_zero(by, *sorted(owned))


def _reduction(reduction: ReductionSpec) -> str | None:
    index, seconds = reduction.bytes, reduction.seconds
    if len(index) != len(seconds) or not index:
        return f" has {len(index)} sizes but {len(seconds)} times"
    if reduction.ranks < 2:
        return f" has ranks = {reduction.ranks}, but needs at least 2"
    if index[0] <= 0 or any(a >= b for a, b in pairwise(index)):
        return " has sizes that are not positive and increasing"
    if seconds[0] <= 0 or any(a > b for a, b in pairwise(seconds)):
        return " has times that are not positive or decrease with the size"
    return _sourced(reduction)


def _link(link: LinkSpec) -> str | None:
    return _sourced(link) or _positive(link, "bandwidth") or _from_zero(link, "latency")


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
    for spec_field in ("units", "products", "convolutions"):
        if wrong := _unknown(getattr(device, spec_field), FORMATS):
            return f" has {spec_field} of an unknown format {wrong}"
    if "fp32" not in device.units:
        return " has no unit for fp32"
    if wrong := _unknown((p for by in device.convolutions.values() for p in by), PRODUCTS):
        return f" has convolutions with an unknown product {wrong}"
    return _sourced(device) or _positive(device, "processors", "clock")


DEVICE: Final = TomlSchema(
    Device,
    noun="device file",
    error=DeviceError,
    remedy="run 'qsync docs howto-device' for the fields of a device file",
    name=None,
    largest=2**20,
    smaller="describe one device per file",
    checks={
        MemorySpec: _memory,
        FunctionalUnit: _unit,
        Tiles: _tiles,
        ConvolutionSpec: _parsed_convolution,
        ReductionSpec: _reduction,
        LinkSpec: _link,
        Device: _device,
    },
)
"""Schema of a device file; `path` is no field of the file."""
