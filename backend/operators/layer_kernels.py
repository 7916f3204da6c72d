"""Kernels of a graph's layers: found and compiled before the model runs.

Each lowered operator runs forward and backward on meta tensors with a `RecordingDispatcher`, and so
requests the same kernels as in training. Symbolic sizes have the sizes of the example.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.codegen import X_TYPES, TranslationUnit, written
from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.kernel_config import BY_CAPABILITY, TYPICAL, Arch, wide
from qsync_fx.backend.cuda.layer_times import Part, layer_problem
from qsync_fx.backend.cuda.problem import GemmProblem, Problem
from qsync_fx.backend.cuda.problem.problem import format_name, outline
from qsync_fx.backend.cuda.runtime import quantize_launch
from qsync_fx.backend.cuda.runtime.device_state import decision, known_of
from qsync_fx.backend.cuda.selection.estimate import estimate
from qsync_fx.backend.cuda.selection.select import KernelDecision
from qsync_fx.backend.cuda.tuning import NARROW, work
from qsync_fx.backend.operators.gemm.dispatch import RecordingDispatcher
from qsync_fx.backend.operators.product_utils import compute_product, incoming
from qsync_fx.backend.operators.quantize import quantize
from qsync_fx.devices.device_catalog import get
from qsync_fx.devices.format_support import capability, row_on, standing_for
from qsync_fx.formats import FORMATS, Precision
from qsync_fx.graph import Context, node_metadata
from qsync_fx.graph.fx_utils import argument_at, arguments
from qsync_fx.graph.graph import Operator, PrecisionGraph
from qsync_fx.ops import OperatorRow
from qsync_fx.passes.lowering_registry import Operands, Role
from qsync_fx.torch_internals import OpOverload, _disable_current_modes

_NONE_LIKE_IT: Final = "there are no kernels for layers like it"


@dataclass(frozen=True)
class LayerProduct:
    """One product of a layer on a device with kernels, and its kernel.

    `name` is "output", "input gradient" or "weight gradient"; "product" if it is not known.
    """

    name: str
    problem: Problem
    decision: KernelDecision


@dataclass(frozen=True)
class LayerKernels:
    """The kernels of a layer's products; the text is part of the operator's reason.

    `products` are in the order output, input gradient, weight gradient. Without kernels, `arch` is
    "", and `because` is the reason why torch computes all products.
    """

    arch: str = ""
    products: tuple[LayerProduct, ...] = ()
    because: str = ""

    def __str__(self) -> str:
        if self.because:
            return f"torch computes: {self.because}"
        ours = [product.name for product in self.products if product.decision.config is not None]
        clauses = [f"CUTLASS {self.arch} kernels for {', '.join(ours)}"] * bool(ours)
        reasons: dict[str, list[str]] = {}
        for product in self.products:
            if product.decision.config is None:
                reasons.setdefault(product.decision.reason, []).append(product.name)
        for reason, names in reasons.items():
            clauses.append(f"torch computes {', '.join(names)}: {reason}")
        return "; ".join(clauses)


def problems_of(graphs: Iterable[PrecisionGraph]) -> list[Problem]:
    """Return the distinct problems of lowered graphs, on any device, in the order of the layers."""
    result: dict[Problem, None] = {}
    for operator in (operator for graph in graphs for operator in _layers(graph)):
        kernels = operator.note.computed
        if isinstance(kernels, LayerKernels):
            result |= dict.fromkeys(product.problem for product in kernels.products)
        else:
            result |= dict.fromkeys(_problems_of_layer(operator.node))
    return list(result)


def scaled_layers(graphs: Iterable[PrecisionGraph], wide: str) -> list[tuple[Problem, str]]:
    """Return the distinct layers in narrow formats, by `layer_problem` and name of the format."""
    result: dict[tuple[Problem, str], None] = {}
    for operator in (operator for graph in graphs for operator in _layers(graph)):
        fmt, problems = operator.precision, _problems_of_layer(operator.node)
        if fmt is not None and fmt.scaled and problems:
            result[layer_problem(problems[0], wide), fmt.name] = None
    return list(result)


def _layers(graph: PrecisionGraph) -> list[Operator]:
    """Return the operators whose lowering uses kernels: their gradients have a rounding stream."""
    lowerings = graph.context.lowerings
    return [
        operator
        for operator in graph.operators()
        if operator.note.stream is not None
        and operator.row is not None
        and operator.row.name in lowerings
        and lowerings[operator.row.name].computed is computed
    ]


def _problems_of_layer(node: fx.Node) -> list[Problem]:
    """Return the problems of a layer's call and its gradients; [] if a size depends on values."""
    call = [_valueless(argument) for argument in node.args]
    if any(argument is _UNKNOWN for argument in call):
        return []
    leaves = [call[index].requires_grad_() for index in (0, 1) if _trained(node.args[index])]
    operator, recorder = node.target, RecordingDispatcher()
    assert isinstance(operator, OpOverload), operator
    # Active tracing and fake-tensor modes must not see these tensors.
    with (
        _disable_current_modes(),
        disable_proxy_modes_tracing(),
        torch.enable_grad(),
        standing_for(node.meta["val"].device),
    ):
        y = compute_product(operator, call, {}, recorder)
        if leaves:
            torch.autograd.grad(y, leaves, torch.empty_like(y))
    return recorder.problems


