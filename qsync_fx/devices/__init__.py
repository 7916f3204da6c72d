"""What is known of devices: what each offers a number format, and as what GPU one may count.

`offers` answers for a format, `counted` says as what a device counts, `targets` assumes a GPU that is not there.
"""

from qsync_fx.devices.counted import Kernels, standing_for, target_of
from qsync_fx.devices.integers import cpu_multiplies_integers
from qsync_fx.devices.offers import Support, compiles, default_precision, forget, offer, row_on, support
from qsync_fx.devices.targets import TARGETS, check_target, targeted

__all__ = [
    "TARGETS",
    "Kernels",
    "Support",
    "check_target",
    "compiles",
    "cpu_multiplies_integers",
    "default_precision",
    "forget",
    "offer",
    "row_on",
    "standing_for",
    "support",
    "target_of",
    "targeted",
]
