"""Target override: analysis of a graph for a GPU that is not present.

Invariant: inside `targeted`, all devices of one type count as that GPU. Cached answers from before
or inside it are cleared.
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
    """GPUs of the catalog and of user files, by name or by path of the file."""

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
"""Available target GPUs and their compute capability."""


@contextlib.contextmanager
def targeted(name: str | None, on: torch.device) -> Iterator[None]:
    """Treat all devices of the type of `on` as the GPU `name` of `TARGETS`; None has no effect."""
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
    """Raise `DeviceError` if the local device is not the GPU that code is to be compiled for."""
    if device.type == "cuda" and format_support.capability(device) == TARGETS[name]:
        return
    current = (
        f"a GPU of compute capability {'.'.join(map(str, format_support.capability(device)))}"
        if device.type == "cuda"
        else str(device)
    )
    raise DeviceError(
        f"the graph runs on {current}, but its target is {name}",
        where='option "target"',
        do="remove the option to compile; use it only with qsync_fx.explain and qsync inspect",
    )
