"""GPUs that a graph may be looked at for where there is none.

Invariant: within `targeted` all devices of one type count as that GPU, for everybody; what was answered before or within does not
outlast it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from qsync_fx.devices import counted
from qsync_fx.devices.offers import forget
from qsync_fx.errors import DeviceError

TARGETS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "v100": (7, 0),
        "t4": (7, 5),
        "a100": (8, 0),
        "a30": (8, 0),
        "a10": (8, 6),
        "a40": (8, 6),
        "l4": (8, 9),
        "l40s": (8, 9),
        "h100": (9, 0),
        "h200": (9, 0),
    }
)
"""GPUs that a graph may be looked at for where there is none, with their compute capability."""


@contextlib.contextmanager
def targeted(name: str | None, on: torch.device) -> Iterator[None]:
    """Lets all devices of the type of `on` count as the GPU called `name`, one of `TARGETS`; None changes nothing."""
    if name is None:
        yield
        return
    token = counted.target.set((on.type, TARGETS[name]))
    forget()
    try:
        yield
    finally:
        counted.target.reset(token)
        forget()


def check_target(name: str, device: torch.device) -> None:
    """Raises `DeviceError` where code is to be compiled for a device that is not the one at hand."""
    if device.type == "cuda" and counted.capability(device) == TARGETS[name]:
        return
    here = (
        f"a GPU of compute capability {'.'.join(map(str, counted.capability(device)))}"
        if device.type == "cuda"
        else str(device)
    )
    raise DeviceError(
        f"the graph runs on {here}, and its target is {name}",
        where='option "target"',
        do=f"drop it to compile; qsync_fx.explain and qsync inspect show what would run on {name}",
    )
