"""Compiled libraries on disk, and which of them may be loaded.

    ROOT/CONTENT/TOOLS/manifest.json, NAME.so, NAME.cu

CONTENT and TOOLS are keys (see `keys`). The user's own cache is searched by both. Folders in QSYNC_KERNELS_PATH hold libraries built ahead
of time, perhaps elsewhere with other compilers, and are searched first, by content alone; so is the cache where there is no compiler.

Invariant: what `find` returns has a valid manifest of the key asked for and a library with the size and digest that it says. Entries are
written elsewhere and renamed, so they are whole or absent. A library is code: folders that others can write to are refused.

What a compiled library depends on, as keys.

Two of them, since a machine without a compiler has only the first. The content key is of what a library computes: the source, the
headers of ours that it includes, the target, the C interface. The tools key is of how it was compiled: CUTLASS, nvcc, the host compiler,
the flags. Invariant: whatever may change a library's machine code is in one of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from filelock import FileLock

from qsync_fx import environment
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import library, library as manifests
from qsync_fx.backend.cuda.kernel_build.library import Manifest
from qsync_fx.backend.cuda.toolchain import Headers, Toolchain
from qsync_fx.errors import KernelError, QSyncError
from qsync_fx.serialization.atomic_files import caches, write_text

TEMPLATES: Final = Path(__file__).resolve().parents[1] / "templates"
"""Headers of ours: cpp/cutlass in a clone."""

NVCC_VARIABLES: Final = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
"""Environment variables that nvcc reads flags from."""


def content_key(unit: TranslationUnit) -> str:
    """Returns 64 hexadecimal digits of everything that decides what a unit's library computes."""
    return _digest(
        {
            "abi": library.VERSION,
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
    result: dict[str, str] = {}
    todo = [source]
    while todo:
        for name in re.findall(
            r'^\s*#\s*include\s*["<]([\w./-]+)[">]', todo.pop(), flags=re.MULTILINE
        ):
            header = TEMPLATES / name
            if name not in result and header.is_file():
                text = header.read_text(encoding="utf-8")
                result[name] = hashlib.sha256(text.encode()).hexdigest()
                todo.append(text)
    return result


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
    state = _digest([(path, item.st_size, item.st_mtime_ns) for _, path, item in files])
    remembered = None if memory is None else memory / f"headers-{state[:32]}"
    if remembered is not None and remembered.is_file():
        text = remembered.read_text(encoding="utf-8", errors="replace").strip()
        if re.fullmatch(r"[0-9a-f]{64}", text):
            return text
    digest = hashlib.sha256()
    for name, path, result in files:
        digest.update(f"{name}\0{result.st_size}\0".encode())
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


_STALE: Final = 24 * 3600.0
"""Seconds after which what a killed process left behind is removed."""


@dataclass(frozen=True)
class CacheEntry:
    """A library in a folder. `library` is there unless the manifest says why it was refused."""

    folder: Path
    manifest: Manifest

    @property
    def library(self) -> Path:
        return self.folder / f"{self.manifest.name}.so"


def root() -> Path:
    """Returns the folder of the user's compiled kernels, which need not exist."""
    return caches() / "kernels"


def ahead_of_time() -> list[Path]:
    """Returns the folders in QSYNC_KERNELS_PATH; raises `KernelError` for one that is not there or that anybody may write to."""
    folders = [Path(os.path.abspath(path)) for path in environment.paths("QSYNC_KERNELS_PATH")]
    for folder in folders:
        if not folder.is_dir():
            raise KernelError(
                "this folder of kernels does not exist",
                where=f"QSYNC_KERNELS_PATH: {folder}",
                do="correct or unset QSYNC_KERNELS_PATH; qsync kernels build --output makes such folders",
            )
        if folder.stat().st_mode & stat.S_IWOTH:
            raise _open_to_others(folder)
    return folders


def prepare(folder: Path) -> Path:
    """Makes a folder for libraries, checks that it is the user's alone to write to, and returns it; raises `KernelError`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        result = folder.stat()
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise KernelError(
            f"kernels cannot be kept: {error.strerror or error}",
            where=str(folder),
            do="set QSYNC_CACHE_DIR to a folder of yours on a disk with space",
        ) from error
    if result.st_uid != os.geteuid():
        raise KernelError(
            f"this folder belongs to another user (number {result.st_uid}): what is in it would be run as you",
            where=str(folder),
            do="set QSYNC_CACHE_DIR to a folder of yours; to use kernels that another one has built, set QSYNC_KERNELS_PATH",
        )
    if result.st_mode & stat.S_IWOTH:
        raise _open_to_others(folder)
    return folder


def _open_to_others(folder: Path) -> KernelError:
    return KernelError(
        "anybody may write to this folder, and what is in it would be run as you",
        where=str(folder),
        do=f"chmod o-w {folder}, if you trust what is in it",
    )


def find(folder: Path, content: str, tools: str | None) -> CacheEntry | None:
    """Returns the entry of this key in a folder; with `tools` None, the newest one that was not refused."""
    if tools is not None:
        return usable(folder / content / tools, content, tools)
    with contextlib.suppress(OSError):
        result = [usable(path, content, path.name) for path in (folder / content).iterdir()]
        fit = [entry for entry in result if entry and not entry.manifest.refused]
        return max(fit, key=lambda entry: entry.manifest.created, default=None)
    return None


def read(folder: Path) -> CacheEntry | None:
    """Returns the entry in a folder if it is whole."""
    return usable(folder, folder.parent.name, folder.name)


def usable(folder: Path, content: str, tools: str) -> CacheEntry | None:
    """Returns the entry in a folder if it is whole and of this key."""
    try:
        entry = CacheEntry(folder, manifests.read(folder / manifests.FILE))
        if (entry.manifest.content, entry.manifest.tools) != (content, tools):
            return None
        if not entry.manifest.refused:
            size, digest = fingerprint(entry.library)
            if (size, digest) != (entry.manifest.size, entry.manifest.sha256):
                return None
    except (OSError, ValueError):
        return None
    return entry


def fingerprint(library: Path) -> tuple[int, str]:
    """Returns size and SHA-256 of a regular file; raises `OSError`, also for a link."""
    descriptor = os.open(library, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is no regular file")
        content = file.read()
    return len(content), hashlib.sha256(content).hexdigest()


def lock(folder: Path, content: str, tools: str) -> FileLock:
    """Returns the lock that whoever builds an entry holds. Its file stays: were it removed, two could hold it."""
    locks = folder / "locks"
    locks.mkdir(exist_ok=True)
    return FileLock(locks / f"{content[:24]}-{tools[:8]}")


def workplace(folder: Path) -> Path:
    """Makes and returns a new folder, on the disk of the entries, to build one in."""
    path = folder / f".build-{uuid.uuid4().hex}"
    path.mkdir()
    return path


def store(folder: Path, work: Path, manifest: Manifest) -> CacheEntry:
    """Makes an entry of what is in the folder `work`, in place of a damaged one if there is. The caller holds the lock."""
    path = folder / manifest.content / manifest.tools
    try:
        (work / manifests.FILE).write_text(manifest.text(), encoding="utf-8")
        path.parent.mkdir(exist_ok=True)
        if os.path.lexists(path):
            discard(path, folder)
        work.rename(path)
    except OSError as error:
        raise KernelError(
            f"the library cannot be kept: {error.strerror or error}",
            where=str(path),
            do="check that the disk has space, or set QSYNC_CACHE_DIR to a folder on another one",
        ) from error
    return CacheEntry(path, manifest)


def discard(path: Path, folder: Path) -> None:
    """Removes a folder or file from under the entries of `folder`, at once for all that look."""
    aside = folder / f".build-{uuid.uuid4().hex}"
    os.rename(path, aside)
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink()


def sweep(folder: Path) -> None:
    """Removes what killed processes have left."""
    for path in folder.glob(".build-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE:
                shutil.rmtree(path)


def entries(folder: Path) -> Iterator[CacheEntry | Path]:
    """Yields the entries of a folder, oldest key first; for one that `find` would not return, its path."""
    if not folder.is_dir():
        return
    for content in sorted(
        path for path in folder.iterdir() if len(path.name) == 64 and path.is_dir()
    ):
        for path in sorted(content.iterdir()):
            yield read(path) or path


def clear(folder: Path, older_than: float = 0.0) -> tuple[int, int]:
    """Removes entries that are older than so many seconds, and damaged ones; returns how many there were, and the bytes of their files."""
    count = size = 0
    for item in list(entries(folder)):
        path = item if isinstance(item, Path) else item.folder
        if isinstance(item, CacheEntry) and time.time() - item.manifest.created < older_than:
            continue
        count += 1
        size += sum(file.lstat().st_size for file in path.rglob("*"))
        discard(path, folder)
        with contextlib.suppress(OSError):
            path.parent.rmdir()
    if not older_than:
        shutil.rmtree(folder / "failed", ignore_errors=True)
    sweep(folder)
    return count, size
