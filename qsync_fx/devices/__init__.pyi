"""Names of the package, which __init__.py imports on first use."""

from qsync_fx.devices.device_catalog import get as get, names as names
from qsync_fx.devices.device_model import Device as Device
from qsync_fx.devices.format_support import (
    TARGETS as TARGETS,
    Support as Support,
    support as support,
)