_UNKNOWN = object()


def _valueless(argument: Any) -> Any:
    """Return an argument with numbers for symbolic sizes and meta tensors, or `_UNKNOWN`."""
    if isinstance(argument, (list, tuple)):
        result = [_valueless(item) for item in argument]
        if any(item is _UNKNOWN for item in result):
            return _UNKNOWN
        return result
    value = argument
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val", argument.meta.get("example_value"))
    if isinstance(value, torch.SymInt):
        value = value.node.hint
        if not isinstance(value, int):
            return _UNKNOWN
    if not isinstance(value, Tensor):
        return value
    layout = outline(value)
    if layout is None:
        return _UNKNOWN
    with _disable_current_modes(), disable_proxy_modes_tracing():
        return torch.empty_strided(layout.shape, layout.strides, dtype=value.dtype, device="meta")


def _trained(argument: Any) -> bool:
    """Return whether an operand may require a gradient: not a graph input that requires none."""
    value = argument.meta.get("val", argument.meta.get("example_value"))
    constant = isinstance(value, Tensor) and not value.requires_grad
    return not (argument.op == "placeholder" and constant)


def computed(node: fx.Node, device: torch.device) -> LayerKernels | None:
    """Return the kernels of a layer, or why torch computes it; None for devices without kernels."""
    state = known_of(device)
    if state.arch is None and device.type != "cuda":
        return None
    if state.arch is None:
        return LayerKernels(because=state.reason)
    requested = _problems_of_layer(node)
    if not requested:
        return LayerKernels(state.arch, because=_NONE_LIKE_IT)
    named = zip(_names_of_products(node, requested), requested, strict=True)
    products = (LayerProduct(name, problem, decision(problem, device)) for name, problem in named)
    return LayerKernels(state.arch, tuple(products))


def _names_of_products(node: fx.Node, problems: Sequence[Problem]) -> list[str]:
    """Return the names of a layer's products: in a fixed order if complete, else by layout."""
    gradients = ("input gradient", "weight gradient")
    needed = [name for index, name in enumerate(gradients) if _trained(node.args[index])]
    if len(needed) + 1 == len(problems):
        return ["output", *needed]
    return [_name_of_product(problem) for problem in problems]


def _name_of_product(problem: Problem) -> str:
    kind: object = getattr(problem, "operation", None)
    if isinstance(problem, GemmProblem):
        kind = problem.a_major, problem.b_major
    match kind:
        case "fprop" | ("row", "column"):
            return "output"
        case "dgrad" | ("row", "row"):
            return "input gradient"
        case "wgrad" | ("column", "row"):
            return "weight gradient"
    return "product"


