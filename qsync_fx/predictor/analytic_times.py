"""`Times` of a device of the catalog: what is asked of a profile where there is one, reckoned from what operators cost.

Products and convolutions whose sides are known take what the device's tiles take; other operators what their bytes take, or their
operations where those take longer. Each operator is taken to run alone: what a compiler fuses takes less.

Invariant: every state that the model's graph knows the cost of has a time, and nothing is measured.

The sides of a product, found from how many values it reads and makes, and from its operations.

A product of b matrices of m by k with b of k by n reads bmk and bkn values, makes bmn, and takes 2bmnk operations: four numbers for four
sides. Of a convolution the result's shape is known; how large its window is and how far it strides follows from how many values it reads,
if there is one way that fits.

Invariant: what is returned reads, makes and computes exactly what was given; None where nothing of this kind does.

How long a model's operators take on a device of the catalog: reckoned from their costs, and not measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import PurePath
from typing import TYPE_CHECKING

from qsync_fx.devices.device_model import Device
from qsync_fx.devices.format_support import ANY, row_at
from qsync_fx.errors import ProfileError, nearest
from qsync_fx.formats import FP32, Precision, precision
from qsync_fx.graph.cost_algebra import Size, Work
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.graph.operator_costs import cast_cost
from qsync_fx.predictor.memory.outside_passes import LossMemory, OptimizerMemory
from qsync_fx.predictor.model.model_graph import ModelGraph, ModelOperator, ModelRead, StateNames
from qsync_fx.predictor.times import ANYBODY, TOLD_BY_NONE, Beside, Seconds

if TYPE_CHECKING:
    from qsync_fx.devices.roofline import Product as Part

__all__ = ["DeviceTimes"]


_WINDOWS = (1, 3, 5, 7, 9, 11, 2, 4, 14, 16)
"""Heights of square windows, in the order in which they are tried."""


@dataclass(frozen=True)
class ProductShape:
    """`batch` products of m by k with k by n."""

    batch: int
    m: int
    n: int
    k: int


@dataclass(frozen=True)
class ConvolutionShape:
    """A convolution with a square window: sizes as in `Device.conv_seconds`."""

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    stride: int
    padding: int


def product(first: int, second: int, result: int, flops: int) -> ProductShape | None:
    """Returns the sides of a product that reads `first` and `second` values."""
    multiplied = flops // 2
    if min(first, second, result, multiplied) < 1:
        return None
    batch = round(first * second * result / multiplied**2)
    if batch < 1:
        return None
    k, m, n = (multiplied // size for size in (result, second, first))
    matches = ProductShape(batch, m, n, k)
    fits = (batch * m * k, batch * k * n, batch * m * n, 2 * batch * m * n * k) == (
        first,
        second,
        result,
        flops,
    )
    return matches if fits else None


def convolution(read: int, weights: int, result: tuple[int, ...]) -> ConvolutionShape | None:
    """Returns the sizes of a convolution of `read` values with `weights`, whose result has a shape of four sizes; None with groups."""
    if len(result) != 4 or min(result) < 1 or weights % result[1]:
        return None
    n, k, high, wide = result
    inner = weights // k
    for r in _WINDOWS:
        c, left = divmod(inner, r * r)
        if left or not c or read % (n * c):
            continue
        for stride in range(1, 17):
            matches = _placed(read // (n * c), high, wide, r, stride)
            if matches is not None:
                return ConvolutionShape(n, c, *matches[:2], k, r, stride, matches[2])
    return None


def _placed(places: int, high: int, wide: int, r: int, stride: int) -> tuple[int, int, int] | None:
    """Returns height, width and padding of an input of so many places; of several paddings that which keeps the size."""
    for padding in range(r // 2, -1, -1) if r > 1 else (0,):
        for h in range((high - 1) * stride + r - 2 * padding, high * stride + r - 2 * padding):
            if h > 0 and places % h == 0:
                w = places // h
                if (
                    (w + 2 * padding - r) // stride + 1 == wide
                    and w + 2 * padding >= r
                    and _like(h, w, high, wide)
                ):
                    return h, w, padding
    return None


def _like(h: int, w: int, high: int, wide: int) -> bool:
    return math.isclose(h / w, high / wide, rel_tol=0.35)


ADAMW = 28
"""Bytes that AdamW moves for a parameter in FP32: it reads it, its gradient and two moments, and writes all but the gradient."""


class DeviceTimes:
    """
    Args:
        device: of the catalog.
        graph: the model, with numbers for its sizes.
        optimizer_bytes: what the optimizer reads and writes for each trained parameter; 0 for none, which takes no time.
        optimizer_memory: what it keeps and takes; None where that is not known.
        loss_memory: what the loss takes behind the model; None where that is not known.

    Raises:
        ProfileError: the model was explained for another device, where other formats run.
    """

    def __init__(
        self,
        device: Device,
        graph: ModelGraph,
        optimizer_bytes: float = ADAMW,
        optimizer_memory: OptimizerMemory | None = None,
        loss_memory: LossMemory | None = None,
    ) -> None:
        if not explained_for(graph, device):
            existing = PurePath(graph.device).stem
            message = f"the model was explained for {existing}, and formats run there that need not be those of {device}"
            do = (
                f'explain it with options={{"target": "{device}"}}'
                if device.kind == "gpu"
                else "explain it on a CPU, without a target"
            )
            raise ProfileError(message, where=f"device {device}", do=do)
        self.device, self.graph = device, graph
        self.optimizer_memory, self.loss_memory = optimizer_memory, loss_memory
        self._optimizer_bytes = optimizer_bytes
        self._known: dict[tuple[str, StateNames], Seconds] = {}
        self._casts: dict[tuple[str, str, int, bool], Seconds] = {}
        self._sides: dict[str, ProductShape | ConvolutionShape | None] = {}

    def of(self, graph: ModelGraph) -> DeviceTimes:
        """Returns the times of another model, or of the same one with other sizes, by which what its loss takes is another."""
        return DeviceTimes(self.device, graph, self._optimizer_bytes, self.optimizer_memory)

    def on(self, device: Device) -> DeviceTimes:
        """Returns the times of the same model on another device."""
        return DeviceTimes(
            device, self.graph, self._optimizer_bytes, self.optimizer_memory, self.loss_memory
        )

    def operator(
        self, operator: str, state: OperandState, around: Sequence[OperandState | None] = ()
    ) -> Seconds:
        """Returns the time of an operator in a state, without the casts in front of it; neighbours do not change it."""
        names = state.names
        if (operator, names) not in self._known:
            self._known[operator, names] = self._reckoned(self.graph.operator(operator), names)
        return self._known[operator, names]

    def least(self, operator: str, state: OperandState, neighbours: Beside = ANYBODY) -> Seconds:
        """Returns the time of an operator in a state."""
        return self.operator(operator, state)

    def told_apart(
        self, operator: str, state: OperandState
    ) -> Sequence[Collection[StateNames] | None]:
        """Returns that no neighbour makes a difference."""
        return TOLD_BY_NONE

    def cast(
        self, operator: str, before: str, after: str, numel: int, differentiated: bool
    ) -> Seconds:
        """Returns the time of converting or quantizing a tensor, as if nothing else was done on the way."""
        key = before, after, numel, differentiated
        if key not in self._casts:
            self._casts[key] = self._cast(*key)
        return self._casts[key]

    def _cast(self, before: str, after: str, numel: int, differentiated: bool) -> Seconds:
        if before == after or not numel:
            return Seconds(0.0, 0.0, interpolated=True)
        source, target = precision(before), precision(after)
        cost = cast_cost(
            numel * source.dtype.itemsize, numel * target.dtype.itemsize, target, differentiated
        )
        backward = (
            self.device.memory_seconds(cost.casts_backward.bytes)
            if cost.casts_backward.bytes
            else 0.0
        )
        return Seconds(self.device.cast_seconds(source, target, numel), backward, interpolated=True)

    def outside(self) -> Seconds:
        """Returns no time: nothing is known of the framework's own."""
        return Seconds(0.0, 0.0, interpolated=True)

    def optimizer(self) -> float:
        """Returns the seconds in which all trained parameters are read and written with what the optimizer keeps of them; 0 for none."""
        if not self._optimizer_bytes:
            return 0.0
        trained = sum(parameter.numel for parameter in self.graph.parameters if parameter.trained)
        return self.device.memory_seconds(trained * self._optimizer_bytes)

    def sides(self, operator: str) -> ProductShape | ConvolutionShape | None:
        """Returns the sides of an operator's product; None where it is none, or one whose sides are not known."""
        if operator not in self._sides:
            self._sides[operator] = self._found(self.graph.operator(operator))
        return self._sides[operator]

    def _reckoned(self, operator: ModelOperator, names: StateNames) -> Seconds:
        cost = operator.costs.get(names)
        if cost is None:
            available = [f"{a}->{b}" for a, b in operator.costs]
            message = f"the model's graph knows no cost of the state {names[0]}->{names[1]}"
            raise ProfileError(
                message, where=operator.where, do=nearest(f"{names[0]}->{names[1]}", available)
            )
        fmt = precision(names[0]) if names[0] is not None else FP32
        back = row_at(self.device.capability or ANY, fmt).gradient if fmt.scaled else fmt
        gradients = (cost.input_gradient, cost.weight_gradient)
        sides = self.sides(operator.id)
        if sides is None:
            forward = self._work(operator, cost.forward, fmt)
            backward = sum(self._work(operator, work, back) for work in gradients)
        else:
            forward = self._product(sides, "output", fmt)
            backward = sum(self._product(sides, part, back) for part in self._gradients(operator))
        backward += (
            self._work(operator, cost.recomputed, fmt)
            if sides is None
            else forward * operator.repeated
        )
        return Seconds(forward, backward, interpolated=True)

    def _work(self, operator: ModelOperator, work: Work, fmt: Precision) -> float:
        flops, nbytes = (_number(size, operator) for size in (work.flops, work.bytes))
        return self.device.work_seconds(flops, nbytes, fmt) if flops or nbytes else 0.0

    def _product(self, sides: ProductShape | ConvolutionShape, part: Part, fmt: Precision) -> float:
        if isinstance(sides, ConvolutionShape):
            s = sides
            return self.device.conv_seconds(
                s.n, s.c, s.h, s.w, s.k, s.r, s.r, s.stride, s.padding, fmt, part
            )
        # As BLAS counts, which sees rows as columns.
        rows = sides.m * sides.batch
        if part == "output":
            return self.device.gemm_seconds(sides.n, rows, sides.k, fmt, "tn")
        if part == "input_gradient":
            return self.device.gemm_seconds(sides.k, rows, sides.n, fmt, "nn")
        return self.device.gemm_seconds(sides.k, sides.n * sides.batch, sides.m, fmt, "nt")

    def _gradients(self, operator: ModelOperator) -> list[Part]:
        first, second = self._factors(operator)
        parts: tuple[tuple[Part, bool], ...] = (
            ("input_gradient", first.gradient),
            ("weight_gradient", second.gradient),
        )
        return [part for part, wanted in parts if wanted]

    def _found(self, operator: ModelOperator) -> ProductShape | ConvolutionShape | None:
        cost = next(iter(operator.costs.values()))
        flops = _number(cost.forward.flops, operator)
        factors = self._factors(operator) if flops else ()
        if not factors:
            return None
        first, second = (_number(self.graph.values[read.value].numel, operator) for read in factors)
        result = _shape(operator.shape)
        if result is not None and len(result) > 2 and "conv" in operator.row:
            matches = convolution(first, second, result)
            return (
                matches
                if matches and flops == 2 * result[0] * result[2] * result[3] * second
                else None
            )
        return product(
            first, second, _number(self.graph.values[operator.result].numel, operator), flops
        )

    def _factors(self, operator: ModelOperator) -> tuple[ModelRead, ...]:
        """Returns the two readings that an operator multiplies, the weight last; none where there are no such two."""
        wanted = _number(next(iter(operator.costs.values())).forward.flops, operator)
        result = _number(self.graph.values[operator.result].numel, operator)
        if "conv" in operator.row:
            return operator.reads[:2] if len(operator.reads) >= 2 else ()
        for pair in permutations(operator.reads, 2):
            sizes = [_number(self.graph.values[read.value].numel, operator) for read in pair]
            weight_first = self._weight(pair[0]) and not self._weight(pair[1])
            if not weight_first and product(sizes[0], sizes[1], result, wanted) is not None:
                return pair
        return ()

    def _weight(self, read: ModelRead) -> bool:
        return self.graph.values[read.value].source == "parameter"


def moved_bytes(optimizer: OptimizerMemory) -> float:
    """Returns the bytes that an optimizer moves for a parameter in FP32: all is read, and all but the gradient written."""
    return 4 * (3 + 2 * optimizer.state)


def explained_for(graph: ModelGraph, device: Device) -> bool:
    """Whether a model was explained where the same formats run as on a device: on it, or on one of its kind that was at hand."""
    if graph.device == device.kind == "cpu":
        return True
    return device.kind == "gpu" and graph.device in (
        "cuda",
        device.name,
        device.target,
        device.path,
    )


def _shape(text: str) -> tuple[int, ...] | None:
    """Returns the shape in a description such as "f32[8, 16]"; None for anything else."""
    result = re.fullmatch(r"\w+\[([\d, ]*)\]", text)
    return tuple(int(size) for size in result[1].split(", ") if size) if result else None


def _number(size: Size, operator: ModelOperator) -> int:
    if isinstance(size, int):
        return size
    if getattr(size, "is_number", False):
        return int(size)
    raise ProfileError(
        f"the time of work of {size} is not known",
        where=operator.where,
        do="give sizes first: graph.at(batch=...)",
    )
