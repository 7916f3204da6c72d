"""Tracing of functions in plain torch to graphs that are normalized like the model.

Invariant: the graph computes the function's values and gradients. Tensors that the function
captures (parameters of a module, a buffer that it writes) are inputs of the graph after its
arguments, never constants, so each step reads their current values and they get gradients. A custom
autograd function raises an error, because tracing would lose its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from qsync_fx.passes.tracing.retrace import pre_dispatch


@dataclass(frozen=True)
class TracedPattern:
    """A traced function.

    Attributes:
        module: the graph; its placeholders are the arguments, then `tensors`.
        tensors: the tensors that the function captures, in order.
        outputs: the nodes that the function returns, flattened.
    """

    module: fx.GraphModule
    tensors: tuple[Tensor, ...]
    outputs: tuple[Any, ...]

    @property
    def inputs(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]


class Untraceable(Exception):
    """Raised for a function without a graph; the text has the reason."""


def trace(
    function: Callable[..., Any], values: Sequence[Any], recorded: bool = False
) -> TracedPattern:
    """Trace a function of fake tensors and symbolic numbers under the active fake mode.

    Args:
        function: accepts positional arguments and returns tensors.
        values: its arguments.
        recorded: whether to record the backward pass, to detect custom autograd functions.

    Raises:
        Untraceable: the function fails on these values, or a graph cannot express it.
    """
    mode = active_fake_mode()
    assert mode is not None, "tracing needs a fake mode"
    lift = _Lift()
    inputs = [_recording(value) for value in values] if recorded else values

    def run(*args: Any) -> Any:
        lift.stand_ins = dict(zip(map(id, lift.tensors), args[len(values) :], strict=True))
        with lift:
            returned = function(*args[: len(values)])
        lift.outputs = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        _refuse_autograd_functions(lift.outputs)
        return tuple(lift.outputs)

    while True:
        available = len(lift.tensors)
        stand_ins = [mode.from_tensor(tensor, static_shapes=True) for tensor in lift.tensors]
        try:
            module = pre_dispatch(run, [*inputs, *stand_ins])
        except Untraceable:
            raise
        except Exception as error:
            raise Untraceable(
                f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            ) from error
        if available == len(lift.tensors):  # else the next trace has the captured tensors as inputs
            return _checked(module, lift)


def trace_call(
    function: Callable[..., Any], value: Mapping[str, Any], recorded: bool = False
) -> TracedPattern:
    """Trace a call by name.

    Tensors and symbolic numbers, also inside lists, become inputs of the graph; other values stay
    constant.
    """
    leaves, spec = pytree.tree_flatten(dict(value))
    index = [
        n
        for n, leaf in enumerate(leaves)
        if isinstance(leaf, (Tensor, torch.SymInt, torch.SymFloat))
    ]

    def run(*values: Any) -> Any:
        filled = dict(enumerate(leaves)) | dict(zip(index, values, strict=True))
        return function(**pytree.tree_unflatten(list(filled.values()), spec))

    return trace(run, [leaves[n] for n in index], recorded)


def _checked(module: fx.GraphModule, lift: _Lift) -> TracedPattern:
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    outputs = tuple(pytree.tree_leaves(output.args[0]))
    if not all(isinstance(value, Tensor) for value in lift.outputs) or len(outputs) != len(
        lift.outputs
    ):
        kinds = ", ".join(type(value).__name__ for value in lift.outputs)
        raise Untraceable(
            f"it returns {kinds or 'nothing'}, where a tensor or a tuple of tensors is expected"
        )
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(module, str(node.target)), FakeTensor):
            raise Untraceable(
                "it computes a value outside torch's dispatcher, where tracing cannot see it"
            )
    return TracedPattern(module, tuple(lift.tensors), outputs)


@dataclass
class _Lift(TorchFunctionMode):
    """Mode that replaces captured tensors by graph inputs and records new ones."""

    tensors: list[Tensor] = field(default_factory=list)
    stand_ins: dict[int, Any] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(self._stand_in, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _stand_in(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if id(value) not in self.stand_ins:
            if value.grad_fn is not None:
                raise Untraceable(
                    "it refers to a tensor that was computed with gradients; refer to the inputs of that computation"
                )
            mode = active_fake_mode()
            assert mode is not None
            self.tensors.append(value)
            self.stand_ins[id(value)] = mode.from_tensor(value, static_shapes=True)
        return self.stand_ins[id(value)]


def _recording(value: Any) -> Any:
    """Return an alias whose gradient is recorded if grad mode is on.

    The autograd graph then shows the functions that are called.
    """
    records = torch.is_grad_enabled() and isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if records else value


def _refuse_autograd_functions(outputs: Sequence[Any]) -> None:
    """Raise for custom autograd functions, except for the autograd formulas of torch.library."""
    todo: list[Any] = [output.grad_fn for output in outputs if isinstance(output, Tensor)]
    visited = set(todo)
    while todo:
        node = todo.pop()
        name = type(node).__name__.removesuffix("Backward")
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not name.startswith(
            "GeneratedBackwardFor_"
        ):
            raise Untraceable(
                f"it calls the autograd function {name}, whose backward pass tracing would lose; make it an operator "
                "(torch.library.custom_op, register_autograd), or write x + (f(x) - x).detach() where gradients pass by f"
            )
        result = (
            {before for before, _ in node.next_functions} - visited if node is not None else set()
        )
        visited |= result
        todo += result
