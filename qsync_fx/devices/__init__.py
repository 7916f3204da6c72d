"""Devices: format support of real devices, and a catalog with cost models of absent ones.

`support` (format_support.py) returns how a device runs a number format, and `targeted`
(target_override.py) assumes a GPU that is not present. `get("t4")` (device_catalog.py) returns a
`Device` (device_model.py) of the catalog or of a user's file, which predicts durations by the
roofline model (roofline.py) from the constants of its file (spec.py).

Names are imported on first use (PEP 562), so the catalog can be listed without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from qsync_fx.devices.cpu_features import (
        cpu_multiplies_integers,
        native_integer_unit,
        wrong_path,
    )
    from qsync_fx.devices.device_catalog import get, names
    from qsync_fx.devices.device_model import Device
    from qsync_fx.devices.format_support import (
        Kernels,
        Support,
        compiles,
        default_precision,
        forget,
        offer,
        row_at,
        row_on,
        standing_for,
        support,
        target_of,
    )
    from qsync_fx.devices.target_override import TARGETS, check_target, targeted

_HOMES: Final = {
    **dict.fromkeys(("Kernels", "standing_for", "target_of"), "format_support"),
    **dict.fromkeys(("Device",), "device_model"),
    **dict.fromkeys(
        ("cpu_multiplies_integers", "native_integer_unit", "wrong_path"), "cpu_features"
    ),
    **dict.fromkeys(("get", "names"), "device_catalog"),
    **dict.fromkeys(
        (
            "Support",
            "compiles",
            "default_precision",
            "forget",
            "offer",
            "row_at",
            "row_on",
            "support",
        ),
        "format_support",
    ),
    **dict.fromkeys(("TARGETS", "check_target", "targeted"), "target_override"),
}

__all__ = [
    "TARGETS",
    "Device",
    "Kernels",
    "Support",
    "check_target",
    "compiles",
    "cpu_multiplies_integers",
    "default_precision",
    "forget",
    "get",
    "names",
    "native_integer_unit",
    "offer",
    "row_at",
    "row_on",
    "standing_for",
    "support",
    "target_of",
    "targeted",
    "wrong_path",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
