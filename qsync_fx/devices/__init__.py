"""Devices: format support of real devices, and a catalog with cost models of absent ones.

Names are imported on first use (PEP 562), so the catalog can be listed without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from qsync_fx.devices.device_catalog import get as get, names as names
    from qsync_fx.devices.device_model import Device as Device
    from qsync_fx.devices.format_support import (
        TARGETS as TARGETS,
        Support as Support,
        support as support,
    )

_HOMES: Final = {
    **dict.fromkeys(("get", "names"), "device_catalog"),
    **dict.fromkeys(("TARGETS", "Support", "support"), "format_support"),
    "Device": "device_model",
}
"""Module of each name."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    globals()[name] = value = getattr(module, name)
    return value
