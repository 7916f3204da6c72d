"""Cache of quantized weights across passes: the option "cache_quantized_weights".

The quantization of weights is lifted out of the compiled graph, and the quantized copies become
graph inputs, as does the random number of the pass. Invariant: a graph computes the same as if each
weight had been quantized in the pass that made its copy.
"""

from __future__ import annotations

import functools
import operator as py_operator
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from qsync_fx.backend.cuda.runtime import quantize_launch
from qsync_fx.backend.operators.quantize import quantize
from qsync_fx.errors import PlanWarning
from qsync_fx.formats import precision
from qsync_fx.graph import node_metadata
from qsync_fx.graph.alias_analysis import AliasSets
from qsync_fx.graph.fx_utils import arguments
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.graph.operand_formats import Origin, Origins
from qsync_fx.torch_internals import FakeTensor

_COMPARED: Final = 256
"""Number of sample values of a weight that are compared, spread as far as possible."""


class CopySpec(NamedTuple):
    """Arguments of `qsync::quantize` for a copy, besides the weight and the random number."""

    stream: int
    fmt: str
    rounding: str
    keep: tuple[int, ...]

    def of(self, weight: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(weight.detach(), seed, self.stream, self.fmt, self.rounding, self.keep)


class _Copy(NamedTuple):
    state: tuple[object, ...]
    memory: torch.UntypedStorage
    compared: Tensor
    pair: tuple[Tensor, Tensor]


@dataclass
class _CachedCopies:
    """Copies of a weight, by format, rounding, dimensions with scales, and CUDA stream."""

    # A copy is reused only for the same tensor, if no optimizer has stepped (those with
    # `fused=True` do not count their writes), and version counter and address are unchanged. A copy
    # retains the weight's memory, so the address is not reused.
    copies: dict[tuple[object, ...], _Copy] = field(default_factory=dict)
    used: int = 0
    # To detect uncounted writes, sample values are compared at uses 1, 2, 4, 8 and so on.
    trusted: bool = True


_copies_by_weight: Final[MutableMapping[Tensor, _CachedCopies]] = WeakTensorKeyDictionary()


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_after_a_step)


def _after_a_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for saved in _copies_by_weight.values():
        saved.copies.clear()