def prepare(graph: PrecisionGraph) -> str:
    """Compile the kernels of a lowered graph in parallel; return a digest of its decisions, or "".

    Graphs of equal operators compile to the same code only if their digests are equal too.
    """
    device = graph.context.device
    if device.type == "cuda" and _layers(graph):
        quantize_launch.warn_about_missing_kernels(device)
    arch = known_of(device).arch
    if arch is None:
        return "no kernels" * (device.type == "cuda")
    refused, decided = -1, {}
    while refused != kernel_registry.refusals():
        # If the compiler rejects a kernel, selection falls back to the next candidate.
        refused, decided = kernel_registry.refusals(), _decided(graph, device)
        configs = [item.config for item in decided.values() if item.config is not None]
        units = {config: codegen.unit_of(config) for config in configs}
        quantizers = _quantizers(graph, arch)
        copiers = [codegen.copier(arch)] * bool(units)
        kernel_registry.prepare_graph([*units.values(), *quantizers, *copiers])
    lines = []
    for problem, item in decided.items():
        computed_by: object = item.integers
        if item.config is not None and kernel_registry.failure(units[item.config]) is None:
            computed_by = item.config.name
        lines.append(f"{problem} {computed_by}")
    # Without a kernel quantizers are decomposed in the compiled graph.
    lines += [f"no {unit.name}" for unit in quantizers if kernel_registry.failure(unit) is not None]
    if not lines:
        return ""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _decided(graph: PrecisionGraph, device: torch.device) -> dict[Problem, KernelDecision]:
    """Return the current decision of each problem of a graph, and record it on the layers."""
    result: dict[Problem, KernelDecision] = {}
    for operator in _layers(graph):
        if isinstance(before := operator.note.computed, LayerKernels):
            products = tuple(
                replace(p, decision=decision(p.problem, device)) for p in before.products
            )
            operator.update(computed=replace(before, products=products))
            result |= {product.problem: product.decision for product in products}
    return result


def _quantizers(graph: PrecisionGraph, arch: Arch) -> list[TranslationUnit]:
    """Return the quantizers of the graph's casts and of its layers' gradients."""
    pairs: dict[tuple[str | None, str | None], None] = {}
    for part in graph.walk():
        for node in part.nodes:
            cast = node_metadata.CAST.get(node)
            if cast is None or cast.part is not node_metadata.Part.QUANTIZE or cast.format is None:
                continue
            source = part.value(node_metadata.cast_source(node)).dtype
            pairs[format_name(source), written(cast.format)] = None
    for note in (operator.note for operator in _layers(graph)):
        assert note.precision is not None and note.output is not None
        gradient = incoming(note.precision, graph.context.device)
        pairs[format_name(note.output.dtype), written(gradient)] = None
    return [
        codegen.quantizer(arch, str(x), fmt) for x, fmt in pairs if x in X_TYPES and fmt is not None
    ]


def without_narrow_unit(
    node: fx.Node,
    row: OperatorRow,
    fmt: Precision,
    context: Context,
    emit: Callable[[fx.Node, Operands], fx.Node],
    keep: Callable[[fx.Node, Role], list[int]],
) -> str | None:
    """Return why a layer on a GPU is not faster in a narrow format; None if it is, or if unknown.

    Measured times of the layer decide, or else an estimate, see `selection.estimate`. `node` is
    torch's operator, not quantized yet; `emit` and `keep` are as in `Lowering`.
    """
    if not fmt.scaled:
        return None
    requested = _problems_on_trial(node, row, fmt, context, emit, keep)
    if requested is None:
        return None
    narrow = {part: p for part, p in requested.items() if p.a in NARROW or p.b in NARROW}
    if not narrow:
        # torch has no narrow convolution. For stacks of matrices its choice depends on more than
        # the problem.
        return _NONE_LIKE_IT * (row.contracts is None) or None
    state = known_of(context.device)
    if state.arch is None:
        return state.reason
    output, other = requested["forward"], wide(state.arch)
    measured = state.layer(output, fmt.name)
    if measured is not None:
        return _slower(output, measured.speed(requested), f"{fmt} was measured", other)
    decisions = {part: decision(problem, context.device) for part, problem in narrow.items()}
    if not any(selected.config or _by_cublas(selected) for selected in decisions.values()):
        return next(iter(decisions.values())).reason
    by_kernel = frozenset(part for part, selected in decisions.items() if selected.config)
    if (version := capability(context.device)) not in BY_CAPABILITY:
        newer = ".".join(map(str, version))
        return f"kernels for {state.arch} were not measured on compute capability {newer}"
    device = state.model or get(TYPICAL[state.arch])
    times = estimate(requested, by_kernel, fmt.name, other, device, state.table)
    return _slower(output, times.speed(), f"{fmt} is estimated", other)


