"""Typed registration of operators in the namespace `qsync`.

Invariant: the module that defines an operator registers it once, when `qsync_fx.backend.operators`
is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

_LIBRARY: Final = torch.library.Library("qsync", "FRAGMENT")  # type: ignore[no-untyped-call]


def define(
    schema: str,
    implementations: Mapping[str, Callable[..., Any]],
    fake: Callable[..., Any] | None = None,
    *,
    tags: Sequence[torch.Tag] = (torch.Tag.flexible_layout,),
) -> None:
    """Register an operator.

    Args:
        schema: name and signature.
        implementations: dispatch key -> function.
        fake: returns empty outputs with the sizes, strides and dtypes of the implementations. Only
            CompositeImplicitAutograd operators need none: torch would run other kernels on fake
            tensors, which specializes symbolic sizes and recompiles for each batch size.
        tags: layout constraint for Inductor, by default none. This tag overrides other constraints,
            so operators that `qsync_fx.backend.inductor.inductor_config` constrains omit it.
    """
    assert fake is not None or set(implementations) == {"CompositeImplicitAutograd"}, (
        f"{schema} needs a fake implementation"
    )
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    for key, implementation in implementations.items():
        _LIBRARY.impl(name, implementation, key)  # type: ignore[no-untyped-call]
    if fake is not None:
        torch.library.register_fake(f"qsync::{name}", fake, lib=_LIBRARY)


def require(condition: bool | torch.SymBool, description: Callable[[], str]) -> None:
    """Raise RuntimeError unless `condition` is true; a SymBool becomes a guard."""
    # Ten times faster than `torch._check`; a kernel call makes five checks.
    if condition is not True:
        torch._check(condition, description)  # type: ignore[no-untyped-call]


def differentiate(
    name: str, backward: Callable[..., Any], remember: Callable[[Any, tuple[Any, ...], Any], None]
) -> None:
    """Register the backward function of an operator; `remember` is its setup_context."""
    torch.library.register_autograd(
        f"qsync::{name}", backward, setup_context=remember, lib=_LIBRARY
    )
