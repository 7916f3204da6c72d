"""Utilities for fx graphs: sources and arguments of nodes, fake values, and switches of state.

A switch is a call that changes state of the process (grad mode, autocast, ...). A switch is never
dropped, although its result has no reader. `_EFFECTS` lists the calls of Dynamo's context managers;
`mark_unlisted` adds other calls.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from qsync_fx import torch_internals as internals
from qsync_fx.formats import Precision, precision_of
from qsync_fx.graph import node_metadata


@dataclass(frozen=True)
class Source:
    """A line of the user's model."""

    file: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def source_of(node: fx.Node) -> Source | None:
    """Return the source line of a node: the innermost frame of its stack trace."""
    code = ""
    for line in reversed((node.meta.get("stack_trace") or "").splitlines()):
        frame = _FRAME.match(line)
        if frame is not None:
            return Source(frame["file"], int(frame["line"]), code)
        code = line.strip() or code
    return None


_FRAME = re.compile(r'\s*File "(?P<file>.*?)", line (?P<line>\d+)')


def function_name(node: fx.Node) -> str:
    """Return the `__name__` of a node's target; "" if it has none."""
    return str(getattr(node.target, "__name__", ""))


def target_name(node: fx.Node) -> str:
    """Return a short name of a node's target, "aten.linear.default" or the function's name."""
    if isinstance(node.target, internals.OpOverload):
        return str(node.target)
    return function_name(node) or str(node.target)


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of an operator's node by name, in schema order, with defaults."""
    target = node.target
    assert isinstance(target, internals.OpOverload), node.format_node()
    return filled(target, node.args, node.kwargs)


def filled(
    target: internals.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all arguments of a call by name, in schema order, None without value and default."""
    schema = target._schema.arguments
    names = [argument.name for argument in schema]
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return dict.fromkeys(names) | defaults | dict(kwargs) | dict(zip(names, args, strict=False))


def argument_at(value: Sequence[Any], place: int | tuple[int, int]) -> Any:
    """Return an argument of a call, or an item of a list argument."""
    return value[place] if isinstance(place, int) else value[place[0]][place[1]]


def nodes_in(value: object) -> list[fx.Node]:
    """Return the nodes in an argument, including nested lists."""
    return _instances(value, fx.Node)


T = TypeVar("T")


def _instances(value: object, kind: type[T]) -> list[T]:
    if isinstance(value, (list, tuple)):
        return [result for item in value for result in _instances(item, kind)]
    return [value] if isinstance(value, kind) else []


_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2", torch.int8: "i8",
    torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.bool: "b1",
}  # fmt: skip


def is_float(value: Any) -> bool:
    """Return whether a value is a tensor of a dtype that a plan may change, unlike Float8."""
    return isinstance(value, torch.Tensor) and precision_of(value.dtype) is not None


def storage_of(tensor: torch.Tensor) -> Hashable:
    """Return a key of a tensor's storage, which is not reused after the storage is freed."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except NotImplementedError:
        return id(tensor)  # sparse tensors and vmap's tensors show no storage


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a node's value."""
    return _instances(value, torch.Tensor)


def memory_order(value: Any) -> list[int] | None:
    """Return the dimensions of a tensor from the outermost in memory to the innermost.

    Symbolic sizes are replaced by their hints, without a guard. Of equal strides the dimension of
    size 1 is the inner one, as in new tensors of any memory format. The result is None for a tensor
    that is not dense in memory or has no elements, and for unbacked sizes.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    sizes, strides = list(map(_hint, value.shape)), list(map(_hint, value.stride()))
    if None in sizes or None in strides or 0 in sizes:
        return None
    order = sorted(range(value.dim()), key=lambda dim: (-strides[dim], -sizes[dim]))
    expected = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != expected:
            return None
        expected *= sizes[dim]
    return order


def same_strides(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have equal strides, except along dimensions of size 1.

    The result is True for different shapes, or if one is not dense: its copy supports every view.
    """
    orders = memory_order(first), memory_order(second)
    if None in orders or first.shape != second.shape:
        return True
    ours, theirs = (
        [dim for dim in order or () if _hint(first.shape[dim]) != 1] for order in orders
    )
    return ours == theirs


def _hint(number: Any) -> Any:
    return number.node.hint if isinstance(number, torch.SymInt) else number


def format_of(value: Any) -> Precision | None:
    """Return the format of the first floating-point tensor in a value; None if there is none."""
    return next((precision_of(t.dtype) for t in tensors(value) if is_float(t)), None)


def describe(value: Any) -> str:
    """Return the short text of a value: `f32[8, 16]`, `s0`, `(f32[8], i64[8])`."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(size) for size in value.shape)
        return f"{_SHORT.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{sizes}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(describe(item) for item in value) + ")"
    if isinstance(value, (int, float, str, torch.SymInt)):
        return str(value)
    # The repr of other objects contains an address, which differs between runs.
    return type(value).__name__


def expression(size: Any) -> Any:
    """Return a size as an integer, or as a sympy expression if it is symbolic."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def fake_run(
    mode: internals.FakeTensorMode | None, *others: AbstractContextManager[Any]
) -> ExitStack:
    """Return an entered context to run operators on fake tensors of `mode`, inside others."""
    contexts: list[Any] = list(others)
    if mode is not None:
        # Composite operators need the Python dispatcher for symbolic sizes.
        contexts += [internals.enable_python_dispatcher(), mode]
        if mode.shape_env is not None:
            contexts.append(mode.shape_env.ignore_fresh_unbacked_symbols())
    result = ExitStack()
    for context in contexts:
        result.enter_context(context)
    return result


