"""Devices: format support of real devices, and a catalog with cost models of absent ones.

Names are imported on first use (PEP 562), so the catalog can be listed without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from qsync_fx.devices.cpu_features import (
        cpu_multiplies_integers as cpu_multiplies_integers,
        native_integer_unit as native_integer_unit,
        wrong_path as wrong_path,
    )
    from qsync_fx.devices.device_catalog import get as get, names as names
    from qsync_fx.devices.device_model import Device as Device
    from qsync_fx.devices.format_support import (
        TARGETS as TARGETS,
        Kernels as Kernels,
        Support as Support,
        compiles as compiles,
        default_precision as default_precision,
        forget as forget,
        offer as offer,
        row_on as row_on,
        standing_for as standing_for,
        support as support,
        target_of as target_of,
        targeted as targeted,
    )

_HOMES: Final = {
    **dict.fromkeys(("get", "names"), "device_catalog"),
    **dict.fromkeys(
        ("cpu_multiplies_integers", "native_integer_unit", "wrong_path"), "cpu_features"
    ),
    "Device": "device_model",
}
"""Module of each name that is not in format_support.py."""

_FORMAT_SUPPORT: Final = (
    "TARGETS Kernels Support compiles default_precision forget offer row_on standing_for support "
    "target_of targeted"
).split()

__all__ = [*_HOMES, *_FORMAT_SUPPORT]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'format_support')}")
    globals()[name] = value = getattr(module, name)
    return value
