"""Tile-based roofline model: durations of products, convolutions, copies and all-reduces.

`tiled` models a matrix product computed tile by tile, and `convolved` a convolution as implicit
matrix products, or in FP32 as Winograd's algorithm if that is faster. Durations are positive
seconds. Sizes may be arrays of one length, so that many products are evaluated at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class MemorySpec:
    """Constants of a device's memory.

    Attributes:
        bytes: capacity.
        bandwidth: bytes per second, from the data sheet.
        fraction: of the bandwidth that sequential access reaches.
        cache: bytes of the largest cache that all processors share.
        cache_bandwidth: bytes per second of this cache.
        launch: seconds of the smallest kernel.
        host: bytes per second to the host and back, each; 0 if the device is the host.
    """

    bytes: int
    bandwidth: float
    source: str
    fraction: float = 0.8
    cache: int = 0
    cache_bandwidth: float = 0.0
    launch: float = 5e-6
    host: float = 0.0


@dataclass(frozen=True)
class FunctionalUnit:
    """Unit for products of one format; `peak` is in operations per second, 2 per multiply-add."""

    peak: float
    source: str


@dataclass(frozen=True)
class Tiles:
    """Efficiency of a library's tiled kernels for products of one format.

    Attributes:
        efficiency: fraction of the unit's peak that tiles of 128 x 128 reach.
        small_tiles: exponent of the efficiency of a smaller tile in its relative edge.
        smallest: edge of the smallest tile.
        step: values of k per step of a tile.
        latency: minimum cycles per value of k of a 64 x 64 tile on an idle device.
        alone: fraction of its rate that a processor reaches with a single tile.
        tallest: whether tiles are as tall as m requires, up to 128, instead of the fastest.
        prologue: start and end of a tile, in values of k.
        splits: maximum number of parts of k (split-k).
        reduction: memory traffic of the partial sums; 1 is one write and one read.
        memory: fraction of the memory bandwidth that tiles reach.
        overlap: exponent p in (compute^p + memory^p)^(1/p); 1 is no overlap.
        launch: seconds of overhead of a kernel launch.
        throttle: relative growth of time per e-fold beyond a millisecond by power throttling.
        misaligned: factor if rows of the first operand are not aligned.
        alignment: in values.
        layouts: factor if the first ("tn") or second ("nt") operand is transposed (BLAS).
    """

    efficiency: float
    source: str
    small_tiles: float = 0.4
    smallest: int = 32
    step: int = 32
    latency: float = 40.0
    alone: float = 1.0
    tallest: bool = False
    prologue: float = 100.0
    splits: int = 32
    reduction: float = 1.0
    memory: float = 0.8
    overlap: float = 3.0
    launch: float = 4e-6
    throttle: float = 0.0
    misaligned: float = 1.0
    alignment: int = 1
    layouts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ConvolutionSpec(Tiles):
    """Efficiency of a library's kernels for one of the three products of a convolution.

    Attributes:
        gather: relative slowdown of tiles that gather a window of more than one value.
        pointwise: edge of the smallest tile for 1 x 1 windows; 0 for `smallest`.
        relayout: memory passes over input and output to change their layout; in FP32, over the
            input gradient of a strided convolution to zero skipped positions.
        weights: additional memory passes over the weights, for gradient sums and layout changes.
        strided: exponent of the saving of a 1 x 1 input gradient with a stride; 1 skips all values.
        places: multiple to which weight gradients pad the output positions of an image.
        ordinary: fraction of an eighth of the tensor-core peak, for gradients whose padding is as
            large as the window.
        floor: minimum seconds to start the kernels.
        winograd: fraction of `efficiency` of Winograd products with separate transforms, in patches
            of 4 x 4; 0 if unused.
        winograd_fused: the same with fused transforms, in patches of 2 x 2.
        winograd_smallest: edge of the smallest tile of Winograd products with separate transforms.
        winograd_data, winograd_weights: memory passes over transformed data and weights.
    """

    gather: float = 0.0
    pointwise: int = 0
    relayout: float = 0.0
    weights: float = 0.0
    strided: float = 1.0
    places: int = 1
    ordinary: float = 0.4
    floor: float = 0.0
    winograd: float = 0.0
    winograd_fused: float = 0.0
    winograd_smallest: int = 64
    winograd_data: float = 1.0
    winograd_weights: float = 1.0


@dataclass(frozen=True)
class ReductionSpec:
    """Measured all-reduces of `ranks` devices of one server; tensor sizes in `bytes` ascend."""

    ranks: int
    bytes: Sequence[float]
    seconds: Sequence[float]
    source: str


@dataclass(frozen=True)
class LinkSpec:
    """Interconnect of devices without measured all-reduces: `latency` is seconds per ring step."""

    bandwidth: float
    latency: float
    source: str


@dataclass(frozen=True)
class HostSpec:
    """Time that the host needs to issue the work of a compiled step to a GPU.

    A GPU that computes faster than this waits for its host.

    Attributes:
        step: seconds per step in which the GPU waits, for guards and the call of compiled code.
        launch: seconds per operator: Python of the compiled code, and the launch of its kernels.
        call: additional seconds of an operator of ours, which a Python function launches.
    """

    step: float
    launch: float
    call: float
    source: str

    def issued(self, seconds: float, launches: int, calls: int = 0) -> float:
        """Return the longer of the seconds of work on the GPU and on its host."""
        return max(seconds, launches * self.launch + calls * self.call)


NO_HOST = HostSpec(0.0, 0.0, 0.0, "not known: the GPU never waits for its host")


Numbers = NDArray[np.float64]

_EDGES = [(256, 128), (128, 256), *itertools.product((128, 64, 32), repeat=2)]
_SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
_TALLEST = 128
_AREA_AT_ONCE = 32768.0
"""Result values that one processor accumulates at once, limited by its registers."""


@dataclass(frozen=True)
class RooflineMachine:
    """Hardware that computes the tiles: rates per second, `peak` of all processors together."""

    processors: int
    clock: float
    peak: float
    bandwidth: float


def tiled(
    by: Tiles,
    on: RooflineMachine,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    moved: ArrayLike,
    slower: ArrayLike = 1.0,
    efficiency: float = 1.0,
    smallest: int | None = None,
) -> Numbers:
    """Return the seconds of m x k by k x n products, without launch time.

    The result is cut into tiles and k into parts, which processors compute in waves. The time of a
    tile is its multiplications at the rate of the unit, or the latency of its steps if too few
    tiles share a processor. Memory traffic overlaps with this. The fastest tile size and number of
    parts are assumed, as a library would select.

    Args:
        moved: bytes that are read and written once.
        slower, efficiency: factors on the time of each tile, and on its efficiency.
        smallest: edge of the smallest tile; by default from the constants.
    """
    m, n, k, moved, slower = (_column(value) for value in (m, n, k, moved, slower))
    least = smallest or by.smallest
    edges = np.array([edge for edge in _EDGES if min(edge) >= least], dtype=float)
    rows, columns = edges[:, 0][:, None], edges[:, 1][:, None]
    parts = np.array([float(split) for split in _SPLITS if split <= by.splits])
    area = rows * columns
    relative = 2 * area / (rows + columns) / 128.0
    reached = by.efficiency * np.minimum(relative**by.small_tiles, 1.1) * efficiency
    busy = 2 * area / (on.peak / on.processors * reached) * slower
    idle = np.maximum(by.latency * (area / 4096.0) ** 0.25 / on.clock * slower, busy / by.alone)
    at_once = np.clip(np.floor(_AREA_AT_ONCE / area), 1, 8)
    tiles = np.ceil(m / rows) * np.ceil(n / columns) * parts
    waves = np.floor(tiles / (on.processors * at_once))
    last = np.ceil((tiles - waves * on.processors * at_once) / on.processors)
    steps = np.ceil(k / parts / by.step) * by.step + by.prologue
    computing = (
        waves * np.maximum(at_once * busy, idle)
        + np.where(last > 0, np.maximum(last * busy, idle), 0.0)
    ) * steps
    sums = np.where(parts > 1, 2 * parts * m * n * 4.0 * by.reduction, 0.0)
    memory = (moved + sums) / (on.bandwidth * by.memory)
    both = (computing**by.overlap + memory**by.overlap) ** (1 / by.overlap)
    both = both + np.where(parts > 1, by.launch / 2, 0.0)
    if by.tallest:
        both = np.where(rows == np.clip(2 ** np.ceil(np.log2(m)), least, _TALLEST), both, np.inf)
    result: Numbers = both.min((1, 2))
    return result


def throttled(by: Tiles, seconds: Numbers) -> Numbers:
    """Return the durations of work whose clock falls by power throttling as it lasts longer."""
    return np.asarray(seconds * (1 + by.throttle * np.log1p(seconds / 1e-3)))


def _column(value: Any) -> Numbers:
    return np.atleast_1d(np.asarray(value, dtype=float))[:, None, None]


Layout = Literal["nn", "tn", "nt"]
"""Transposed operands in BLAS notation (column-major matrices).