class Effect(Enum):
    """The state that a call changes, as far as passes treat it differently."""

    GRAD = "whether gradients are recorded: grad mode and inference mode"
    AUTOCAST = "autocast"
    TRACED = "other state on which tracing depends"
    DEFERRED = "other state on which tracing above autograd does not depend"
    LEVEL = "the stack of functorch's and of forward-mode levels"
    UNLISTED = "state of a kind that this table does not list"


_EFFECTS: Mapping[str, Effect] = {
    name: effect
    for effect, names in {
        Effect.GRAD: "_set_grad_enabled _enter_inference_mode _exit_inference_mode",
        Effect.AUTOCAST: "_enter_autocast _exit_autocast",
        # The default dtype, and whether algorithms have to be deterministic.
        Effect.TRACED: "set_default_dtype _set_deterministic_algorithms",
        # Kernels that may run (SDPA, TF32), forward-mode gradients, saved-tensor hooks.
        Effect.DEFERRED: "_backend_from_string _sdpa_kernel set_float32_matmul_precision "
        "_set_fwd_grad_enabled _saved_tensors_hooks_disable _saved_tensors_hooks_enable",
        Effect.LEVEL: "_vmap_increment_nesting _vmap_decrement_nesting _grad_increment_nesting "
        "_grad_decrement_nesting _jvp_increment_nesting _jvp_decrement_nesting "
        "_func_increment_nesting _func_decrement_nesting _enter_dual_level _exit_dual_level "
        "set_inplace_requires_grad_allowed push_dynamic_layer_stack pop_dynamic_layer_stack",
    }.items()
    for name in names.split()
}


def effect_of(node: fx.Node) -> Effect | None:
    """Return the state that a node changes; None for a node that computes a value."""
    if node.op != "call_function" or isinstance(node.target, internals.OperatorBase):
        return None
    if node in node_metadata.UNLISTED:
        return Effect.UNLISTED
    return _EFFECTS.get(function_name(node))


def is_switch(node: fx.Node) -> bool:
    """Return whether a node changes state rather than computes a value."""
    return effect_of(node) is not None


def switches_grad(node: fx.Node) -> bool:
    """Return whether a node changes grad mode or inference mode."""
    return effect_of(node) is Effect.GRAD


def affects_tracing(node: fx.Node) -> bool:
    """Return whether tracing must execute a node, because later nodes trace differently."""
    return effect_of(node) not in (None, Effect.DEFERRED, Effect.LEVEL)


def level_step(node: fx.Node) -> int:
    """Return by how much a node changes the number of levels: 1, 0 or -1."""
    if effect_of(node) is not Effect.LEVEL:
        return 0
    steps = {"increment": 1, "enter": 1, "decrement": -1, "exit": -1}
    return next((step for word, step in steps.items() if word in function_name(node)), 0)


def mark_unlisted(graph: fx.Graph) -> None:
    """Mark calls in Dynamo's graph with an effect that `_EFFECTS` does not list.

    Dynamo records the value of each node that computes one. A call without a value whose operands
    and readers are only such calls can have no other purpose, and leaves no record in a trace.
    """
    switches = {node for node in graph.nodes if is_switch(node)}
    operators = (internals.OperatorBase, internals.OpOverloadPacket)
    candidates = {
        node
        for node in graph.nodes
        if node.op == "call_function" and not isinstance(node.target, operators)
        if node.meta.get("example_value", node.meta.get("val")) is None
    } - switches
    while computing := {
        node
        for node in candidates
        if not (candidates | switches).issuperset([*node.all_input_nodes, *node.users])
    }:
        candidates -= computing
    for node in candidates:
        node_metadata.UNLISTED[node] = True
