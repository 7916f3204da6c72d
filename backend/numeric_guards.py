"""Second derivatives: who takes them, and what those are told who do not.

With the inner compiler "eager" the graph runs under torch's autograd, operator by operator, and what torch differentiates twice is:
all but the lowered operators, which say where they stand. AOTAutograd compiles a backward pass once, without one of its own.

Invariant: nothing is added to a training step but the call of one Python function a graph. Where a version of torch raises its error in
another way than those that the tests pin, its own words stay.

Training in FP16 without loss scaling: said where gradients that are no numbers reach the optimizer.

FP16 is what a plan asks for, and what INT8 and BF16 are carried in on GPUs before Ampere, so a user may not know of it. A GradScaler
keeps such gradients from the optimizer, which is how its absence shows.

Invariant: nothing that is computed changes. Gradients are looked at in steps 1, 2, 4, 8 and so on of an optimizer, since looking waits for
the device; a model is told of once.

Normalisations of narrow activations where torch's own kernels run one by one on CUDA: `inner_backend="aot_eager"` and
`inner_backend="eager"`.

There, they take parameters of their input's type alone ("expected scalar type BFloat16 but found Float"); on a CPU, and in the code that
Inductor writes, statistics and parameters are FP32 beside a narrow input. Widened, they compute just that.

Invariant: results have the types that they had, and the bits of FP32 arithmetic rounded once.
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
    """Returns where the lowered operators of a graph stand in the user's model, by their streams."""
    result = {}
    for operator in graph.operators():
        if isinstance(operator.node.target, torch._ops.OpOverload):
            stream = arguments(operator.node).get("stream")
            if isinstance(stream, int):
                result[stream] = operator.where
    return result


def telling(compiled: Compiled, graph: PrecisionGraph, inner: str) -> Compiled:
    """Returns compiled code whose second derivatives, where there are none, say so in our words."""
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
    """The node of autograd's graph is there once the code has run: what it does for a second derivative is put in place then, once."""
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
    """Whether the outputs hang on a node of AOTAutograd's, whose second derivatives say now that there are none."""
    node = next(filter(None, map(_compiled_node, tensors(outputs))), None)
    original = getattr(node, "_double_backward", None)
    if node is None or original is None:
        return node is not None

    def problem() -> QSyncError:
        return QSyncError(
            f'there is no second derivative of compiled code: "{inner}" compiles the backward pass, which has none of its own',
            where=where,
            do=f"compile what is differentiated twice with {WAY_OUT}, or with fp32",
        )

    def reported(ctx: Any, run: Callable[[Any], Any], args: list[Any]) -> Any:
        result: tuple[Any, ...] = original(ctx, run, args)
        gradients = tuple(g if isinstance(g, Tensor) else None for g in result)
        return refuse(gradients, gradients, problem)

    node._double_backward = staticmethod(reported)
    return True


def _compiled_node(tensor: Tensor) -> Any:
    """Returns the class of the node of AOTAutograd's that a result comes from, through views of it; None for a result without one."""
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
    """Has the optimizers of a model watched that trains with operators in a format of little range."""
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
    # One that is fused with the scaling is called with gradients of any kind, and told apart which to skip.
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
        f"gradients of {type(model).__name__} are not finite in step {step} of its optimizer, which takes them into the weights. "
        f"Operators run in {formats} here, and nothing has scaled the loss: train with torch.amp.GradScaler, as under autocast, or plan "
        "fp32 for what overflows (docs/options.md#fp16-and-gradscaler)",
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
    """Returns a graph, bodies within it too, with its normalisations of mixed types in FP32; changes it in place."""
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
    # Of what a native norm returns, the first is the activation; mean and deviation are FP32 as they are.
    results = [user for user in node.users if user.args[1] == 0] if several else [node]
    for result in results:
        with graph.inserting_after(result):
            narrow = graph.call_function(aten.to.dtype, (result, dtype))
        result.replace_all_uses_with(
            narrow,
            delete_user_cb=lambda user, narrow=narrow: user is not narrow,  # type: ignore[misc]
        )
