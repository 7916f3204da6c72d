"""How much memory, as people write it: bytes, "4 GB", or "30%" of what a device has.

Invariant: what is understood is a number of bytes or a share above 0, finite, and nothing else is.
"""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

Memory = float | int | str

_UNITS: Final = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30}
WAYS: Final = 'give bytes, "4 GB" or "30%"'
"""What to do about one that is none."""


class Size(NamedTuple):
    """
    Attributes:
        amount: of bytes, or of the whole, 1 being all of it.
        share: which of the two.
    """

    amount: float
    share: bool = False


def memory_size(memory: Memory) -> Size | None:
    """Returns how much that is; None where it is no memory."""
    if not isinstance(memory, str):
        return Size(float(memory)) if memory > 0 and math.isfinite(memory) else None
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%|[KMG]?i?B)\s*", memory, flags=re.IGNORECASE)
    if found is None or found[2].upper() == "IB" or not math.isfinite(float(found[1])) or not float(found[1]):
        return None
    if found[2] == "%":
        return Size(float(found[1]) / 100, share=True)
    return Size(float(found[1]) * _UNITS[found[2].upper()])
