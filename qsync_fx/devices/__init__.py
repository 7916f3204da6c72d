"""What is known of devices: what each offers a number format, as what GPU one may count, and how long work takes on one of the catalog.

`offers` answers for a format, `counted` says as what a device counts, `targets` assumes a GPU that is not there. `get("t4")` is a device of
the catalog (`device`), or of a file of the user's (`known`, `reading`), with the constants (`constants`) that `analytic` reckons with.

Invariant: each name is imported when it is first used (PEP 562), so that the names of devices can be checked without importing torch.
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
