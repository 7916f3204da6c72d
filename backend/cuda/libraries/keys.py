"""What a compiled library depends on, as keys.

Two of them, since a machine without a compiler has only the first. The content key is of what a library computes: the source, the
headers of ours that it includes, the target, the C interface. The tools key is of how it was compiled: CUTLASS, nvcc, the host compiler,
the flags. Invariant: whatever may change a library's machine code is in one of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Final

from qsync_fx import environment
from qsync_fx.backend.cuda.libraries import abi
from qsync_fx.backend.cuda.source.unit import Unit
from qsync_fx.backend.cuda.tools.toolchain import Headers, Toolchain
from qsync_fx.errors import QSyncError
from qsync_fx.files import write_text

TEMPLATES: Final = Path(__file__).resolve().parents[1] / "templates"
"""Headers of ours: cpp/cutlass in a clone."""

NVCC_VARIABLES: Final = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
"""Environment variables that nvcc reads flags from."""


def content_key(unit: Unit) -> str:
    """Returns 64 hexadecimal digits of everything that decides what a unit's library computes."""
    return _digest(
        {
            "abi": abi.VERSION,
            "arch": unit.arch,
            "name": unit.name,
            "interface": unit.interface,
            "opcode": unit.opcode,
            "source": unit.source,
            "headers": included(unit.source),
        }
    )


def included(source: str) -> dict[str, str]:
    """Returns the digests of those headers in cpp/cutlass that a source includes, directly or through others, by name."""
    found: dict[str, str] = {}
    todo = [source]
    while todo:
        for name in re.findall(r'^\s*#\s*include\s*["<]([\w./-]+)[">]', todo.pop(), flags=re.MULTILINE):
            header = TEMPLATES / name
            if name not in found and header.is_file():
                text = header.read_text(encoding="utf-8")
                found[name] = hashlib.sha256(text.encode()).hexdigest()
                todo.append(text)
    return found


def tools_key(tools: Toolchain, flags: tuple[str, ...], memory: Path | None = None) -> str:
    """Returns 64 hexadecimal digits of everything that decides how a unit is compiled.

    Args:
        flags: those of nvcc, without paths.
        memory: a folder of this user's that remembers the digest of headers, whose 27 MB take 200 ms to read.
    """
    return _digest(
        {
            "nvcc": tools.nvcc.version,
            "host": tools.host.version,
            "cutlass": tools.cutlass.version,
            "headers": headers_digest(tools.cutlass, memory),
            "flags": flags,
            "environment": [environment.text(name) for name in NVCC_VARIABLES],
        }
    )


def headers_digest(headers: Headers, memory: Path | None = None) -> str:
    """Returns 64 hexadecimal digits of the names and contents of all files under the folders of headers.

    With `memory`, what was computed before is taken while the files have the sizes and times that they had then.
    """
    # Strings, since paths as objects take ten times as long, and this is on the way to every kernel.
    files = [
        (path[len(folder) :], path, os.stat(path))
        for folder in map(str, headers.folders)
        for base, _, names in os.walk(folder)
        for path in (f"{base}/{name}" for name in names)
    ]
    files.sort()
    state = _digest([(path, found.st_size, found.st_mtime_ns) for _, path, found in files])
    remembered = None if memory is None else memory / f"headers-{state[:32]}"
    if remembered is not None and remembered.is_file():
        text = remembered.read_text(encoding="utf-8", errors="replace").strip()
        if re.fullmatch(r"[0-9a-f]{64}", text):
            return text
    digest = hashlib.sha256()
    for name, path, found in files:
        digest.update(f"{name}\0{found.st_size}\0".encode())
        digest.update(Path(path).read_bytes())
    if remembered is not None:
        try:
            write_text(remembered, digest.hexdigest() + "\n")
        except QSyncError:
            # A folder that cannot be written only costs time, here; whoever stores a library there says so.
            return digest.hexdigest()
    return digest.hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
