"""Guards against numerical errors: second derivatives, FP16 overflow, mixed normalizations.

`telling` makes unsupported second derivatives raise errors of qsync_fx, `watch` warns about
non-finite FP16 gradients without loss scaling: they do not change values. `widened` computes
normalizations of narrow inputs in FP32 where torch's own kernels run them.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from qsync_fx.backend.operators.once_differentiable import WAY_OUT, placed, refuse
from qsync_fx.backend.operators.product_utils import short
from qsync_fx.errors import PlanWarning, QSyncError
from qsync_fx.graph.fx_utils import arguments, tensors
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.torch_internals import OpOverload

Compiled = Callable[..., Any]


def telling(compiled: Compiled, graph: PrecisionGraph, inner: str) -> Compiled:
    """Return compiled code that raises errors of qsync_fx for unsupported second derivatives.

    Under the inner compiler "eager", torch differentiates twice, except for lowered operators,
    whose error names their place in the model. AOTAutograd's error is reworded.
    """
    if inner == "eager":
        return _with_places(compiled, graph)
    if graph.context.training:
        return _reworded(compiled, graph.where, inner)
    return compiled


def _with_places(compiled: Compiled, graph: PrecisionGraph) -> Compiled:
    """Run `compiled` with the location of each lowered operator in the model, by its stream."""
    places: dict[int, str] = {}
    for operator in graph.operators():
        overload = isinstance(operator.node.target, OpOverload)
        if overload and isinstance(stream := arguments(operator.node).get("stream"), int):
            places[stream] = operator.where
    if not places:
        return compiled

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        with placed(places):
            return compiled(*args)

    return run


def _reworded(compiled: Compiled, where: str, inner: str) -> Compiled:
    """Return `compiled`, which patches its autograd node after the first run creates it."""
    done = False

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        nonlocal done
        result = compiled(*args)
        if not done and torch.is_grad_enabled():
            nodes = filter(None, map(_compiled_node, tensors(result)))
            if (node := next(nodes, None)) is not None:
                done = True
                _refuse_second_order(node, where, inner)
        return result

    return run


def _refuse_second_order(node: Any, where: str, inner: str) -> None:
    """Make an AOTAutograd node report that it has no second derivative."""
    original = node._double_backward

    def problem() -> QSyncError:
        return QSyncError(
            f'compiled code has no second derivative: "{inner}" compiles the backward pass, '
            "which is not differentiable",
            where=where,
            do=f"compile a model that is differentiated twice with {WAY_OUT}, or with fp32",
        )

    def reported(ctx: Any, run: Callable[[Any], Any], args: list[Any]) -> Any:
        result: tuple[Any, ...] = original(ctx, run, args)
        gradients = tuple(g if isinstance(g, Tensor) else None for g in result)
        return refuse(gradients, gradients, problem)

    node._double_backward = staticmethod(reported)


def _compiled_node(tensor: Tensor) -> Any:
    """Return the class of a result's AOTAutograd node, also through views; None without one."""
    node: Any = tensor.grad_fn
    while node is not None:
        kind = getattr(node, "_forward_cls", None)
        if hasattr(kind, "_double_backward"):
            return kind
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return None


_watched: Final[weakref.WeakKeyDictionary[nn.Module, str]] = weakref.WeakKeyDictionary()
_steps: Final[weakref.WeakKeyDictionary[Optimizer, int]] = weakref.WeakKeyDictionary()


def watch(graph: PrecisionGraph, model: nn.Module | None) -> None:
    """Check the gradients of a model in optimizer steps, if it uses a format of small range.

    A GradScaler hides non-finite gradients from the optimizer, so such gradients show its absence.
    The check synchronizes with the device, so it runs in steps 1, 2, 4, 8 and so on. There is one
    warning per model.
    """
    if model is None or not graph.context.training or model in _watched:
        return
    formats = {
        f"{row} (whose range ends at {row.max:.0f})"
        for operator in graph.operators()
        for row in (operator.note.precision, operator.note.output)
        if row is not None and short(row)
    }
    if formats:
        _install()
        _watched[model] = " and ".join(sorted(formats))


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before_a_step)


def _before_a_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _watched:
        return
    step = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    # A fused optimizer receives non-finite gradients from GradScaler, and `found_inf` to skip them.
    if step & (step - 1) or getattr(optimizer, "found_inf", None) is not None:
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model, formats in list(_watched.items()):
        gradients = [p.grad for p in model.parameters() if id(p) in stepped and p.grad is not None]
        if gradients and not _finite(gradients):
            del _watched[model]
            warnings.warn(
                f"gradients of {type(model).__name__} are not finite in step {step} of its "
                f"optimizer, which applies them to the weights. Operators run in {formats}, and "
                "the loss was not scaled: train with torch.amp.GradScaler, as under autocast, or "
                "plan fp32 for the operators that overflow (qsync docs formats)",
                PlanWarning,
                stacklevel=2,
            )


def _finite(gradients: list[Tensor]) -> bool:
    largest: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        values = gradient.detach()
        if values.numel():
            largest.setdefault(values.device, []).append(values.abs().amax().float())
    return all(bool(torch.stack(of_device).isfinite().all()) for of_device in largest.values())


aten = torch.ops.aten

_NORMS = (
    aten.layer_norm.default,
    aten.group_norm.default,
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
)


def widened(module: fx.GraphModule) -> fx.GraphModule:
    """Widen normalizations of mixed dtypes to FP32, in place and in nested graphs too.

    torch's CUDA kernels, which run under "aot_eager" and "eager", require parameters in the input's
    dtype. Result dtypes are unchanged; values are FP32 arithmetic, rounded once.
    """
    for part in list(module.modules()):
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.target in _NORMS and _mixed(node):
                    _widen(part.graph, node)
            part.recompile()
    return module


def _mixed(node: fx.Node) -> bool:
    x, *others = (_dtype(operand) for operand in node.all_input_nodes)
    if x is None:
        return False
    return any(other is not None and other.itemsize > x.itemsize for other in others)


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) and value.is_floating_point() else None


def _widen(graph: fx.Graph, node: fx.Node) -> None:
    x: Any = arguments(node)["input"]
    dtype = _dtype(x)
    with graph.inserting_before(node):
        wide = graph.call_function(aten.to.dtype, (x, torch.float32))
    node.replace_input_with(x, wide)
    results = [node]
    if node.target in (aten.native_layer_norm.default, aten.native_group_norm.default):
        # Only the first result is the activation; mean and deviation are already FP32.
        results = [user for user in node.users if user.args[1] == 0]
    for result in results:
        with graph.inserting_after(result):
            narrow = graph.call_function(aten.to.dtype, (result, dtype))
        result.replace_all_uses_with(narrow)
        narrow.update_arg(0, result)
