"""What is known of devices: what each offers a number format, as what GPU one may count, and how long work takes on one of the catalog.

`offers` answers for a format, `counted` says as what a device counts, `targets` assumes a GPU that is not there. `get("t4")` is a device of
the catalog (`device`), or of a file of the user's (`known`, `reading`), with the constants (`constants`) that `analytic` reckons with.

Invariant: each name is imported when it is first used (PEP 562), so that the names of devices can be checked without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from qsync_fx.devices.counted import Kernels, standing_for, target_of
    from qsync_fx.devices.device import Device
    from qsync_fx.devices.integers import cpu_multiplies_integers, native_integer_unit, wrong_path
    from qsync_fx.devices.known import get, names
    from qsync_fx.devices.offers import Support, compiles, default_precision, forget, offer, row_at, row_on, support
    from qsync_fx.devices.targets import TARGETS, check_target, targeted

_HOMES: Final = {
    **dict.fromkeys(("Kernels", "standing_for", "target_of"), "counted"),
    **dict.fromkeys(("Device",), "device"),
    **dict.fromkeys(("cpu_multiplies_integers", "native_integer_unit", "wrong_path"), "integers"),
    **dict.fromkeys(("get", "names"), "known"),
    **dict.fromkeys(
        ("Support", "compiles", "default_precision", "forget", "offer", "row_at", "row_on", "support"), "offers"
    ),
    **dict.fromkeys(("TARGETS", "check_target", "targeted"), "targets"),
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
