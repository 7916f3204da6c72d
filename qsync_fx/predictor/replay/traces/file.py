"""The JSON of a trace, plain or compressed with gzip.

Invariant: reading ends in a tree or in a `ProfileError`, within the memory that `_LARGEST` allows.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any, Final

from qsync_fx.codec import Path, Schema
from qsync_fx.errors import ProfileError, shown

_LARGEST: Final = 2**30
_CUT: Final = "trace again, with fewer steps where the file is large"


def read(path: Path, noun: str) -> Mapping[str, Any]:
    """Returns the object that a file holds."""
    where = shown(str(path))
    # Its reading of files is all that is used: events of a trace are no dataclass.
    data = Schema(object, noun, ProfileError, _CUT, None, largest=_LARGEST).read(path)
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.open(io.BytesIO(data)) as file:
                data = file.read(_LARGEST + 1)
        except (EOFError, OSError, zlib.error) as error:
            raise ProfileError(f"the {noun} is cut off or damaged: {error}", where=where, do=_CUT) from None
    if len(data) > _LARGEST:
        raise ProfileError(f"the {noun} is larger than {_LARGEST} bytes", where=where, do=_CUT)
    try:
        tree = json.loads(data)
    except json.JSONDecodeError as error:
        ends = error.pos >= len(data.rstrip()) - 1 or error.msg.startswith("Unterminated")
        what = "ends in the middle" if ends else f"is no JSON: {error.msg}"
        place = f"{where}, line {error.lineno}, column {error.colno}"
        raise ProfileError(f"the {noun} {what}", where=place, do=_CUT) from None
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ProfileError(f"the {noun} is no JSON: {error}", where=where, do=_CUT) from None
    if not isinstance(tree, dict):
        raise ProfileError(f"the {noun} is no JSON object", where=where, do=_CUT)
    return tree


def number(value: object) -> float | None:
    """Returns a finite number; None for anything else. Some versions of Kineto write numbers as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None
