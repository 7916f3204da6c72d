"""What is known of a compiled library, kept beside it as JSON.

Invariant: a Manifest that was read from a file is valid, field for field. Where the file came from does not matter: a file that does not
hold exactly this raises `ValueError` with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from qsync_fx.codec import Check, Schema
from qsync_fx.errors import KernelError

FILE: Final = "manifest.json"
_LIMIT: Final = 2**53
_LONGEST: Final = 4096
_PATTERNS: Final = {
    "content": "[0-9a-f]{64}",
    "tools": "[0-9a-f]{64}",
    "name": r"[A-Za-z0-9_]{1,200}",
    "arch": r"sm_\d{2,3}[a-z]?",
    "sha256": "(?:[0-9a-f]{64})?",
    "opcode": r"[A-Z0-9_.]{0,60}",
}


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
        return MANIFEST.encode(self)


def read(path: Path) -> Manifest:
    """Returns the manifest in a file; raises `OSError` where it cannot be read, `ValueError` for anything that it should not say."""
    with open(path, "rb") as file:
        return parse(file.read(MANIFEST.largest + 1))


def parse(text: str | bytes) -> Manifest:
    """Returns the manifest that a text holds; raises `ValueError` for anything else."""
    try:
        return MANIFEST.decode(text)
    except KernelError as error:
        raise ValueError(str(error)) from None


def _resources(found: Resources) -> str | None:
    return _beyond(vars(found))


def _manifest(found: Manifest) -> str | None:
    texts = {name: value for name, value in vars(found).items() if isinstance(value, str)}
    for name, value in texts.items():
        if len(value) > _LONGEST or not value.isprintable():
            return f"{name} is no short text"
        if not re.fullmatch(_PATTERNS.get(name, ".*"), value, flags=re.DOTALL):
            return f"{name} is not what it should be"
    if bool(found.refused) == bool(found.sha256):
        return "a library is there or it was refused, not both"
    return _beyond({"size": found.size, "seconds": found.seconds, "created": found.created})


def _beyond(numbers: Mapping[str, float]) -> str | None:
    return next((f"{name} cannot be {value}" for name, value in numbers.items() if not 0 <= value < _LIMIT), None)


_CHECKS: Final[Mapping[Any, Check]] = {Resources: _resources, Manifest: _manifest}
MANIFEST: Final = Schema(
    Manifest,
    noun="manifest",
    error=KernelError,
    remedy="qsync kernels clear",
    name=None,
    largest=64 * 1024,
    checks=_CHECKS,
)
