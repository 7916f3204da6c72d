"""Analytic operator times (`Times`) of a device of the catalog, computed from operator costs.

Matrix products and convolutions with known dimensions use the device's tile model. Other operators
use the roofline: the longer of the times of their operations and of their memory traffic. Each
operator is assumed to run alone; fused operators take less time.
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
from qsync_fx.predictor.memory.peak_memory import LossMemory, OptimizerMemory
from qsync_fx.predictor.model.model_graph import ModelGraph, ModelOperator, ModelRead, StateNames
from qsync_fx.predictor.times import ANYBODY, TOLD_BY_NONE, Beside, Seconds

if TYPE_CHECKING:
    from qsync_fx.devices.roofline import Product as Part

__all__ = ["DeviceTimes"]


_WINDOWS = (1, 3, 5, 7, 9, 11, 2, 4, 14, 16)
"""Heights of square convolution windows, in the order of the search."""


@dataclass(frozen=True)
class ProductShape:
    """`batch` products of [m, k] by [k, n] matrices."""

    batch: int
    m: int
    n: int
    k: int


@dataclass(frozen=True)
class ConvolutionShape:
    """Convolution with a square window r by r; the fields as in `Device.conv_seconds`."""

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    stride: int
    padding: int


def product(first: int, second: int, result: int, flops: int) -> ProductShape | None:
    """Return the dimensions of a batched matrix product, or None if no dimensions fit.

    `batch` products of [m, k] by [k, n] read batch*m*k (`first`) and batch*k*n (`second`) elements,
    write batch*m*n (`result`) elements and compute 2*batch*m*n*k `flops`. These four equations
    determine the four dimensions. A returned shape satisfies all of them exactly.
    """
    multiplied = flops // 2
    if min(first, second, result, multiplied) < 1:
        return None
    batch = round(first * second * result / multiplied**2)
    if batch < 1:
        return None
    k, m, n = (multiplied // size for size in (result, second, first))
    sizes = batch * m * k, batch * k * n, batch * m * n, 2 * batch * m * n * k
    return ProductShape(batch, m, n, k) if sizes == (first, second, result, flops) else None


def convolution(read: int, weights: int, result: tuple[int, ...]) -> ConvolutionShape | None:
    """Return the dimensions of a convolution, or None if no dimensions fit or it has groups.

    The search tries window sizes, then strides, then paddings, and returns the first fit.

    Args:
        read: number of elements of the input.
        weights: number of elements of the weight.
        result: shape of the result, [N, K, H, W].
    """
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
    """Return height, width and padding of an input plane of `places` elements.

    The largest padding comes first: it preserves the size at stride 1.
    """
    for padding in range(r // 2, -1, -1):
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
"""Bytes that AdamW moves per FP32 parameter: reads of the parameter, its gradient and two moments,
and writes of all but the gradient."""


class DeviceTimes:
    """Operator times of a model on a device of the catalog, computed from operator costs.

    Args:
        device: a device of the catalog.
        graph: the model, with numbers for its symbolic sizes.
        optimizer_bytes: bytes that the optimizer reads and writes per trained element; 0 for no
            optimizer and no time.
        optimizer_memory: memory of the optimizer; None if unknown.
        loss_memory: memory of the loss outside of the model; None if unknown.

    Raises:
        ProfileError: the model was explained for a device that runs other formats.
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
            do = "explain it on a CPU, without a target"
            if device.kind == "gpu":
                do = f'explain it with options={{"target": "{device}"}}'
            raise ProfileError(
                f"the model was explained for {existing}, which may support other formats than "
                f"{device}",
                where=f"device {device}",
                do=do,
            )
        self.device, self.graph = device, graph
        self.optimizer_memory, self.loss_memory = optimizer_memory, loss_memory
        self._optimizer_bytes = optimizer_bytes
        self._known: dict[tuple[str, StateNames], Seconds] = {}
        self._casts: dict[tuple[str, str, int, bool], Seconds] = {}
        self._sides: dict[str, ProductShape | ConvolutionShape | None] = {}

    def of(self, graph: ModelGraph) -> DeviceTimes:
        """Return the times of another model, or of this model with other sizes.

        The memory of the loss depends on sizes and is unknown in the result.
        """
        return DeviceTimes(self.device, graph, self._optimizer_bytes, self.optimizer_memory)

    def on(self, device: Device) -> DeviceTimes:
        """Return the times of the same model on another device."""
        return DeviceTimes(
            device, self.graph, self._optimizer_bytes, self.optimizer_memory, self.loss_memory
        )

    def operator(
        self, operator: str, state: OperandState, around: Sequence[OperandState | None] = ()
    ) -> Seconds:
        """Return the time of an operator in a state, without the casts of its operands.

        Neighbours do not change it.
        """
        names = state.names
        if (operator, names) not in self._known:
            self._known[operator, names] = self._reckoned(self.graph.operator(operator), names)
        return self._known[operator, names]

    def least(self, operator: str, state: OperandState, neighbours: Beside = ANYBODY) -> Seconds:
        """Return the time of an operator in a state; it is exact for all neighbours."""
        return self.operator(operator, state)

    def told_apart(
        self, operator: str, state: OperandState
    ) -> Sequence[Collection[StateNames] | None]:
        """Return empty sets: times do not depend on neighbours."""
        return TOLD_BY_NONE

    def cast(
        self, operator: str, before: str, after: str, numel: int, differentiated: bool
    ) -> Seconds:
        """Return the time of a cast or quantization that is not fused with other work."""
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
        backward = 0.0
        if cost.casts_backward.bytes:
            backward = self.device.memory_seconds(cost.casts_backward.bytes)
        return Seconds(self.device.cast_seconds(source, target, numel), backward, interpolated=True)

    def outside(self) -> Seconds:
        """Return zero: the framework overhead is unknown."""
        return Seconds(0.0, 0.0, interpolated=True)

    def optimizer(self) -> float:
        """Return the time to read and write all trained parameters and their state, in seconds.

        It is 0 without an optimizer.
        """
        if not self._optimizer_bytes:
            return 0.0
        trained = sum(parameter.numel for parameter in self.graph.parameters if parameter.trained)
        return self.device.memory_seconds(trained * self._optimizer_bytes)

    def sides(self, operator: str) -> ProductShape | ConvolutionShape | None:
        """Return the dimensions of an operator's product, or None if unknown."""
        if operator not in self._sides:
            self._sides[operator] = self._found(self.graph.operator(operator))
        return self._sides[operator]

    def _reckoned(self, operator: ModelOperator, names: StateNames) -> Seconds:
        cost = operator.costs.get(names)
        if cost is None:
            available = [f"{a}->{b}" for a, b in operator.costs]
            state = f"{names[0]}->{names[1]}"
            raise ProfileError(
                f"the model graph has no cost of the state {state}",
                where=operator.where,
                do=nearest(state, available),
            )
        fmt = back = precision(names[0] or FP32)
        if fmt.scaled:
            back = row_at(self.device.capability or ANY, fmt).gradient
        gradients = (cost.input_gradient, cost.weight_gradient)
        sides = self.sides(operator.id)
        if sides is None:
            forward = self._work(operator, cost.forward, fmt)
            backward = sum(self._work(operator, work, back) for work in gradients)
            backward += self._work(operator, cost.recomputed, fmt)
        else:
            forward = self._product(sides, "output", fmt)
            backward = sum(self._product(sides, part, back) for part in self._gradients(operator))
            backward += forward * operator.repeated
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
        # In the column-major terms of BLAS.
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
        factors = self._factors(operator)
        if not flops or not factors:
            return None
        first, second = (_number(self.graph.values[read.value].numel, operator) for read in factors)
        result = _shape(operator.shape)
        if result is not None and len(result) > 2 and "conv" in operator.row:
            if flops != 2 * result[0] * result[2] * result[3] * second:
                return None
            return convolution(first, second, result)
        written = _number(self.graph.values[operator.result].numel, operator)
        return product(first, second, written, flops)

    def _factors(self, operator: ModelOperator) -> tuple[ModelRead, ...]:
        """Return the two operands that an operator multiplies, the weight last; () if none fit."""
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
    """Return the bytes that an optimizer moves per FP32 parameter.

    It reads the parameter, its gradient and its state, and writes all but the gradient.
    """
    return 4 * (3 + 2 * optimizer.state)


def explained_for(graph: ModelGraph, device: Device) -> bool:
    """Return whether a model was explained for formats that run on a device.

    A model that was explained for "cuda" fits every GPU, and one explained for "cpu" every CPU.
    """
    if graph.device == device.kind == "cpu":
        return True
    return device.kind == "gpu" and graph.device in (
        "cuda",
        device.name,
        device.target,
        device.path,
    )


def _shape(text: str) -> tuple[int, ...] | None:
    """Return the shape in a description such as "f32[8, 16]"; None for any other text."""
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
