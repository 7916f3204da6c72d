"""Operators of codecs, fused by Inductor into kernels of a GPU, where it can.

Functions of rows are compiled once for any number of rows. Where that fails, as without Triton, they run operator by operator with the same
bytes, in several times as long, which is said once a process.

Invariant: nothing is compiled for the CPU, whose values have kernels of ours.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
import torch._dynamo
from torch import Tensor

_failed: Final[list[str]] = []


def fused(function: Callable[..., Any], rows: Tensor, wanted: bool = True) -> Callable[..., Any]:
    """Returns what computes as a function does, whose first tensors have as many rows as `rows`, on its device."""
    # One row is little, and a compiler would take it for a case of its own.
    if rows.device.type != "cuda" or not wanted or _failed or rows.shape[0] == 1 or torch.compiler.is_compiling():
        return function
    return functools.partial(run, function)


def run(function: Callable[..., Any], *given: Any) -> Any:
    """Returns what a function of tensors, and behind them other arguments, returns: fused, if that is possible."""
    tensors = [value for value in given if isinstance(value, Tensor)]
    try:
        return _compiled(function, given[len(tensors) :])(*tensors)
    except Exception as error:  # noqa: BLE001  whatever a compiler ends with: the operators are there
        if not _failed:
            said = next(iter(str(error).splitlines()), "")
            _failed.append(said)
            warnings.warn(
                "gradients on a GPU are coded operator by operator, with the same bytes, in several times as long, as Inductor could not "
                f"fuse that ({type(error).__name__}: {said}): install the Triton that belongs to this torch",
                stacklevel=2,
            )
        return function(*given)


@functools.cache
def _compiled(function: Any, others: tuple[Any, ...]) -> Callable[..., Any]:
    """Returns a function of tensors that is compiled for any number of rows, and for these other arguments alone."""
    # What Dynamo has seen of a code, by its name, makes numbers that differ between calls symbols, and there are too many soon.
    name = f"{function.__name__} of {others}"
    own = types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
    inner: Any = torch.compile(own, fullgraph=True)

    def called(*tensors: Tensor) -> Any:
        for tensor in tensors:
            if tensor.shape[0] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return inner(*tensors, *others)

    return called