For a linear layer the output is "tn", the input gradient "nn", and the weight gradient "nt".
"""


def multiplied(
    by: Tiles,
    on: RooflineMachine,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    layout: str | Sequence[str],
    width: int,
    result: int,
) -> Numbers:
    """Return the seconds of m x k by k x n products of one layout, or one per product.

    `width` and `result` are the bytes per value of the operands and of the result.
    """
    layouts = [layout] if isinstance(layout, str) else layout
    m, n, k = (np.atleast_1d(np.asarray(side, dtype=float)) for side in (m, n, k))
    moved = (m * k + k * n) * width + m * n * result
    # Rows of a first operand that is not transposed start m values apart.
    odd = (m % by.alignment > 0) & np.array([item[0] == "n" for item in layouts])
    slower = np.array([by.layouts.get(item, 1.0) for item in layouts])
    seconds = tiled(by, on, m, n, k, moved, slower * np.where(odd, by.misaligned, 1.0))
    return throttled(by, seconds) + by.launch


Product = Literal["output", "input_gradient", "weight_gradient"]


@dataclass(frozen=True)
class GemmShape:
    """Sizes of convolutions as in `Device.conv_seconds`, as arrays of one length.

    The last four are vertical and horizontal stride, and vertical and horizontal padding.
    """

    n: Numbers
    c: Numbers
    h: Numbers
    w: Numbers
    k: Numbers
    r: Numbers
    s: Numbers
    down: Numbers
    across: Numbers
    above: Numbers
    left: Numbers

    @classmethod
    def of(cls, *sizes: ArrayLike) -> GemmShape:
        """Return shapes from these sizes, in the order of the fields."""
        return cls(*(np.atleast_1d(np.asarray(size, dtype=float)) for size in sizes))

    def at(self, where: NDArray[np.bool_]) -> GemmShape:
        """Return the shapes that a mask selects."""
        return GemmShape(*(getattr(self, field.name)[where] for field in fields(self)))

    @property
    def high(self) -> Numbers:
        """Height of the output."""
        return np.asarray(np.floor((self.h + 2 * self.above - self.r) / self.down) + 1)

    @property
    def wide(self) -> Numbers:
        """Width of the output."""
        return np.asarray(np.floor((self.w + 2 * self.left - self.s) / self.across) + 1)

    @property
    def places(self) -> Numbers:
        """Positions of the output, over the batch."""
        return self.n * self.high * self.wide

    @property
    def window(self) -> Numbers:
        return self.r * self.s

    @property
    def skipped(self) -> Numbers:
        """Input positions per output position: product of the strides."""
        return self.down * self.across

    @property
    def input(self) -> Numbers:
        """Number of values of the input."""
        return self.n * self.c * self.h * self.w

    @property
    def weights(self) -> Numbers:
        return self.k * self.c * self.window

    @property
    def output(self) -> Numbers:
        """Number of values of the output."""
        return self.places * self.k


def moved(by: MemorySpec, size: float) -> float:
    """Return the seconds to read and write `size` bytes, at least a kernel launch."""
    seconds = size / (by.bandwidth * by.fraction)
    if by.cache_bandwidth:
        cached = min(size, by.cache)
        seconds = (size - cached) / (by.bandwidth * by.fraction) + cached / by.cache_bandwidth
    return max(by.launch, seconds)


def reduced(
    measured: Sequence[ReductionSpec], link: LinkSpec | None, size: float, ranks: int
) -> float | None:
    """Return the seconds of an all-reduce over devices of one server; None if unknown.

    Measurements for the nearest number of devices are scaled as for a ring.
    """
    if ranks == 1 or size == 0:
        return 0.0
    if measured:
        nearest = min(measured, key=lambda item: (abs(math.log(item.ranks / ranks)), item.ranks))
        scaled = size * share(ranks) / share(nearest.ranks)
        return float(interpolated(nearest.bytes, nearest.seconds, scaled))
    if link is None:
        return None
    return 2 * (ranks - 1) * link.latency + share(ranks) * size / link.bandwidth


def share(ranks: int) -> float:
    """Return the bytes that each rank sends per byte that it contributes to a ring all-reduce."""
    return 2 * (ranks - 1) / ranks


def interpolated(
    sizes: Sequence[float] | Numbers, seconds: Sequence[float] | Numbers, size: ArrayLike
) -> Numbers:
    """Interpolate linearly in log-log space; constant below the range, proportional above it."""
    points, times = np.append(sizes, 2 * sizes[-1]), np.append(seconds, 2 * seconds[-1])
    within = np.maximum(size, points[0])
    right = np.minimum(np.searchsorted(points, within, side="right"), len(points) - 1)
    along = np.log(within / points[right - 1]) / np.log(points[right] / points[right - 1])
    return np.asarray(times[right - 1] * (times[right] / times[right - 1]) ** along)


_FEWEST = 16
"""Minimum input and output channels for Winograd's algorithm."""
_BATCH = 16
"""Smallest batch with separate transforms."""


