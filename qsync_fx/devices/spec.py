"""Constants of a catalog device, as its TOML file specifies them.

Efficiencies are fractions and latencies are cycles, so constants fitted on one device apply to
related devices with other peaks and clocks.

Invariant: every group of constants names its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


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
    """Unit that multiplies values of one format.

    Attributes:
        peak: operations per second; a multiply-add counts as 2.
    """

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
        relayout: memory passes over input and output to change their layout. For the input gradient
            of a strided convolution in FP32: passes over that gradient to zero skipped positions.
        weights: additional memory passes over the weights, for gradient sums and layout changes.
        strided: exponent of the saving of a 1 x 1 input gradient with stride s: 1 skips all s*s - 1
            of s*s values, 0.5 the values of one direction.
        places: output positions of an image are padded to a multiple of this, in the weight
            gradient.
        ordinary: fraction of an eighth of the tensor-core peak, for gradients whose padding is as
            large as the window.
        floor: minimum seconds to start the kernels; more with tensor cores for the input gradient,
            which change layouts.
        winograd: fraction of `efficiency` of Winograd products with separate transforms, in patches
            of 4 x 4; 0 if unused.
        winograd_fused: the same with fused transforms, in patches of 2 x 2; used alone for batches
            below `winograd_batch`.
        winograd_batch: smallest batch with separate transforms.
        winograd_smallest: edge of the smallest tile of Winograd products with separate transforms.
        winograd_data, winograd_weights: memory passes over transformed data and weights.
        corrections: coefficients of a fitted log-linear correction, by feature. "m", "n", "k":
            logarithms of the sides of the product (over 128, 4096 and 1024). Indicators: "window"
            of more than one value, "strided", "thin" (up to 4 input channels), "single" (one),
            "tall" (window height 5 or more), "winograd" (applies), "all".
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
    winograd_batch: int = 16
    winograd_smallest: int = 64
    winograd_data: float = 1.0
    winograd_weights: float = 1.0
    corrections: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ReductionSpec:
    """Measured all-reduce times on one server, interpolated in log-log space.

    Attributes:
        ranks: number of devices.
        bytes: tensor sizes, ascending.
        seconds: duration for each size.
    """

    ranks: int
    bytes: Sequence[float]
    seconds: Sequence[float]
    source: str


@dataclass(frozen=True)
class LinkSpec:
    """Interconnect of devices without measured all-reduces.

    Attributes:
        bandwidth: bytes per second that each device sends.
        latency: seconds per ring step.
    """

    bandwidth: float
    latency: float
    source: str
