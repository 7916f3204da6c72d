"""As what a device counts: what it is, or a GPU that is assumed in its place; and who knows of kernels for it.

Invariant: whoever asks for a compute capability asks here, so that all that is decided for an assumed GPU is decided for the same one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Kernels:
    """Whether there are kernels of ours for a CUDA device.

    Attributes:
        arch: what they are compiled for; None where there are none.
        reason: why not.
        formats: names of the encodings that they multiply with themselves.
        capability: of a device that is assumed and not there; None for one that torch knows.
    """

    arch: str | None
    reason: str
    formats: frozenset[str] = frozenset()
    capability: tuple[int, int] | None = None


def _not_loaded(device: torch.device) -> Kernels:
    return Kernels(None, "the backend is not loaded")


class Offer:
    """Who knows of kernels: the backend, which stands above this module and says so when it is imported."""

    kernels: Callable[[torch.device], Kernels] = staticmethod(_not_loaded)
    forget: tuple[Callable[[], object], ...] = ()


target: ContextVar[tuple[str, tuple[int, int]] | None] = ContextVar("qsync_target", default=None)
"""The type of devices that count as another, and its compute capability."""


def target_of(device: torch.device) -> tuple[int, int] | None:
    """Returns the compute capability that a device counts as having; None where it counts as what it is."""
    found = target.get()
    return found[1] if found is not None and found[0] == device.type else None


ANY = (99, 0)
"""The capability of a device that is no GPU, and compiles everything."""


def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a CUDA device, or the one that a device counts as having."""
    assumed = target_of(device) or (Offer.kernels(device).capability if device.type != "meta" else None)
    if assumed is not None:
        return assumed
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.cuda.is_available() else ANY


@contextlib.contextmanager
def standing_for(device: torch.device) -> Iterator[None]:
    """Lets tensors without values (of the type "meta") count as ones of `device`."""
    token = target.set(("meta", found)) if (found := capability(device)) != ANY else None
    try:
        yield
    finally:
        if token is not None:
            target.reset(token)
