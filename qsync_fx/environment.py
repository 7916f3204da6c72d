"""Environment variables, which no other Python module of qsync_fx reads.

cpp/module.cpp reads QSYNC_CPU_ISA. An empty variable counts as unset. An invalid value of a
qsync_fx variable raises an `OptionError` that names it; an invalid value of a launcher's variable
is ignored with a warning.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from qsync_fx.errors import OptionError, nearest, shown

_SWITCH: Final = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}


def text(*names: str) -> str:
    """Return the value of the first variable in `names` that is set, or ""."""
    return next((value for name in names if (value := os.environ.get(name))), "")


def switch(name: str) -> bool:
    """Return whether a feature is on, which is the default: 1, true or on, or 0, false or off."""
    value = text(name)
    if not value:
        return True
    if value.lower() not in _SWITCH:
        raise _invalid(name, value, "set it to 1, true or on, or to 0, false or off")
    return _SWITCH[value.lower()]


def choice(name: str, choices: Sequence[str]) -> str:
    """Return the value of a variable, one of `choices`; the first choice is the default."""
    value = text(name) or choices[0]
    if value not in choices:
        raise _invalid(name, value, nearest(value, choices))
    return value


def count(name: str) -> int | None:
    """Return the value of a variable as an integer from 1 to 9999; None if it is unset."""
    value = text(name)
    if not value:
        return None
    if not re.fullmatch(r"[1-9]\d{0,3}", value):
        raise _invalid(name, value, "set it to an integer from 1 to 9999")
    return int(value)


def paths(name: str) -> list[Path]:
    """Return the paths in a variable, separated as in PATH."""
    return [Path(part).expanduser() for part in text(name).split(os.pathsep) if part]


def launcher_number(name: str) -> int | None:
    """Return a number from a launcher (RANK, WORLD_SIZE); None if it is invalid or unset."""
    value = text(name)
    if not value:
        return None
    if not re.fullmatch(r"\d{1,9}", value, flags=re.ASCII):
        warnings.warn(
            f"qsync_fx ignores the environment variable {name}: {shown(value)} is not an integer",
            stacklevel=2,
        )
        return None
    return int(value)


def child_environment(**changes: str) -> dict[str, str]:
    """Return the environment for a child process: this process's variables with changes."""
    return {**os.environ, **changes}


@contextlib.contextmanager
def default(name: str, value: str) -> Iterator[None]:
    """Set a variable temporarily, for a library that reads it, unless the user has set it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _invalid(name: str, value: str, do: str) -> OptionError:
    where = f"environment variable {name}"
    return OptionError(f"{name} cannot be {shown(value)}", where=where, do=do)
