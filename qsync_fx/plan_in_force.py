"""The plan that a set of options means on a device.

Invariant: there is always one. Options with neither a plan nor a precision mean what runs best on the device.
"""

from __future__ import annotations

import torch

from qsync_fx.devices import default_precision
from qsync_fx.options import Options
from qsync_fx.plan import Plan


def plan_in_force(options: Options, device: torch.device) -> Plan:
    """Returns the user's plan, or the uniform one that the options ask for."""
    if options.plan is not None:
        return options.plan
    return Plan.uniform(options.precision or default_precision(device).name)
