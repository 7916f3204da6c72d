"""Operators called one by one, with operands that the compiler would convert as it fuses them.

Invariant: a result has the type of the activation, and the bits of FP32 arithmetic rounded once, on every device.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

_NORMS: Final = (torch.ops.aten.layer_norm.default, torch.ops.aten.group_norm.default)
"""Of which torch's kernels for CUDA take parameters of their input's type alone."""


def called(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str | None = None) -> Any:
    """Returns what an operator returns; `device` is the type of the one that it is called for, by default where its operands lie."""
    x = args[0] if args else None
    if target in _NORMS and isinstance(x, Tensor) and (device or x.device.type) == "cuda":
        others = [v.dtype for v in (*args[1:], *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point()]
        if any(dtype.itemsize > x.dtype.itemsize for dtype in others):
            return target(x.float(), *args[1:], **kwargs).to(x.dtype)
    return target(*args, **kwargs)