def winograd(by: ConvolutionSpec, on: RooflineMachine, of: GemmShape, product: Product) -> Numbers:
    """Return the seconds of convolutions by Winograd's algorithm; infinity if it does not apply.

    It applies to 3 x 3 and 5 x 5 windows with stride 1. Patches of 4 x 4 outputs use separate
    transform kernels, whose results go through memory. For 3 x 3 windows, except for the weight
    gradient, patches of 2 x 2 outputs are transformed inside the multiplying kernel.
    """
    result = np.full(len(of.n), np.inf)
    square = (of.r == of.s) & ((of.r == 3) | (of.r == 5))
    serves = (of.skipped == 1) & square & (np.minimum(of.c, of.k) >= _FEWEST)
    if not by.winograd or not serves.any():
        return result
    fusing = (of.r == 3) & (product != "weight_gradient") & (by.winograd_fused > 0)
    some = of.at(serves)
    # A small batch is never slower than the smallest batch with separate transforms.
    batch = np.where(fusing[serves], np.maximum(some.n, _BATCH), some.n)
    result[serves] = _transformed(by, on, replace(some, n=batch), product, fused=False)
    if (index := serves & fusing).any():
        seconds = _transformed(by, on, of.at(index), product, fused=True)
        result[index] = np.minimum(result[index], seconds)
    return result


