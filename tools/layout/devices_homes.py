"""usage: devices_homes.py TREE - the table of lazily imported names of qsync_fx.devices follows the moves."""

import sys
from pathlib import Path

p = Path(sys.argv[1]) / "qsync_fx/devices/__init__.py"
s = p.read_text()
for a, b in (
    ('"counted"', '"format_support"'),
    ('"device")', '"device_model")'),
    ('"device"),', '"device_model"),'),
    ('"integers"', '"cpu_features"'),
    ('"known"', '"device_catalog"'),
    ('"offers"', '"format_support"'),
    ('"targets"', '"target_override"'),
):
    s = s.replace(a, b)
p.write_text(s)
