"""Kernel problems of a graph's layers, found and compiled before the model runs.

Each lowered operator runs forward and backward on meta tensors with a `RecordingDispatcher`, and so
requests the same kernels as in training. Symbolic sizes have the sizes of the example.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import _disable_current_modes

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.kernel_config import Arch
from qsync_fx.backend.cuda.problem import GemmProblem, Problem
from qsync_fx.backend.cuda.problem.problem import format_name, outline
from qsync_fx.backend.cuda.runtime import quantize_launch
from qsync_fx.backend.cuda.runtime.device_state import decision, known_of
from qsync_fx.backend.cuda.selection.select import KernelDecision
from qsync_fx.backend.operators.gemm.dispatch import RecordingDispatcher
from qsync_fx.backend.operators.product_utils import compute_product, incoming
from qsync_fx.devices import standing_for
from qsync_fx.graph import node_metadata

if TYPE_CHECKING:
    from qsync_fx.graph import Operator, PrecisionGraph


NONE_LIKE_IT: Final = "there are no kernels for layers like it"


@dataclass(frozen=True)
class LayerProduct:
    """One product of a layer on a device with kernels, and its kernel.

    Attributes:
        name: "output", "input gradient" or "weight gradient"; "product" if its layouts do not
            determine which.
        problem: the key by which kernels are selected.
        decision: the kernel, or the reason why torch computes the product.
    """

    name: str
    problem: Problem
    decision: KernelDecision


@dataclass(frozen=True)
class LayerKernels:
    """The kernels of a layer's products, selected once, when the layer is lowered.

    `qsync_fx.graph.node_metadata.OperatorInfo.computed` stores it; its text is
    part of the operator's reason.

    Attributes:
        arch: the architecture of the kernels; "" if there are none.
        products: in the order output, input gradient, weight gradient; empty if no kernel fits.
        because: the reason why torch computes all products.
    """

    arch: str = ""
    products: tuple[LayerProduct, ...] = ()
    because: str = ""

    def __str__(self) -> str:
        if self.because:
            return f"torch computes: {self.because}"
        ours = [product.name for product in self.products if product.decision.config is not None]
        left: dict[str, list[str]] = {}
        for product in self.products:
            if product.decision.config is None:
                left.setdefault(product.decision.reason, []).append(product.name)
        clauses = [f"CUTLASS {self.arch} kernels for {', '.join(ours)}"] if ours else []
        clauses += [
            f"torch computes {', '.join(names)}: {reason}" for reason, names in left.items()
        ]
        return "; ".join(clauses)


def problems_of(graphs: Iterable[PrecisionGraph]) -> list[Problem]:
    """Return the distinct problems of lowered graphs, in the order in which layers run.

    On devices without kernels these are the problems that the model would have there.
    """
    result: dict[Problem, None] = {}
    for graph in graphs:
        result |= dict.fromkeys(_problems(graph))
    return list(result)


def _problems(graph: PrecisionGraph) -> list[Problem]:
    return [problem for operator in _layers(graph) for problem in _problems_of_operator(operator)]


def _problems_of_operator(operator: Operator) -> list[Problem]:
    available = operator.note.computed
    return (
        [product.problem for product in available.products]
        if isinstance(available, LayerKernels)
        else problems_of_layer(operator.node)
    )


def _layers(graph: PrecisionGraph) -> list[Operator]:
    """Return the operators whose lowering uses kernels: their gradients have a rounding stream."""
    ours = [
        operator
        for operator in graph.operators()
        if operator.note.stream is not None and operator.row is not None
    ]
    return [operator for operator in ours if _uses_kernels(operator)]


def _uses_kernels(operator: Operator) -> bool:
    lowering = (
        operator.graph.context.lowerings.get(operator.row.name)
        if operator.row is not None
        else None
    )
    return lowering is not None and lowering.computed is computed


def problems_of_layer(node: fx.Node) -> list[Problem]:
    """Return the problems of a layer's call: output, input gradient, weight gradient.

    Products for gradients that are not needed are omitted; the list is empty if a size depends on
    values.
    """
    arguments = [valueless(argument) for argument in node.args]
    if any(argument is _UNKNOWN for argument in arguments):
        return []
    wanted = [index for index in (0, 1) if _trained(node.args[index])]
    leaves = [arguments[index].requires_grad_() for index in wanted]
    operator, recorder = node.target, RecordingDispatcher()
    assert isinstance(operator, OpOverload), operator
    # Active tracing and fake-tensor modes must not see these tensors.
    with (
        _disable_current_modes(),
        disable_proxy_modes_tracing(),
        torch.enable_grad(),
        standing_for(node.meta["val"].device),
    ):
        y = compute_product(operator, arguments, {}, recorder)
        if leaves:
            torch.autograd.grad(y, leaves, torch.empty_like(y))
    return recorder.problems


_UNKNOWN = object()


def valueless(argument: Any) -> Any:
    """Return a node's argument with numbers for symbolic sizes and meta tensors for tensors.

    The result is `_UNKNOWN` if a size is not known.
    """
    if isinstance(argument, (list, tuple)):
        result = [valueless(item) for item in argument]
        return _UNKNOWN if any(item is _UNKNOWN for item in result) else result
    value = (
        argument.meta.get("val", argument.meta.get("example_value"))
        if isinstance(argument, fx.Node)
        else argument
    )
    if isinstance(value, torch.SymInt):
        hint = value.node.hint
        return hint if isinstance(hint, int) else _UNKNOWN
    if not isinstance(value, Tensor):
        return value
    lies = outline(value)
    if lies is None:
        return _UNKNOWN
    with _disable_current_modes(), disable_proxy_modes_tracing():
        return torch.empty_strided(lies.shape, lies.strides, dtype=value.dtype, device="meta")


def _trained(argument: Any) -> bool:
    """Return whether an operand may require a gradient: not a graph input that requires none."""
    value = argument.meta.get("val", argument.meta.get("example_value"))
    return not (
        argument.op == "placeholder" and isinstance(value, Tensor) and not value.requires_grad
    )


def computed(node: fx.Node, device: torch.device) -> LayerKernels | None:
    """Return the kernels of a layer, or why torch computes it; None for devices without kernels."""
    result = known_of(device)
    if result.arch is None:
        return LayerKernels(because=result.reason) if device.type == "cuda" else None
    requested = problems_of_layer(node)
    if not requested:
        return LayerKernels(result.arch, because=NONE_LIKE_IT)
    named = zip(_products(node, requested), requested, strict=True)
    return LayerKernels(
        result.arch,
        tuple(LayerProduct(name, problem, decision(problem, device)) for name, problem in named),
    )


def _products(node: fx.Node, problems: Sequence[Problem]) -> list[str]:
    """Return the names of a layer's products, in the order of its problems.

    A complete list is in a fixed order. Otherwise the layouts decide, which are equal for both
    gradients if the rounded one was also written transposed.
    """
    gradients = ("input gradient", "weight gradient")
    names = [
        "output",
        *(name for index, name in enumerate(gradients) if _trained(node.args[index])),
    ]
    return names if len(names) == len(problems) else [_product(problem) for problem in problems]


def _product(problem: Problem) -> str:
    if isinstance(problem, GemmProblem):
        names = {
            ("row", "column"): "output",
            ("row", "row"): "input gradient",
            ("column", "row"): "weight gradient",
        }
        return names.get((problem.a_major, problem.b_major), "product")
    return {"fprop": "output", "dgrad": "input gradient", "wgrad": "weight gradient"}[
        problem.operation
    ]


def prepare(graph: PrecisionGraph) -> str:
    """Compile the kernels of a lowered graph in parallel; return a digest of its decisions, or "".

    Graphs of equal operators compile to the same code only if their digests are equal too. torch
    computes the problems of kernels that fail to compile; `launch_utils.reasons` lists them.
    """
    device = graph.context.device
    if device.type == "cuda" and _layers(graph):
        quantize_launch.tell(device)
    arch = known_of(device).arch
    if arch is None:
        return "no kernels" if device.type == "cuda" else ""
    refused, decided = -1, {}
    while refused != kernel_registry.refusals():
        # If the compiler rejects a kernel, selection falls back to the next candidate.
        refused, decided = kernel_registry.refusals(), _decided(graph, device)
        configs = dict.fromkeys(item.config for item in decided.values() if item.config is not None)
        copiers = [codegen.copier(arch)] if configs else []
        quantizers = _quantizers(graph, arch)
        kernel_registry.prepare_graph([*map(codegen.unit_of, configs), *quantizers, *copiers])
    usable = {
        config for config in configs if kernel_registry.failure(codegen.unit_of(config)) is None
    }
    lines = [
        f"{problem} {item.config.name if item.config in usable and item.config else item.integers}"
        for problem, item in decided.items()
    ]
    # Without a kernel quantizers are decomposed in the compiled graph.
    lines += [f"no {unit.name}" for unit in quantizers if kernel_registry.failure(unit) is not None]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] if lines else ""


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
    from qsync_fx.backend.cuda.codegen import X_TYPES, written

    pairs: dict[tuple[str | None, str | None], None] = {}
    for part in graph.walk():
        for node in part.nodes:
            cast = node_metadata.CAST.get(node)
            if (
                cast is not None
                and cast.part is node_metadata.Part.QUANTIZE
                and cast.format is not None
            ):
                pairs[
                    format_name(part.value(node_metadata.cast_source(node)).dtype),
                    written(cast.format),
                ] = None
    for note in (operator.note for operator in _layers(graph)):
        assert note.precision is not None and note.output is not None
        pairs[
            format_name(note.output.dtype), written(incoming(note.precision, graph.context.device))
        ] = None
    return [
        codegen.quantizer(arch, str(x), fmt) for x, fmt in pairs if x in X_TYPES and fmt is not None
    ]