def _transformed(
    by: ConvolutionSpec, on: RooflineMachine, of: GemmShape, product: Product, fused: bool
) -> Numbers:
    """Return the seconds with separate transforms of 4 x 4 outputs, or fused ones of 2 x 2."""
    edge, block, tile, efficiency = 4.0, 4.0, by.winograd_smallest, by.winograd
    if fused:
        edge, block, tile, efficiency = 2.0, 8.0, 32, by.winograd_fused
    blocks = of.n * np.ceil(of.high / block) * np.ceil(of.wide / block)
    patches, values = blocks * (block / edge) ** 2, (edge + of.r - 1) ** 2
    data, filters = (of.k + of.c) * patches * values * 4.0, of.k * of.c * values * 4.0
    m, n, k = {
        "output": (of.k, patches, of.c),
        "input_gradient": (of.c, patches, of.k),
        "weight_gradient": (of.k, of.c, patches),
    }[product]
    moved = 4.0 * (of.input + of.output + of.weights) if fused else data + filters
    # Each value of a transformed patch has one product; all are computed together.
    n = np.ceil(n / tile) * tile * values
    seconds = tiled(by, on, m, n, k, moved, efficiency=efficiency, smallest=tile)
    around = (4.0 * of.weights + filters) * by.winograd_weights
    if not fused:
        around = around + (4.0 * (of.input + of.output) + data) * by.winograd_data
        seconds = seconds + 2 * by.launch
    return np.asarray(seconds + around / (on.bandwidth * by.memory))