def copies(weights: Sequence[tuple[Tensor, CopySpec]], seed: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return values and scales of weights, from the cache or newly quantized with `seed`."""
    queue = _queue(seed.device)
    _watch_steps()
    return [_copy(weight, spec, seed, queue) for weight, spec in weights]


def _queue(device: torch.device) -> int | None:
    """Return the current CUDA stream, 0 without CUDA; None during capture, which runs no Python."""
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return int(torch.cuda.current_stream(device).cuda_stream)


def _copy(weight: Tensor, spec: CopySpec, seed: Tensor, queue: int | None) -> tuple[Tensor, Tensor]:
    # An inference tensor has no version counter, and DDP runs compiled code once on fake tensors.
    if queue is None or weight.is_inference() or isinstance(weight, FakeTensor):
        return spec.of(weight, seed)
    cached = _copies_by_weight.get(weight)
    if cached is None:
        cached = _copies_by_weight[weight] = _CachedCopies()
    if not cached.trusted:
        return spec.of(weight, seed)
    layout = weight.dtype, weight.device, weight.shape, weight.stride()
    state = weight._version, weight.data_ptr(), *layout
    key = (spec.fmt, spec.rounding, spec.keep, queue)
    result = cached.copies.get(key)
    if result is not None and result.state == state:
        cached.used += 1
        if cached.used & (cached.used - 1) or torch.equal(result.compared, _some(weight)):
            return result.pair
        cached.trusted = False
        cached.copies.clear()
        _warn_changed(weight)
        return spec.of(weight, seed)
    # Drop copies of other values: no graph reads them any more.
    cached.copies = {other: copy for other, copy in cached.copies.items() if copy.state == state}
    pair = spec.of(weight, seed)
    cached.copies[key] = _Copy(state, weight.untyped_storage(), _some(weight).clone(), pair)
    return pair


def _some(weight: Tensor) -> Tensor:
    """Return sample values of a weight in memory order, as bytes, since NaN differs from itself."""
    live = weight.detach()
    # An odd step visits all columns of a matrix whose rows have an even length.
    step = live.numel() // _COMPARED | 1
    each = zip(live.shape, live.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in each)
    if span == live.numel():  # dense in any layout
        some = live.as_strided((-(-span // step),), (step,))
    else:
        some = live.flatten()[::step]
    return some.contiguous().view(torch.uint8)


def _warn_changed(weight: Tensor) -> None:
    warnings.warn(
        f"a weight {list(weight.shape)} was modified without torch noticing (through .data, "
        "numpy or shared memory), and a pass may have used its old values: the option "
        '"cache_quantized_weights" forbids such writes. From now on the weight is quantized in '
        "each pass. Modify weights under torch.no_grad(), or call "
        "torch.autograd.graph.increment_version(weight) after each write",
        PlanWarning,
        stacklevel=2,
    )


Compiled = Callable[..., Any]


@dataclass(frozen=True)
class Lifted:
    """Weight quantization that was lifted out of a graph.

    Attributes:
        draws: whether the random number of the pass is a graph input.
        weights: graph input index of each weight, and its quantization.
        inputs: additional graph inputs as fake tensors: the random number, then values and scale of
            each weight.
    """

    device: torch.device
    draws: bool = False
    weights: tuple[tuple[int, CopySpec], ...] = ()
    inputs: tuple[Any, ...] = ()

    def around(self, compiled: Compiled) -> Compiled:
        """Return a function of the graph's own inputs that appends the lifted ones."""
        if not self.weights:
            return compiled

        def run(*value: Any) -> Any:
            # Copies outlive the pass, and training cannot read copies made in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                seed = self._seed()
                pairs = copies([(value[index], made) for index, made in self.weights], seed)
            parts = (part for pair in pairs for part in pair)
            return compiled(*value, *[seed] * self.draws, *parts)

        return run

    def _seed(self) -> Tensor:
        if self.draws:
            return torch.ops.qsync.draw.default(self.device)  # type: ignore[no-any-return]
        return torch.zeros([1], dtype=torch.int64, device=self.device)


def lift(graph: PrecisionGraph) -> Lifted:
    """Lift the quantization of weights out of a lowered graph; warn about the remaining weights."""
    weights = dict(_quantized_weights(graph))
    _warn_left_out(graph, weights)
    lifted = [node for node, why in weights.items() if not why]
    if not lifted:
        return Lifted(graph.context.device)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    last, values = inputs[-1], []

    def replace(nodes: list[fx.Node], name: str, value: Any) -> None:
        """Append a graph input that replaces nodes, which are erased."""
        nonlocal last
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(name)
        last.target = last.name  # an argument name may occur several times
        last.meta["val"] = value
        # AOTAutograd reads the source in the model of each input.
        last._dynamo_source = None
        values.append(value)
        for node in nodes:
            node.replace_all_uses_with(last)
            graph.graph.erase_node(node)

    calls = [arguments(node) for node in lifted]
    specs = [
        CopySpec(call["stream"], call["fmt"], call["rounding"], tuple(call["keep"]))
        for call in calls
    ]
    indices = [inputs.index(call["x"]) for call in calls]
    seed = calls[0]["seed"]
    draws = seed.target is torch.ops.qsync.draw.default
    if draws:
        replace([seed], f"{seed.name}_drawn", graph.value(seed))
    for node in lifted:
        results = zip(("values", "scale"), graph.value(node), strict=True)
        for index, (name, value) in enumerate(results):
            getitem = py_operator.getitem, (node, index)
            parts = [user for user in node.users if (user.target, user.args) == getitem]
            replace(parts, f"{node.name}_{name}", value)
        graph.graph.erase_node(node)
    graph.inputs = [*graph.inputs, *values]
    graph.module.recompile()
    pairs = tuple(zip(indices, specs, strict=True))
    return Lifted(graph.context.device, draws, pairs, tuple(values))


def _quantized_weights(graph: PrecisionGraph) -> Iterator[tuple[fx.Node, str]]:
    """Yield the casts of weights to scaled formats, and why one cannot be lifted; "" if it can."""
    origins, memory = Origins(graph), AliasSets(graph)
    target = torch.ops.qsync.quantize.default
    for part in graph.walk():
        for node in part.graph.find_nodes(op="call_function", target=target):
            if origins.of(node.args[0]) is not Origin.PARAMETER:
                continue
            if part is graph:
                yield node, _obstacle(graph, node, memory)
            else:
                yield node, "it is inside a checkpointed region and is recomputed with it"


def _obstacle(graph: PrecisionGraph, node: fx.Node, memory: AliasSets) -> str:
    call = arguments(node)
    weight, value = call["x"], graph.value(call["x"])
    if weight.op != "placeholder":
        return "it is computed from a parameter, or is a constant of the graph"
    if memory.of(weight) & memory.written:
        return "the model itself writes to it"
    if any(type(size) is not int for size in (*value.shape, *value.stride())):
        return "its size is symbolic"
    if value.device.type == "cuda" and quantize_launch.fused(value, precision(call["fmt"])):
        return "no kernel quantizes it on this device, so a compiler fuses its quantization"
    return ""


def _warn_left_out(graph: PrecisionGraph, weights: dict[fx.Node, str]) -> None:
    left = [node for node, why in weights.items() if why]
    if left:
        names = {node: node_metadata.cast_source(node).name for node in left}
        reasons = sorted({f"{names[node]}: {weights[node]}" for node in left})
        if len(reasons) > 3:
            reasons[3:] = ["and so on"]
        warnings.warn(
            f'with the option "cache_quantized_weights", {len(left)} weights of {graph.where} '
            f"are still quantized in each pass: {'; '.join(reasons)}",
            PlanWarning,
            stacklevel=2,
        )
    elif not weights and graph.operators("adjustable"):
        warnings.warn(
            f'the option "cache_quantized_weights" has no effect on {graph.where}: none of its '
            "weights is quantized. The option applies to int8 and fp8",
            PlanWarning,
            stacklevel=2,
        )
