"""Machine code of the AMX kernel, also on machines without AMX.

GCC 12.2 omitted all but 8 bytes of the stores to the tile configuration, and the module crashed on
every processor with AMX.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess

import pytest

from qsync_fx import _C

SHAPES = struct.pack("<BB14x16H16B", 1, 0, *([64] * 8 + [0] * 8), *([16] * 8 + [0] * 8))
"""Palette 1, eight tiles of 16 rows of 64 bytes: Intel's manual, LDTILECFG."""


def test_tiles_are_configured_by_data() -> None:
    objdump, readelf = shutil.which("objdump"), shutil.which("readelf")
    if objdump is None or readelf is None:
        pytest.skip("binutils are not here")
    code = subprocess.run(
        [objdump, "-d", "--no-show-raw-insn", _C.__file__],
        capture_output=True,
        text=True,
        check=True,
    )
    configured = re.findall(r"\bldtilecfg\s+(.*)", code.stdout)
    if not configured:
        pytest.skip("this module was built without AMX")
    places = [re.search(r"#\s*([0-9a-f]+)", operand) for operand in configured]
    assert all(places), f"tiles are configured from constant data, not from the stack: {configured}"
    sections = subprocess.run(
        [readelf, "-SW", _C.__file__], capture_output=True, text=True, check=True
    ).stdout
    with open(_C.__file__, "rb") as file:
        content = file.read()
    for place in places:
        assert place is not None
        address = int(place[1], 16)
        (offset,) = [
            address - int(start, 16) + int(start_in_file, 16)
            for start, start_in_file, size in re.findall(
                r"PROGBITS\s+([0-9a-f]+) ([0-9a-f]+) ([0-9a-f]+)", sections
            )
            if int(start, 16) <= address < int(start, 16) + int(size, 16)
        ]
        assert content[offset : offset + 64] == SHAPES