def convolved(
    by: ConvolutionSpec,
    on: RooflineMachine,
    shape: GemmShape,
    product: Product,
    width: int,
    tensor_cores: bool,
) -> Numbers:
    """Return the seconds of one product of convolutions.

        product          m             n                     k
        output           out channels  output positions      in channels * window
        input_gradient   in channels   input positions       out channels * window
        weight_gradient  out channels  in channels * window  output positions

    With tensor cores, channels are padded to a multiple of `step`, and in weight gradients to a
    multiple of the tile edge.
    """
    inputs, written, weights = shape.input * width, shape.output * width, shape.weights * width
    gradient = product == "input_gradient"
    # A stride skips rows of the input; skipped values within a row are read with the others.
    read = inputs if gradient else inputs * np.minimum(1.0, shape.r / shape.down)
    seconds = _direct(by, on, shape, product, read + written + weights, tensor_cores)
    bandwidth = on.bandwidth * by.memory
    if tensor_cores:
        seconds = seconds + by.relayout * (read + written) / bandwidth
    elif gradient:
        seconds = seconds + by.relayout * np.where(shape.skipped > 1, inputs, 0.0) / bandwidth
    seconds = seconds + by.weights * weights / bandwidth
    if tensor_cores and product != "output":
        # Tensor-core kernels do not support a padding as large as the window; ordinary units run at
        # an eighth of their rate.
        ordinary = 2 * shape.output * shape.c * shape.window / (on.peak / 8 * by.ordinary)
        seconds = seconds + np.where(shape.above >= shape.r, ordinary, 0.0)
    if not tensor_cores:
        seconds = np.minimum(seconds, winograd(by, on, shape, product))
    seconds = throttled(by, seconds) + by.launch
    return np.asarray((seconds**_SHARP + by.floor**_SHARP) ** (1 / _SHARP))


_SHARP = 8


def _direct(
    by: ConvolutionSpec,
    on: RooflineMachine,
    of: GemmShape,
    product: Product,
    moved: Numbers,
    tensor_cores: bool,
) -> Numbers:
    sides = (*_sides(by, of, product, tensor_cores), moved)
    pointwise = of.window == 1
    seconds = np.zeros(len(moved))
    for index, smallest, slower in (
        (pointwise, by.pointwise or by.smallest, 1.0),
        (~pointwise, by.smallest, 1 + by.gather),
    ):
        if index.any():
            m, n, k, size = (side[index] for side in sides)
            seconds[index] = tiled(by, on, m, n, k, size, slower, smallest=smallest)
    return seconds


def _sides(
    by: ConvolutionSpec, of: GemmShape, product: Product, tensor_cores: bool
) -> tuple[Numbers, Numbers, Numbers]:
    def stepped(channels: Numbers, step: Numbers | int) -> Numbers:
        return np.asarray(np.ceil(channels / step) * step) if tensor_cores else channels

    if product == "output":
        return of.k, of.places, stepped(of.c, by.step) * of.window
    if product == "weight_gradient":
        # An image of one channel has the layout that tensor cores need, and a kernel of its own.
        tile = np.where(of.c == 1, by.step, by.smallest)
        places = of.n * np.ceil(of.high * of.wide / by.places) * by.places
        return of.k, stepped(of.c, tile) * of.window, places
    pointwise = of.window == 1
    places = np.where(pointwise, of.places * of.skipped ** (1 - by.strided), of.n * of.h * of.w)
    window = np.ceil(of.r / of.down) * np.ceil(of.s / of.across)
    return of.c, places, stepped(of.k, by.step) * window
