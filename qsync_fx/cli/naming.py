"""Arguments of classes of devices: NAME=VALUE for one of them, VALUE for all.

Invariant: either there is one value without a name, or each has a name of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from qsync_fx.errors import OptionError, shown


def named(given: Sequence[str], where: str, unnamed: str = "") -> dict[str, str]:
    """Returns values by the names before them; those without by `unnamed` and their number."""
    found: dict[str, str] = {}
    for at, text in enumerate(given):
        name, equals, path = text.partition("=")
        # A path may hold the sign, too: then what stands before it is no plain name.
        name, path = (name, path) if equals and "/" not in name else (unnamed.format(at), text)
        if name in found:
            what = f"{shown(name)} is given twice" if name else "there are several without a name"
            raise OptionError(what, where=where, do="write NAME=FILE, with each name of the cluster's devices once")
        found[name] = path
    if "" in found and len(found) > 1:
        raise OptionError("some have a name and one has none", where=where, do="name all of them, or give one for all")
    return found
