"""Registration of operators in the namespace `qsync`, typed.

Invariant: an operator is registered once, by the module that holds it, when `qsync_fx.backend.operators` is imported.
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
    """Registers an operator.

    Args:
        schema: its name and signature.
        implementations: dispatch key -> function.
        fake: returns outputs without values, of the sizes, strides and types that the implementations give. Only operators that are
            traced through (CompositeImplicitAutograd) need none: other kernels torch would run on fake tensors, where they turn
            symbolic sizes into the numbers at hand, and each batch size is compiled anew.
        tags: what Inductor is told of layouts: by default that any will do. Of an operator with this tag it asks nothing else, so one that
            `qsync_fx.backend.inductor.inductor_config` says the layouts of has none.
    """
    assert fake is not None or set(implementations) == {"CompositeImplicitAutograd"}, (
        f"{schema} needs a fake"
    )
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    for key, implementation in implementations.items():
        _LIBRARY.impl(name, implementation, key)  # type: ignore[no-untyped-call]
    if fake is not None:
        torch.library.register_fake(f"qsync::{name}", fake, lib=_LIBRARY)


def require(condition: bool | torch.SymBool, description: Callable[[], str]) -> None:
    """Raises RuntimeError with `what()` unless a condition on sizes holds; one on symbolic sizes becomes a guard."""
    if (
        condition is not True
    ):  # which takes a tenth of the time, and calls of kernels make five of these
        torch._check(condition, description)  # type: ignore[no-untyped-call]


def differentiate(
    name: str, backward: Callable[..., Any], remember: Callable[[Any, tuple[Any, ...], Any], None]
) -> None:
    """Gives an operator a backward function, `remember(ctx, inputs, output)` being called in the forward."""
    torch.library.register_autograd(
        f"qsync::{name}", backward, setup_context=remember, lib=_LIBRARY
    )
