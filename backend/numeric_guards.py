"""Guards against numerical errors: second derivatives, FP16 overflow, mixed normalizations.

`telling` makes unsupported second derivatives raise errors of qsync_fx. `watch` warns about
non-finite FP16 gradients without loss scaling. `widened` computes normalizations of narrow inputs
in FP32 where torch's own kernels run them.

Invariant: `telling` and `watch` do not change computed values.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from qsync_fx.backend.operators.once_differentiable import WAY_OUT, placed, refuse
from qsync_fx.backend.operators.product_utils import short
from qsync_fx.errors import PlanWarning, QSyncError
from qsync_fx.graph.fx_utils import arguments, tensors
from qsync_fx.graph.graph import PrecisionGraph

Compiled = Callable[..., Any]


def places(graph: PrecisionGraph) -> Mapping[int, str]:
    """Return the location of each lowered operator in the user's model, by its stream."""
    result = {}
    for operator in graph.operators():
        if isinstance(operator.node.target, torch._ops.OpOverload):
            stream = arguments(operator.node).get("stream")
            if isinstance(stream, int):
                result[stream] = operator.where
    return result


def telling(compiled: Compiled, graph: PrecisionGraph, inner: str) -> Compiled:
    """Return compiled code that raises errors of qsync_fx for unsupported second derivatives.

    Under the inner compiler "eager", torch differentiates twice, except for lowered operators,
    whose error names their place in the model. AOTAutograd's backward pass has no derivative; its
    error is reworded. If a torch version raises in another way than the tests pin, its own message
    remains. The overhead is one Python call per graph.
    """
    if inner == "eager":
        return _run_placed(compiled, places(graph))
    return _told(compiled, graph.where, inner) if graph.context.training else compiled


def _run_placed(run: Compiled, available: Mapping[int, str]) -> Compiled:
    if not available:
        return run

    @functools.wraps(run)
    def placed_run(*args: Any) -> Any:
        with placed(available):
            return run(*args)

    return placed_run


def _told(compiled: Compiled, where: str, inner: str) -> Compiled:
    """Return `compiled`, which patches its autograd node after the first run.

    The node does not exist earlier.
    """
    done = False

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        nonlocal done
        result = compiled(*args)
        if not done and torch.is_grad_enabled():
            done = _warn_second_order(result, where, inner)
        return result

    return run


def _warn_second_order(outputs: Any, where: str, inner: str) -> bool:
    """Make the AOTAutograd node of the outputs report that it has no second derivative.

    Returns:
        Whether there is such a node.
    """
    node = next(filter(None, map(_compiled_node, tensors(outputs))), None)
    original = getattr(node, "_double_backward", None)
    if node is None or original is None:
        return node is not None

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
    return True


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

    The user may not know that a model computes in FP16, the compute dtype of INT8 and BF16 on GPUs
    before Ampere. A GradScaler hides non-finite gradients from the optimizer, so such gradients
    show its absence. The check synchronizes with the device, so it runs in steps 1, 2, 4, 8 and so
    on. There is one warning per model.
    """
    if model is None or not graph.context.training or model in _watched:
        return
    result = {
        f"{row} (whose range ends at {row.max:.0f})"
        for operator in graph.operators()
        for row in (operator.note.precision, operator.note.output)
        if row is not None and short(row)
    }
    if result:
        _install()
        _watched[model] = " and ".join(sorted(result))


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
    owned = {
        id(p): p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    }
    for model, formats in list(_watched.items()):
        gradients = [p.grad for p in model.parameters() if id(p) in owned and p.grad is not None]
        if gradients and not _finite(gradients):
            del _watched[model]
            _warn_overflow(model, formats, step)


def _finite(gradients: list[torch.Tensor]) -> bool:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        by_device.setdefault(gradient.device, []).append(
            values.detach().abs().amax().float() if values.numel() else values.new_zeros(()).float()
        )
    return all(bool(torch.stack(largest).isfinite().all()) for largest in by_device.values())


def _warn_overflow(model: nn.Module, formats: str, step: int) -> None:
    warnings.warn(
        f"gradients of {type(model).__name__} are not finite in step {step} of its optimizer, "
        f"which applies them to the weights. Operators run in {formats}, and the loss was not "
        "scaled: train with torch.amp.GradScaler, as under autocast, or plan fp32 for the "
        "operators that overflow (qsync docs options)",
        PlanWarning,
        stacklevel=3,
    )


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
    dtype ("expected scalar type BFloat16 but found Float"). On CPU and in Inductor, statistics and
    parameters are FP32 next to a narrow input; widening computes the same.

    Invariant: result dtypes are unchanged; values are FP32 arithmetic, rounded once.
    """
    for item in [part for part in module.modules() if isinstance(part, fx.GraphModule)]:
        result = [node for node in item.graph.nodes if node.target in _NORMS and _mixed(node)]
        for node in result:
            _widen(item.graph, node)
        if result:
            item.recompile()
    return module


def _mixed(node: fx.Node) -> bool:
    x, *others = (_dtype(operand) for operand in node.all_input_nodes)
    return x is not None and any(
        other is not None and other.itemsize > x.itemsize for other in others
    )


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) and value.is_floating_point() else None


def _widen(graph: fx.Graph, node: fx.Node) -> None:
    x: Any = node.args[0] if node.args else node.kwargs["input"]
    dtype = _dtype(x)
    with graph.inserting_before(node):
        wide = graph.call_function(aten.to.dtype, (x, torch.float32))
    node.replace_input_with(x, wide)
    several = node.target in (aten.native_layer_norm.default, aten.native_group_norm.default)
    # Only the first result of a native norm is the activation; mean and deviation are already FP32.
    results = [user for user in node.users if user.args[1] == 0] if several else [node]
    for result in results:
        with graph.inserting_after(result):
            narrow = graph.call_function(aten.to.dtype, (result, dtype))
        result.replace_all_uses_with(
            narrow,
            delete_user_cb=lambda user, narrow=narrow: user is not narrow,  # type: ignore[misc]
        )
