"""What is known of a compiled library, kept beside it as JSON.

Invariant: a Manifest that was read from a file is valid, field for field. Where the file came from does not matter: a file that does not
hold exactly this raises `ValueError` with the reason.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

FILE: Final = "manifest.json"
_LARGEST: Final = 64 * 1024
_LIMIT: Final = 2**53


@dataclass(frozen=True)
class Resources:
    """What a unit's kernels use, the largest of each: registers a thread; bytes of shared memory a threadblock, of stack, of spills."""

    registers: int
    shared_memory: int
    stack: int
    spills: int


@dataclass(frozen=True)
class Manifest:
    """
    Attributes:
        content, tools: keys, see `keys`.
        name, arch: of the unit.
        sha256, size: of the library; "" and 0 where there is none because it was refused.
        refused: why the library must not be used, such as spills; "" where it may.
        opcode: the instruction that was found in the machine code; "" where none was asked for, or nothing could look.
        seconds: that compiling took.
        created: seconds since 1970.
        compilers: versions and flags, for people.
    """

    content: str
    tools: str
    name: str
    arch: str
    sha256: str
    size: int
    refused: str
    resources: Resources
    opcode: str
    seconds: float
    created: float
    compilers: str

    def text(self) -> str:
        """Returns the manifest as its file holds it."""
        return json.dumps({"format": 1, **asdict(self)}, indent=1, sort_keys=True) + "\n"


def read(path: Path) -> Manifest:
    """Returns the manifest in a file; raises `OSError` where it cannot be read, `ValueError` for anything that it should not say."""
    with open(path, "rb") as file:
        raw = file.read(_LARGEST + 1)
    if len(raw) > _LARGEST:
        raise ValueError("it is too long")
    return parse(raw.decode("utf-8"))


def parse(text: str) -> Manifest:
    """Returns the manifest that a text holds; raises `ValueError` for anything else."""
    try:
        fields = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    names = _object(fields, {"format", *Manifest.__dataclass_fields__})
    if names.pop("format") != 1 or isinstance(fields["format"], bool | float):
        raise ValueError("it is of another format")
    resources = _object(names.pop("resources"), set(Resources.__dataclass_fields__))
    manifest = Manifest(
        resources=Resources(**{name: _whole(name, value) for name, value in resources.items()}),
        size=_whole("size", names.pop("size")),
        seconds=_number("seconds", names.pop("seconds")),
        created=_number("created", names.pop("created")),
        **{name: _string(name, value) for name, value in names.items()},
    )
    for name, pattern in _PATTERNS.items():
        if not re.fullmatch(pattern, getattr(manifest, name), flags=re.DOTALL):
            raise ValueError(f"{name} is not what it should be")
    if bool(manifest.refused) == bool(manifest.sha256):
        raise ValueError("a library is there or it was refused, not both")
    return manifest


_PATTERNS: Final = {
    "content": "[0-9a-f]{64}",
    "tools": "[0-9a-f]{64}",
    "name": r"[A-Za-z0-9_]{1,200}",
    "arch": r"sm_\d{2,3}[a-z]?",
    "sha256": "(?:[0-9a-f]{64})?",
    "opcode": r"[A-Z0-9_.]{0,60}",
}


def _object(value: object, names: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != names:
        raise ValueError(f"it should have the fields {', '.join(sorted(names))}")
    return dict(value)


def _string(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > 4096 or not value.isprintable():
        raise ValueError(f"{name} is no short text")
    return value


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LIMIT:
        raise ValueError(f"{name} is no whole number")
    return value


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _LIMIT:
        raise ValueError(f"{name} is no number")
    return float(value)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")
