"""GPUs that a graph may be looked at for where there is none.

Invariant: within `targeted` all devices of one type count as that GPU, for everybody; what was answered before or within does not
outlast it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from qsync_fx.devices import format_support
from qsync_fx.devices.device_catalog import get, gpus, is_path, names
from qsync_fx.devices.format_support import forget
from qsync_fx.errors import DeviceError


class _Targets(Mapping[str, tuple[int, int]]):
    """The GPUs of the catalog and of the user's files, by name; a path of a file is a name, too."""

    def __getitem__(self, name: str) -> tuple[int, int]:
        if not is_path(name) and name not in names():
            raise KeyError(name)
        capability = get(name).capability
        if capability is None:
            raise KeyError(name)
        return capability

    def __iter__(self) -> Iterator[str]:
        return gpus()

    def __len__(self) -> int:
        return sum(1 for _ in gpus())


TARGETS: Mapping[str, tuple[int, int]] = _Targets()
"""GPUs that a graph may be looked at for where there is none, with their compute capability."""


@contextlib.contextmanager
def targeted(name: str | None, on: torch.device) -> Iterator[None]:
    """Lets all devices of the type of `on` count as the GPU called `name`, one of `TARGETS`; None changes nothing."""
    if name is None:
        yield
        return
    token = format_support.target.set((on.type, TARGETS[name]))
    forget()
    try:
        yield
    finally:
        format_support.target.reset(token)
        forget()


def check_target(name: str, device: torch.device) -> None:
    """Raises `DeviceError` where code is to be compiled for a device that is not the one at hand."""
    if device.type == "cuda" and format_support.capability(device) == TARGETS[name]:
        return
    current = (
        f"a GPU of compute capability {'.'.join(map(str, format_support.capability(device)))}"
        if device.type == "cuda"
        else str(device)
    )
    raise DeviceError(
        f"the graph runs on {current}, and its target is {name}",
        where='option "target"',
        do=f"drop it to compile; qsync_fx.explain and qsync inspect show what would run on {name}",
    )
