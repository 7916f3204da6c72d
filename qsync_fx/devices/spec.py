"""The constants of a device of the catalog, as its file of TOML gives them.

Invariant: every group of constants says where they come from. Efficiencies are fractions and latencies are cycles, so that those fitted on
one device may serve for its kin, whose peaks and clocks are others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MemorySpec:
    """
    Attributes:
        bytes: how much there is.
        bandwidth: of the memory, bytes a second, as the data sheet says.
        fraction: of it that reading and writing in order gets.
        cache: bytes of the largest cache that all processors share.
        cache_bandwidth: bytes a second from there.
        launch: seconds that the smallest kernel takes.
        host: bytes a second that go to the host, and as many back; 0 where the device is the host.
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
    """
    Attributes:
        peak: operations a second, 2 a multiply-add.
    """

    peak: float
    source: str


@dataclass(frozen=True)
class Tiles:
    """How a library's kernels compute a product tile by tile, with products of one format.

    Attributes:
        efficiency: of the unit's peak that tiles of 128 by 128 reach.
        small_tiles: by which power of its relative edge a smaller tile is less efficient.
        smallest: edge of the smallest tile.
        step: values of k that a tile takes at a time.
        latency: cycles for one k of a tile of 64 by 64 at least, however idle the device is.
        alone: fraction of its rate that a processor reaches with a single tile.
        tallest: whether tiles are as tall as m fills, up to 128, in place of whichever are fastest.
        prologue: values of k that starting and ending a tile costs.
        splits: the most parts that k is split into.
        reduction: how often the sums of those parts go through memory, written and read once being 1.
        memory: fraction of the memory's bandwidth that reading tiles gets.
        overlap: how far computing hides memory: the power of the mean of both times; 1 adds them up.
        launch: seconds before and after.
        throttle: growth of a product's time for each e-fold beyond a millisecond, where power limits the clock.
        misaligned: how much longer it takes where rows of the first factor begin no multiple of `alignment` values apart.
        alignment: values.
        layouts: how much longer tiles take where the first factor ("tn") or the second ("nt") is transposed, as BLAS counts.
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
    """How a library's kernels compute one of the three products of a convolution.

    Attributes:
        gather: how much longer a tile takes that gathers a window of more than one value.
        pointwise: edge of the smallest tile for windows of one value; 0: `smallest`.
        relayout: how often input and output go through memory to lie as the tiles want them; of a gradient of a strided convolution's
            input in FP32, how often that goes, whose skipped places are set to zero.
        weights: how often weights go through memory besides: sums of their gradient, and to lie as the tiles want them.
        strided: of what a stride of s skips in the gradient of the input with a window of one value, s*s - 1 of s*s values, the power
            that is skipped: 1 all, 0.5 those of one direction.
        places: of how many places of an image a tile of the gradient of the weight takes a multiple.
        ordinary: fraction of an eighth of tensor cores' peak with which gradients are reckoned whose padding is as large as the window.
        floor: seconds in which a program starts its kernels, however small they are; tensor cores have more
            of these for the gradient of an input, which lay values out anew.
        winograd: fraction of `efficiency` that Winograd's products reach with transforms of their own, of tiles of 4 by 4; 0: none is used.
        winograd_fused: the same with transforms in the kernel, of tiles of 2 by 2, which is all that batches below `winograd_batch` have.
        winograd_batch: the smallest batch whose transforms have kernels of their own.
        winograd_smallest: edge of the smallest tile of Winograd's products with transforms of their own.
        winograd_data, winograd_weights: how often what is transformed goes through memory.
        corrections: what is left, as powers: of the sides "m", "n" and "k" of the product (by 128, 4096 and 1024), and of e where the
            "window" has more than one value, it is "strided", the input has at most four channels ("thin") or one ("single"), the window is
            five or more high ("tall"), "winograd" serves, and of "all".
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
    """What all-reduce takes on one server, by bytes: straight lines between points, in logarithms.

    Attributes:
        ranks: how many devices were reduced over.
        bytes: of the tensor, growing.
        seconds: at each of `bytes`.
    """

    ranks: int
    bytes: Sequence[float]
    seconds: Sequence[float]
    source: str


@dataclass(frozen=True)
class LinkSpec:
    """What connects devices, where no all-reduce was measured.

    Attributes:
        bandwidth: bytes a second that each device sends.
        latency: seconds a step.
    """

    bandwidth: float
    latency: float
    source: str
