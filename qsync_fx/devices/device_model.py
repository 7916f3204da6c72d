"""Device model: constants from a TOML file, and predicted durations of operators.

Invariant: each prediction is a function of the constants in the file. Reading a file returns a
device with valid constants, or raises a `DeviceError` that names the problem, its location and a
remedy.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, get_args

from qsync_fx.devices.format_support import ANY, row_at
from qsync_fx.devices.roofline import (
    FEATURES,
    GemmShape,
    Layout,
    Product,
    RooflineMachine,
    convolved,
    moved,
    multiplied,
    reduced,
)
from qsync_fx.devices.spec import (
    ConvolutionSpec,
    FunctionalUnit,
    LinkSpec,
    MemorySpec,
    ReductionSpec,
    Tiles,
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
            tried = carrier if carrier is not tried else FP32
        return tried

    @property
    def target(self) -> str | None:
        """Value of the option "target" for this device; None for a CPU, which needs none.

        It is the name, or the path of a file that no name finds. Profiles store it, because the
        catalog may be located elsewhere on the machine that reads them.
        """
        # device_catalog imports this module.
        from qsync_fx.devices.device_catalog import name_of

        return None if self.kind == "cpu" else name_of(self) or self.path or self.name

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
        strides = (stride, stride) if isinstance(stride, int) else tuple(stride)
        around = (padding, padding) if isinstance(padding, int) else tuple(padding)
        _check(
            n=n, c=c, h=h, w=w, k=k, r=r, s=s, **{"stride": strides[0], "stride across": strides[1]}
        )
        if min(around) < 0:
            raise DeviceError(
                f"the padding is {min(around)}, but must not be negative",
                where="conv_seconds",
                do="use a padding of 0 or more",
            )
        if r > h + 2 * around[0] or s > w + 2 * around[1]:
            raise DeviceError(
                f"the window of {r} x {s} is larger than the input of {h} x {w} with padding "
                f"{around[0]}, {around[1]}",
                where="conv_seconds",
                do="use a smaller window, or a larger input or padding",
            )
        _one_of("product", product, PRODUCTS, "conv_seconds")
        return _convolution(
            self, (n, c, h, w, k, r, s, *strides, *around), self.unit(precision).name, product
        )

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
        return seconds + self.memory_seconds(read) if target.scaled else seconds

    def machine(self, unit: str) -> RooflineMachine:
        """Return the constants of this device for products of a unit's format."""
        return RooflineMachine(
            self.processors, self.clock, self.units[unit].peak, self.memory.bandwidth
        )


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
        raise DeviceError(
            f"unknown {description} {value!r}", where=where, do=nearest(str(value), available)
        )


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
    index: Device | None = device
    requested: list[str] = []
    while index is not None:
        if index.name in requested:
            raise DeviceError(
                f"the devices {' and '.join(requested)} refer to each other for their constants",
                where=f"device {device.name}",
                do="define the constants in one of their files",
            )
        requested.append(index.name)
        for name in (
            unit,
            *(other for other in index.products if (precision(other).bits < 32) is narrow),
        ):
            if name in index.products and name in index.convolutions:
                return index, name
        index = get(index.calibrated_as) if index.calibrated_as else None
    return device, ""


@functools.lru_cache(maxsize=65536)
def _gemm(device: Device, m: int, n: int, k: int, unit: str, layout: Layout) -> float:
    index, name = constants(device, unit)
    fmt = precision(unit)
    by = index.products[name] if name else _USUAL
    result = max(fmt.output.dtype.itemsize, fmt.dtype.itemsize) if fmt.kind == "float" else 4
    return float(
        multiplied(by, device.machine(unit), m, n, k, layout, fmt.dtype.itemsize, result)[0]
    )


