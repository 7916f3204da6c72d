"""Analytic operator times (`Times`) of a device of the catalog, computed from operator costs.

Matrix products and convolutions with known dimensions use the device's tile model. Other operators
use the roofline: the longer of the times of their operations and of their memory traffic. Each
operator is assumed to run alone; fused operators take less time. No operator takes less time than
its host needs to issue it (`Device.host`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import PurePath

from qsync_fx.devices.device_model import Device
from qsync_fx.devices.format_support import ANY, row_at
from qsync_fx.devices.roofline import Product
from qsync_fx.errors import ProfileError, nearest
from qsync_fx.formats import FP32, Precision, precision
from qsync_fx.graph.cost_algebra import Size, Work
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.graph.operator_costs import cast_cost
from qsync_fx.predictor.cost_mapper.times import ANYBODY, TOLD_BY_NONE, Beside, Seconds
from qsync_fx.predictor.memory.peak_memory import LossMemory, OptimizerMemory
from qsync_fx.predictor.model.model_graph import ModelGraph, ModelOperator, ModelRead, StateNames

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
    write batch*m*n (`result`) elements and compute 2*batch*m*n*k `flops`.
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

    The search tries window sizes, then strides, then paddings, and returns the first fit. `read`
    and `weights` are the numbers of elements, `result` is the shape [N, K, H, W].
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
            if h <= 0 or places % h:
                continue
            w = places // h
            fits = w + 2 * padding >= r and (w + 2 * padding - r) // stride + 1 == wide
            if fits and math.isclose(h / w, high / wide, rel_tol=0.35):
                return h, w, padding
    return None


ADAMW = 28
"""Bytes that AdamW moves per FP32 parameter: reads of the parameter, its gradient and two moments,
and writes of all but the gradient."""


class DeviceTimes:
    """Operator times of a model on a device of the catalog, computed from operator costs.

    The graph has numbers for its symbolic sizes. The optimizer moves `optimizer_bytes` per trained
    element. The memory of optimizer and loss is None if it is unknown.
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
            do = "explain it on a CPU, without a target"
            if device.kind == "gpu":
                do = f'explain it with options={{"target": "{device}"}}'
            message = f"the model was explained for {PurePath(graph.device).stem}, not {device}"
            raise ProfileError(message, where=f"device {device}", do=do)
        self.device, self.graph = device, graph
        self.optimizer_memory, self.loss_memory = optimizer_memory, loss_memory
        self._optimizer_bytes = optimizer_bytes
        self._cache: dict[tuple[str, StateNames], Seconds] = {}
        self._sides: dict[str, ProductShape | ConvolutionShape | None] = {}
        self._convolutions: dict[tuple[str, Product], Mapping[ConvolutionShape, float]] = {}

    def of(self, graph: ModelGraph) -> DeviceTimes:
        """Return the times of another model; the memory of its loss is unknown."""
        return DeviceTimes(self.device, graph, self._optimizer_bytes, self.optimizer_memory)

    def on(self, device: Device) -> DeviceTimes:
        """Return the times of the same model on another device."""
        return DeviceTimes(
            device, self.graph, self._optimizer_bytes, self.optimizer_memory, self.loss_memory
        )

    def operator(
        self, operator: str, state: OperandState, around: Sequence[OperandState | None] = ()
    ) -> Seconds:
        key = operator, state.names
        if key not in self._cache:
            self._cache[key] = self._computed(self.graph.operator(operator), state.names)
        return self._cache[key]

    def least(self, operator: str, state: OperandState, neighbours: Beside = ANYBODY) -> Seconds:
        return self.operator(operator, state)

    def told_apart(
        self, operator: str, state: OperandState
    ) -> Sequence[Collection[StateNames] | None]:
        return TOLD_BY_NONE

    def cast(
        self, operator: str, before: str, after: str, numel: int, differentiated: bool
    ) -> Seconds:
        if before == after or not numel:
            return Seconds(0.0, 0.0, interpolated=True)
        source, target = precision(before), precision(after)
        read, written = (numel * fmt.dtype.itemsize for fmt in (source, target))
        gradient = cast_cost(read, written, target, differentiated).casts_backward.bytes
        backward = self.device.memory_seconds(gradient) if gradient else 0.0
        forward = self.device.cast_seconds(source, target, numel)
        # Compiled code converts plain formats in the kernel that reads the value.
        if source.scaled or target.scaled:
            forward = self.device.host.issued(forward, 1, calls=target.scaled)
        return Seconds(forward, backward, interpolated=True)

    def outside(self) -> Seconds:
        return Seconds(self.device.host.step, 0.0, interpolated=True)

    def optimizer(self) -> float:
        """Return the seconds to read and write all trained parameters and their state."""
        if not self._optimizer_bytes:
            return 0.0
        trained = sum(parameter.numel for parameter in self.graph.parameters if parameter.trained)
        return self.device.memory_seconds(trained * self._optimizer_bytes)

    def sides(self, operator: str) -> ProductShape | ConvolutionShape | None:
        """Return the dimensions of an operator's product, or None if unknown."""
        if operator not in self._sides:
            self._sides[operator] = self._dimensions(self.graph.operator(operator))
        return self._sides[operator]

    def _computed(self, operator: ModelOperator, names: StateNames) -> Seconds:
        cost = operator.costs.get(names)
        if cost is None:
            state, *available = (f"{a}->{b}" for a, b in (names, *operator.costs))
            message = f"the model graph has no cost of the state {state}"
            raise ProfileError(message, where=operator.where, do=nearest(state, available))
        fmt = back = precision(names[0] or FP32)
        if fmt.scaled:
            back = row_at(self.device.capability or ANY, fmt).gradient
        sides = self.sides(operator.id)
        if sides is None:
            forward = self._work(operator, cost.forward, fmt)
            backward = self._work(operator, cost.input_gradient, back)
            backward += self._work(operator, cost.weight_gradient, back)
            backward += self._work(operator, cost.recomputed, fmt)
        else:
            forward = self._product(sides, "output", fmt)
            backward = sum(self._product(sides, part, back) for part in self._gradients(operator))
            backward += forward * operator.repeated
        host = self.device.host
        if forward:
            forward = host.issued(forward, 1, calls=fmt.scaled and sides is not None)
        if backward:
            backward = host.issued(backward, self._launched_backward(operator))
        return Seconds(forward, backward, interpolated=True)

    def _launched_backward(self, operator: ModelOperator) -> int:
        """Return the number of gradients that an operator's backward pass computes separately."""
        if self.sides(operator.id) is None:
            return 1
        return max(1, sum(bool(read.gradient) for read in operator.reads))

    def _work(self, operator: ModelOperator, work: Work, fmt: Precision) -> float:
        flops, nbytes = (_number(size, operator) for size in (work.flops, work.bytes))
        return self.device.work_seconds(flops, nbytes, fmt) if flops or nbytes else 0.0

    def _product(
        self, sides: ProductShape | ConvolutionShape, part: Product, fmt: Precision
    ) -> float:
        if isinstance(sides, ConvolutionShape):
            key = self.device.unit(fmt).name, part
            if key not in self._convolutions:
                self._convolutions[key] = self._convolution_seconds(*key)
            return self._convolutions[key][sides]
        # In the column-major terms of BLAS.
        rows = sides.m * sides.batch
        if part == "output":
            return self.device.gemm_seconds(sides.n, rows, sides.k, fmt, "tn")
        if part == "input_gradient":
            return self.device.gemm_seconds(sides.k, rows, sides.n, fmt, "nn")
        return self.device.gemm_seconds(sides.k, sides.n * sides.batch, sides.m, fmt, "nt")

    def _convolution_seconds(self, unit: str, part: Product) -> Mapping[ConvolutionShape, float]:
        """Return the seconds of one product of all convolutions of the model."""
        sides = dict.fromkeys(self.sides(operator.id) for operator in self.graph.operators)
        shapes = [item for item in sides if isinstance(item, ConvolutionShape)]
        sizes = [
            (s.n, s.c, s.h, s.w, s.k, s.r, s.r, s.stride, s.stride, s.padding, s.padding)
            for s in shapes
        ]
        seconds = self.device.convolutions_seconds(sizes, unit, part)
        return dict(zip(shapes, seconds, strict=True))

    def _gradients(self, operator: ModelOperator) -> list[Product]:
        products: tuple[Product, Product] = ("input_gradient", "weight_gradient")
        pairs = zip(products, self._factors(operator), strict=True)
        return [product for product, factor in pairs if factor.gradient]

    def _dimensions(self, operator: ModelOperator) -> ProductShape | ConvolutionShape | None:
        flops, factors = _forward_flops(operator), self._factors(operator)
        if not flops or not factors:
            return None
        first, second = (self._numel(read.value, operator) for read in factors)
        result = _shape(operator.shape)
        if result is not None and len(result) > 2 and "conv" in operator.row:
            if flops != 2 * result[0] * result[2] * result[3] * second:
                return None
            return convolution(first, second, result)
        return product(first, second, self._numel(operator.result, operator), flops)

    def _factors(self, operator: ModelOperator) -> tuple[ModelRead, ...]:
        """Return the two operands that an operator multiplies, the weight last; () if none fit."""
        if "conv" in operator.row:
            return operator.reads[:2]
        flops, result = _forward_flops(operator), self._numel(operator.result, operator)
        for pair in permutations(operator.reads, 2):
            first, second = (self._numel(read.value, operator) for read in pair)
            weights = [self.graph.values[read.value].source == "parameter" for read in pair]
            if weights != [True, False] and product(first, second, result, flops) is not None:
                return pair
        return ()

    def _numel(self, value: int, operator: ModelOperator) -> int:
        return _number(self.graph.values[value].numel, operator)


def moved_bytes(optimizer: OptimizerMemory) -> float:
    """Return the bytes that an optimizer reads and writes per FP32 parameter; see `ADAMW`."""
    return 4 * (3 + 2 * optimizer.state)


def explained_for(graph: ModelGraph, device: Device) -> bool:
    """Return whether a model was explained for a device; "cuda" fits every GPU."""
    if device.kind == "cpu":
        return graph.device == "cpu"
    return graph.device in ("cuda", device.name, device.target, device.path)


def _shape(text: str) -> tuple[int, ...] | None:
    """Return the shape in a description such as "f32[8, 16]"; None for any other text."""
    result = re.fullmatch(r"\w+\[([\d, ]*)\]", text)
    return tuple(int(size) for size in result[1].split(", ") if size) if result else None


def _forward_flops(operator: ModelOperator) -> int:
    return _number(next(iter(operator.costs.values())).forward.flops, operator)


def _number(size: Size, operator: ModelOperator) -> int:
    if isinstance(size, int) or getattr(size, "is_number", False):
        return int(size)
    message = f"the time of work of {size} is not known"
    do = "give sizes first: graph.at(batch=...)"
    raise ProfileError(message, where=operator.where, do=do)
