"""What is known of devices: what each offers a number format, as what GPU one may count, and how long work takes on one of the catalog.

`offers` answers for a format, `counted` says as what a device counts, `targets` assumes a GPU that is not there. `get("t4")` is a device of
the catalog (`device`), or of a file of the user's (`known`, `reading`), with the constants (`constants`) that `analytic` reckons with.
"""

from qsync_fx.devices.counted import Kernels, standing_for, target_of
from qsync_fx.devices.device import Device
from qsync_fx.devices.integers import cpu_multiplies_integers, native_integer_unit, wrong_path
from qsync_fx.devices.known import get, names
from qsync_fx.devices.offers import Support, compiles, default_precision, forget, offer, row_at, row_on, support
from qsync_fx.devices.targets import TARGETS, check_target, targeted

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