@functools.lru_cache(maxsize=65536)
def _convolution(device: Device, sizes: tuple[int, ...], unit: str, product: Product) -> float:
    index, name = constants(device, unit)
    fmt = precision(unit)
    result = index.convolutions.get(name, {})
    by = result.get(product) or result.get(PRODUCTS[0]) or _USUAL
    tensor_cores = device.kind == "gpu" and fmt is not FP32
    return float(
        convolved(
            by,
            device.machine(unit),
            GemmShape.of(*sizes),
            product,
            fmt.dtype.itemsize,
            tensor_cores,
        )[0]
    )


_USUAL = ConvolutionSpec(
    efficiency=0.7,
    source="usual efficiency of libraries for matrix products; no fitted device of this kind",
)


def read(path: Path) -> Device:
    """Return the device that a file describes; raise `DeviceError` if the file is invalid."""
    return replace(DEVICE.load(path), path=str(path))


_EDGES = (32, 64, 128)


def _positive(value: Any, *names: str) -> str | None:
    wrong = next((name for name in names if not getattr(value, name) > 0), None)
    return (
        None if wrong is None else f" has {wrong} = {getattr(value, wrong)}, which is not positive"
    )


def _from_zero(value: Any, *names: str) -> str | None:
    wrong = next((name for name in names if not getattr(value, name) >= 0), None)
    return None if wrong is None else f" has {wrong} = {getattr(value, wrong)}, which is negative"


def _sourced(value: Any) -> str | None:
    return None if value.source.strip() else " does not name the origin of its constants (source)"


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
    if wrong := next((name for name in tiles.layouts if name not in LAYOUTS), None):
        return f" has an unknown layout {shown(wrong)}: {nearest(wrong[:40], LAYOUTS)}"
    if any(not factor > 0 for factor in tiles.layouts.values()):
        return " has a layout with a factor that is not positive"
    return (
        _sourced(tiles)
        or _positive(tiles, "efficiency", "step", "splits", "memory", "misaligned", "alignment")
        or _from_zero(
            tiles, "small_tiles", "latency", "prologue", "reduction", "launch", "throttle"
        )
    )


def _parsed_convolution(by: ConvolutionSpec) -> str | None:
    if wrong := next((name for name in by.corrections if name not in FEATURES), None):
        return (
            f" has a correction for an unknown feature {shown(wrong)}: "
            f"{nearest(wrong[:40], FEATURES)}"
        )
    for name, edges in (("pointwise", (0, *_EDGES)), ("winograd_smallest", _EDGES)):
        if getattr(by, name) not in edges:
            allowed = ", ".join(map(str, edges))
            return f" has {name} = {getattr(by, name)}, which is not one of {allowed}"
    owned = (
        {field.name for field in fields(ConvolutionSpec)}
        - {field.name for field in fields(Tiles)}
        - {"corrections"}
    )
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
    if (device.capability is None) is (device.kind == "gpu"):
        return (
            " has no capability, which a GPU needs"
            if device.kind == "gpu"
            else " has a capability, which only a GPU has"
        )
    if device.capability is not None and not (
        0 < device.capability[0] < 99 and 0 <= device.capability[1] < 10
    ):
        return (
            f" has an invalid capability = {list(device.capability)}; an example is [7, 5] for a T4"
        )
    for spec_field in ("units", "products", "convolutions"):
        if wrong := next(
            (name for name in getattr(device, spec_field) if name not in FORMATS), None
        ):
            return (
                f" has {spec_field} of an unknown format {shown(wrong)}: "
                f"{nearest(wrong[:40], FORMATS)}"
            )
    if "fp32" not in device.units:
        return " has no unit for fp32"
    if wrong := next(
        (p for by in device.convolutions.values() for p in by if p not in PRODUCTS), None
    ):
        return (
            f" has convolutions with an unknown product {shown(wrong)}: "
            f"{nearest(wrong[:40], PRODUCTS)}"
        )
    return _sourced(device) or _positive(device, "processors", "clock")


DEVICE: Final = TomlSchema(
    Device,
    noun="device file",
    error=DeviceError,
    remedy="see docs/howto-device.md for the fields of a device file",
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
