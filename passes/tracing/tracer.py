"""What functions call above autograd and autocast: make_fx before dispatch, and what goes past the dispatcher under another name.

Invariant: what is traced computes what the function computes, to the last bit, in training too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from qsync_fx.passes.tracing.fused import UNFUSED

_OPERATOR_OF = {torch._C._autograd._get_data_attr: torch.ops.aten.data.default}  # type: ignore[attr-defined]
"""Functions in Dynamo's graphs that go past the dispatcher, where tracing sees nothing, and the operators that do the same within it."""


def pre_dispatch(function: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule:
    """Returns the ATen operators that a function calls on these values, as they are before autograd and autocast see them."""
    with fx.traceback.preserve_node_meta():
        traced: fx.GraphModule = make_fx(function, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)(
            *values
        )
    return traced


class Tracking(fx.Interpreter):
    """Knows the name of the node that it runs, so that a failure can be laid at its door."""

    at = ""

    def run_node(self, n: fx.Node) -> Any:
        self.at = n.name
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in UNFUSED and not args[0].is_nested:
            return UNFUSED[target](*args, **kwargs)
        return super().call_function(_OPERATOR_OF.get(target, target), args, kwargs)