def _slower(output: Problem, speed: float, subject: str, wide: str) -> str | None:
    """Return the reason against a narrow format by its speed relative to `wide`, or None."""
    if speed >= 1:
        return None
    sizes = " x ".join(map(str, work(output)))
    return f"{subject} to reach {speed:.2f} of {wide}'s speed at {sizes}, with quantization"


def _by_cublas(selected: KernelDecision) -> bool:
    """Return whether torch multiplies integers as such, as measured."""
    kinds = {FORMATS[selected.problem.a].kind, FORMATS[selected.problem.b].kind}
    is_gemm = isinstance(selected.problem, GemmProblem)
    return selected.integers and is_gemm and kinds == {"integer"}


def _problems_on_trial(
    node: fx.Node,
    row: OperatorRow,
    fmt: Precision,
    context: Context,
    emit: Callable[[fx.Node, Operands], fx.Node],
    keep: Callable[[fx.Node, Role], list[int]],
) -> dict[Part, Problem] | None:
    """Return the problems of a layer, lowered in a separate graph; None if a size is unknown.

    Without training, there is only the output.
    """
    trial = fx.Graph()
    stand_ins: dict[fx.Node, fx.Node] = {}
    for used in node.all_input_nodes:
        # The kind of node that an operand is decides whether it requires a gradient.
        stand_ins[used] = trial.create_node(used.op, used.target, name=used.name)
        stand_ins[used].meta["val"] = used.meta.get("val")
    layer = trial.node_copy(node, lambda used: stand_ins[used])

    def placeholder(value: Any) -> fx.Node:
        result = trial.placeholder("made")
        result.meta["val"] = value
        return result

    inputs, rounding = tuple(arguments(layer).values()), context.options.rounding
    with _disable_current_modes(), disable_proxy_modes_tracing(), torch.no_grad():
        seed = placeholder(torch.empty(1, dtype=torch.int64, device="meta"))
        operands = []
        for index, role in zip(row.scaled, Role, strict=True):
            operand = argument_at(inputs, index)
            value = _valueless(operand)
            if not isinstance(value, Tensor):
                return None
            dims = keep(layer, role)
            q, scale = quantize(value, seed.meta["val"], 0, fmt.name, rounding, dims)
            operands.append((operand, placeholder(q), placeholder(scale)))
    first, second = operands
    out = row_on(context.device, fmt).output.dtype
    lowered = emit(layer, Operands((first, second), seed, 0, fmt.name, rounding, out))
    lowered.meta["val"] = node.meta["val"]
    problems = _problems_of_layer(lowered)
    if not problems:
        return {}
    named = zip(_names_of_products(lowered, problems), problems, strict=True)
    parts = {_PARTS[name]: problem for name, problem in named if name in _PARTS}
    if not context.training or "forward" not in parts:
        return {"forward": problems[0]}
    return parts


_PARTS: Final[dict[str, Part]] = {
    "output": "forward",
    "input gradient": "input_gradient",
    "weight gradient": "weight_gradient",
}
