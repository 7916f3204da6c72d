"""Calls of ATen operators from the samples of PyTorch's operator database.

Invariant: every call is one node of a pre-dispatch trace of a sample, so composite operators are
one call.
"""

from __future__ import annotations

import functools
import gc
import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Call:
    """Operator and the values of its arguments."""

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# Entries that read values of tensors during tracing, or need a device or storage.
UNTRACEABLE = frozenset(
    "item allclose equal sparse.sampled_addmm sparse.mm jiterator_unary jiterator_binary "
    "jiterator_4inputs_with_extra_args "
    "jiterator_binary_return_by_ref jiterator_2inputs_2outputs nn.functional.gaussian_nll_loss".split()
)


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.calls: list[Call] = []

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, torch._ops.OpOverload):
            self.calls.append(Call(target, args, kwargs))
        return super().call_function(target, args, kwargs)


@functools.cache
def calls(samples: int) -> tuple[Call, ...]:
    """Return the calls of the first `samples` FP32 CPU samples of every entry."""
    entries = [
        e for e in op_db if e.name not in UNTRACEABLE and torch.float32 in e.supported_dtypes("cpu")
    ]
    recorded: list[Call] = []
    # A sample generator changes the autograd mode when it is collected, possibly during a trace.
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Tracing costs more than the traced code, so many entries share a trace.
            for start in range(0, len(entries), 50):
                recorded += _calls(
                    [(e, s) for e in entries[start : start + 50] for s in _first(e, samples)]
                )
    finally:
        gc.enable()
    return tuple(recorded)


def _first(entry: Any, samples: int) -> list[Any]:
    torch.manual_seed(0)
    # `entry.sample_inputs` would search the stack for the calling test at every sample.
    return list(
        itertools.islice(entry.sample_inputs_func(entry, "cpu", torch.float32, False), samples)
    )


def _calls(cases: list[tuple[Any, Any]]) -> list[Call]:
    """Return the calls of (entry, sample) pairs, in one trace."""
    leaves, spec = tree_flatten([(sample.input, sample.args, sample.kwargs) for _, sample in cases])
    tensors = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}

    def run(*values: torch.Tensor) -> list[Any]:
        filled = dict(zip(tensors, values, strict=True))
        inputs = tree_unflatten(
            [filled.get(index, leaf) for index, leaf in enumerate(leaves)], spec
        )
        return [
            entry(first, *args, **kwargs)
            for (entry, _), (first, args, kwargs) in zip(cases, inputs, strict=True)
        ]

    recorder = _Recorder(make_fx(run, pre_dispatch=True)(*tensors.values()))
    recorder.run(*tensors.values())
    return recorder.calls
