"""Calls that change state of the process (grad mode, autocast, ...) rather than compute a value.

Invariant: such a call is never dropped, although its result has no reader: a context that is entered
and never left changes the rest of the program. The table lists the calls of Dynamo's context managers
by the state that they change; `mark_unlisted` adds the calls that the table does not list. Works on
graphs as Dynamo writes them and as passes leave them.

What a node of an fx.Graph says of itself: the line of the user's model that it comes from, what it calls, and with what.

Invariant: works on any node, whether passes know it or not; what reads a node changes none.

What a node's value is: a fake tensor, several, or none; which format it has, and how texts of graphs show it.

Invariant: works on any value, and on symbolic sizes; it computes nothing.

Runs operators on fake tensors.

Invariant: nothing is computed, and no size that depends on values is left with a name that nothing has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

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
    """Returns the line of the user's model that a node comes from: the innermost frame of its stack trace."""
    lines = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()
    ]
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith('File "') and '", line ' in lines[index]:
            file, _, rest = lines[index].removeprefix('File "').partition('", line ')
            code = (
                lines[index + 1]
                if index + 1 < len(lines) and not lines[index + 1].startswith("File ")
                else ""
            )
            return Source(file, int(rest.partition(",")[0]), code)
    return None


def target_name(node: fx.Node) -> str:
    """Returns a short name of what a node calls: "aten.linear.default" for operators, the function's name otherwise."""
    if isinstance(node.target, str):
        return node.target
    return (
        str(node.target)
        if isinstance(node.target, torch._ops.OpOverload)
        else getattr(node.target, "__name__", str(node.target))
    )


def arguments(node: fx.Node) -> dict[str, Any]:
    """Returns every argument of an operator's node by its name, in the order of the schema, defaults filled in.

    A node's own `args` end where the call's did: what was left out is not there, and what was given by name stands elsewhere.
    """
    target = node.target
    assert isinstance(target, torch._ops.OpOverload), node.format_node()
    return filled(target, node.args, node.kwargs)


