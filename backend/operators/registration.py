"""Typed registration of operators in the namespace `qsync`.

Invariant: the module that defines an operator registers it once, when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch

from qsync_fx.torch_internals import _check

_LIBRARY: Final = torch.library.Library("qsync", "FRAGMENT")  # type: ignore[no-untyped-call]

F = TypeVar("F", bound=Callable[..., Any])


def define(
    schema: str,
    key: str = "CompositeExplicitAutograd",
    fake: Callable[..., Any] | None = None,
    *,
    tags: Sequence[torch.Tag] = (torch.Tag.flexible_layout,),
    **others: Callable[..., Any],
) -> Callable[[F], F]:
    """Register a function as an operator; the decorated name is the operator.

    Args:
        fake: returns empty outputs with the sizes, strides and dtypes of the implementations; by
            default the function, unless that is a kernel, which would specialize symbolic sizes.
        tags: layout constraint for Inductor, by default none. This tag overrides other constraints,
            so operators that `qsync_fx.backend.inductor.inductor_config` constrains omit it.
        others: implementations for other dispatch keys.
    """
    name = schema.partition("(")[0]
    assert fake or key.startswith("Composite"), f"{schema} needs a fake implementation"

    def register(function: F) -> F:
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))  # type: ignore[no-untyped-call]
        for dispatch_key, implementation in {key: function, **others}.items():
            _LIBRARY.impl(name, implementation, dispatch_key)  # type: ignore[no-untyped-call]
        if key != "CompositeImplicitAutograd":
            torch.library.register_fake(f"qsync::{name}", fake or function, lib=_LIBRARY)
        operator: F = getattr(torch.ops.qsync, name).default
        return operator

    return register


def require(condition: bool | torch.SymBool, description: Callable[[], str]) -> None:
    """Raise RuntimeError unless `condition` is true; a SymBool becomes a guard."""
    # Ten times faster than `torch._check`; a kernel call makes five checks.
    if condition is not True:
        _check(condition, description)  # type: ignore[no-untyped-call]


def differentiate(
    name: str, backward: Callable[..., Any], remember: Callable[[Any, tuple[Any, ...], Any], None]
) -> None:
    """Register the backward function of an operator; `remember` is its setup_context."""
    torch.library.register_autograd(
        f"qsync::{name}", backward, setup_context=remember, lib=_LIBRARY
    )