def filled(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns every argument of a call by its name, in the order of the schema; one without a default that is not given is None."""
    schema = target._schema.arguments
    inputs = {argument.name: value for argument, value in zip(schema, args, strict=False)}
    return {
        a.name: inputs[a.name]
        if a.name in inputs
        else kwargs.get(a.name, a.default_value if a.has_default_value() else None)
        for a in schema
    }


def argument_at(value: Sequence[Any], place: int | tuple[int, int]) -> Any:
    """Returns the argument at a place among those of a call: one of them, or an item of one that is a list."""
    return value[place] if isinstance(place, int) else value[place[0]][place[1]]


def nodes_in(value: object) -> list[fx.Node]:
    """Returns the nodes in an argument: itself, or those in a list."""
    if isinstance(value, (list, tuple)):
        return [node for item in value for node in nodes_in(item)]
    return [value] if isinstance(value, fx.Node) else []


def map_arguments(node: fx.Node, change: Callable[[int, Any], Any]) -> None:
    """Puts `change(position in the schema, argument)` in the place of each argument that a call gives, by position or by name."""
    positions = {name: index for index, name in enumerate(arguments(node))}
    node.args = tuple(change(index, value) for index, value in enumerate(node.args))
    node.kwargs = {name: change(positions[name], value) for name, value in node.kwargs.items()}


_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2", torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.bool: "b1",
}  # fmt: skip


def is_float(value: Any) -> bool:
    """Whether a value is a tensor of a floating-point type that torch computes in: one that a plan may change.

    Float8 and Float4 only store: the model has quantized there by itself, and hardly an operator takes them.
    """
    return isinstance(value, torch.Tensor) and precision_of(value.dtype) is not None


def storage_of(tensor: torch.Tensor) -> int:
    """Returns what tells the memory of a tensor from that of others, as long as these live."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return id(tensor)  # sparse tensors, and those of vmap, show none


def is_alias(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors lie in one memory."""
    return storage_of(first) == storage_of(second)


def tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a node's value: one, several, or none."""
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def memory_order(value: Any) -> list[int] | None:
    """Return the dimensions of a tensor from the outermost in memory to the innermost.

    Symbolic sizes are replaced by the sizes of the example, without a guard. Of equal strides the
    dimension of size 1 is the inner one, as in new tensors of any memory format.

    Returns:
        None for a tensor that is not dense in memory or has no elements, and for unbacked sizes.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    sizes, strides = (
        [_hint(number) for number in numbers] for numbers in (value.shape, value.stride())
    )
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
    """Return whether two tensors of one shape have equal strides, except along dimensions of size 1.

    The result is True if one is not dense: its copy is dense, and supports every view of the original.
    """
    orders = [memory_order(value) for value in (first, second)]
    if None in orders or first.shape != second.shape:
        return True
    of_first, of_second = (
        [dim for dim in order or () if _hint(first.shape[dim]) != 1] for order in orders
    )
    return of_first == of_second


def _hint(number: Any) -> Any:
    return number.node.hint if isinstance(number, torch.SymInt) else number


def format_of(value: Any) -> Precision | None:
    """Returns the format of a node's value, that of its first floating-point tensor; None where there is none."""
    floats = [t for t in tensors(value) if is_float(t)]
    return precision_of(floats[0].dtype) if floats else None


def describe(value: Any) -> str:
    """Returns the short text of a value: `f32[8, 16]`, `s0`, `(f32[8], i64[8])`."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(size) for size in value.shape)
        return f"{_SHORT.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{sizes}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(describe(item) for item in value) + ")"
    # Other objects print their address, which differs from run to run.
    return (
        str(value) if isinstance(value, (int, float, str, torch.SymInt)) else type(value).__name__
    )


def expression(size: Any) -> Any:
    """Returns a size as a whole number, or as a sympy expression where it is symbolic."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


class FakeRun:
    """A context in which operators run on the fake tensors of `mode`, within others. A class: graphs enter it for every node."""

    def __init__(self, mode: FakeTensorMode | None, *others: AbstractContextManager[Any]) -> None:
        self._contexts: list[Any] = list(others)
        if mode is not None:
            # Without the Python dispatcher operators that are composed of others take no symbolic sizes.
            self._contexts += [enable_python_dispatcher(), mode]
            if mode.shape_env is not None:
                self._contexts.append(mode.shape_env.ignore_fresh_unbacked_symbols())

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *exc: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*exc)


class Effect(Enum):
    """The state that a call changes."""

    GRAD = "whether gradients are recorded: grad mode and inference mode"
    AUTOCAST = "autocast"
    DTYPE = "the default dtype of floating-point tensors"
    DETERMINISTIC = "whether algorithms have to be deterministic"
    KERNELS = "which kernels may run: backends of SDPA, TF32"
    FORWARD_GRAD = "whether forward-mode gradients are recorded"
    HOOKS = "whether saved-tensor hooks are allowed"
    LEVEL = "the stack of functorch's and of forward-mode levels"
    UNLISTED = "state of a kind that this table does not list"


_CALLS: Mapping[Effect, tuple[str, ...]] = MappingProxyType(
    {
        Effect.GRAD: ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode"),
        Effect.AUTOCAST: ("_enter_autocast", "_exit_autocast"),
        Effect.DTYPE: ("set_default_dtype",),
        Effect.DETERMINISTIC: ("_set_deterministic_algorithms",),
        Effect.KERNELS: ("_backend_from_string", "_sdpa_kernel", "set_float32_matmul_precision"),
        Effect.FORWARD_GRAD: ("_set_fwd_grad_enabled",),
        Effect.HOOKS: ("_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable"),
        Effect.LEVEL: (
            "_vmap_increment_nesting",
            "_vmap_decrement_nesting",
            "_grad_increment_nesting",
            "_grad_decrement_nesting",
            "_jvp_increment_nesting",
            "_jvp_decrement_nesting",
            "_func_increment_nesting",
            "_func_decrement_nesting",
            "_enter_dual_level",
            "_exit_dual_level",
            "set_inplace_requires_grad_allowed",
            "push_dynamic_layer_stack",
            "pop_dynamic_layer_stack",
        ),
    }
)
_EFFECT_OF: Mapping[str, Effect] = {
    name: effect for effect, names in _CALLS.items() for name in names
}

_DEFERRED = (Effect.KERNELS, Effect.FORWARD_GRAD, Effect.HOOKS, Effect.LEVEL)
"""State that tracing above autograd does not depend on."""


def effect_of(node: fx.Node) -> Effect | None:
    """Return which state a node changes; None for a node that computes a value."""
    if node.op != "call_function" or isinstance(node.target, torch._ops.OperatorBase):
        return None
    listed = _EFFECT_OF.get(getattr(node.target, "__name__", ""))
    return listed or (Effect.UNLISTED if node in node_metadata.UNLISTED else None)


def is_switch(node: fx.Node) -> bool:
    """Return whether a node changes state rather than computes a value."""
    return effect_of(node) is not None


def switches_grad(node: fx.Node) -> bool:
    """Return whether a node changes whether gradients are recorded."""
    return effect_of(node) is Effect.GRAD


def affects_tracing(node: fx.Node) -> bool:
    """Return whether nodes after this one trace differently, so that tracing has to execute it."""
    effect = effect_of(node)
    return effect is not None and effect not in _DEFERRED


def level_step(node: fx.Node) -> int:
    """Return by how much a node changes the number of levels: 1, 0 or -1."""
    name = getattr(node.target, "__name__", "") if effect_of(node) is Effect.LEVEL else ""
    if "increment_nesting" in name or name == "_enter_dual_level":
        return 1
    return -1 if "decrement_nesting" in name or name == "_exit_dual_level" else 0


def mark_unlisted(graph: fx.Graph) -> None:
    """Mark the calls in a graph of Dynamo's that have an effect which the table does not list.

    Dynamo notes the value of each node that computes one. A call without a value that reads and feeds
    only such calls can have no other purpose, and leaves no record in a trace.
    """
    calls = {node for node in graph.nodes if is_switch(node) or _is_bare_call(node)}
    while True:
        computing = {
            node
            for node in calls
            if not is_switch(node) and not calls.issuperset(_neighbours(node))
        }
        if not computing:
            break
        calls -= computing
    for node in calls:
        if not is_switch(node):
            node_metadata.UNLISTED[node] = True


def _is_bare_call(node: fx.Node) -> bool:
    operators = (torch._ops.OperatorBase, torch._ops.OpOverloadPacket)
    calls = node.op == "call_function" and not isinstance(node.target, operators)
    return calls and node.meta.get("example_value", node.meta.get("val")) is None


def _neighbours(node: fx.Node) -> list[fx.Node]:
    return [*node.all_input_nodes, *node.users]
