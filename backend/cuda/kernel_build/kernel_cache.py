"""Disk cache of compiled libraries: ROOT/CONTENT/TOOLS/manifest.json, NAME.so, NAME.cu.

The content key covers the function of a library: source, our headers, target, C interface. The
tools key covers its compilation: CUTLASS, compilers, flags. Folders in QSYNC_KERNELS_PATH, and the
cache on a machine without a compiler, are searched by content only. Entries are always complete.
"""

from __future__ import annotations

import contextlib
import functools
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
from qsync_fx.backend.cuda.kernel_build.library import FILE, MANIFEST, VERSION, Manifest
from qsync_fx.backend.cuda.toolchain import Headers, Toolchain
from qsync_fx.errors import KernelError
from qsync_fx.serialization.atomic_files import caches

TEMPLATES: Final = Path(__file__).resolve().parents[1] / "templates"
"""Our headers: cpp/cutlass in a clone."""

NVCC_VARIABLES: Final = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


def content_key(unit: TranslationUnit) -> str:
    """Return the content key of a unit, 64 hexadecimal digits."""
    names = ("arch", "name", "interface", "opcode", "source")
    fields = {name: getattr(unit, name) for name in names}
    return _digest({"abi": VERSION, **fields, "headers": included(unit.source)})


def included(source: str) -> dict[str, str]:
    """Return name -> digest of our headers that a source includes, directly or not."""
    result: dict[str, str] = {}
    todo, pattern = [source], re.compile(r'^\s*#\s*include\s*["<]([\w./-]+)[">]', re.MULTILINE)
    while todo:
        for name in pattern.findall(todo.pop()):
            header = TEMPLATES / name
            if name not in result and header.is_file():
                text = header.read_text(encoding="utf-8")
                result[name] = hashlib.sha256(text.encode()).hexdigest()
                todo.append(text)
    return result


def tools_key(tools: Toolchain, flags: tuple[str, ...]) -> str:
    """Return the tools key, 64 hexadecimal digits; `flags` are nvcc flags without paths."""
    return _digest(
        {
            "nvcc": tools.nvcc.version,
            "host": tools.host.version,
            "cutlass": tools.cutlass.version,
            "headers": headers_digest(tools.cutlass),
            "flags": flags,
            "environment": [environment.text(name) for name in NVCC_VARIABLES],
        }
    )


def headers_digest(headers: Headers) -> str:
    """Return a digest of all headers, read again only if sizes or modification times change."""
    # Strings: path objects are ten times slower, and every kernel lookup passes here.
    files = sorted(
        (path[len(folder) :], path, os.stat(path))
        for folder in map(str, headers.folders)
        for base, _, names in os.walk(folder)
        for path in (f"{base}/{name}" for name in names)
    )
    return _contents(tuple((name, path, s.st_size, s.st_mtime_ns) for name, path, s in files))


@functools.lru_cache(maxsize=4)
def _contents(files: tuple[tuple[str, str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for name, path, size, _ in files:
        digest.update(f"{name}\0{size}\0".encode())
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


_STALE: Final = 24 * 3600.0
"""Seconds after which leftovers of killed processes are removed."""


@dataclass(frozen=True)
class CacheEntry:
    """Library in a folder; the file `library` exists unless the manifest records a refusal."""

    folder: Path
    manifest: Manifest

    @property
    def library(self) -> Path:
        return self.folder / f"{self.manifest.name}.so"


def root() -> Path:
    """Return the folder of the user's compiled kernels, which need not exist."""
    return caches() / "kernels"


def ahead_of_time() -> list[Path]:
    """Return the folders in QSYNC_KERNELS_PATH; raise `KernelError` for missing or unsafe ones."""
    folders = [Path(os.path.abspath(path)) for path in environment.paths("QSYNC_KERNELS_PATH")]
    for folder in folders:
        if not folder.is_dir():
            raise KernelError(
                "this kernel folder does not exist",
                where=f"QSYNC_KERNELS_PATH: {folder}",
                do="correct or unset QSYNC_KERNELS_PATH",
            )
        if folder.stat().st_mode & stat.S_IWOTH:
            raise _open_to_others(folder)
    return folders


def prepare(folder: Path) -> Path:
    """Create a folder for libraries and return it; raise `KernelError` if it is unsafe."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        result = folder.stat()
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise KernelError(
            f"kernels cannot be stored: {error.strerror or error}",
            where=str(folder),
            do="set QSYNC_CACHE_DIR to a folder that belongs to you, on a disk with free space",
        ) from error
    if result.st_uid != os.geteuid():
        raise KernelError(
            f"this folder belongs to another user (uid {result.st_uid}), who may replace its code",
            where=str(folder),
            do="set QSYNC_CACHE_DIR to a folder of yours, and QSYNC_KERNELS_PATH to this one",
        )
    if result.st_mode & stat.S_IWOTH:
        raise _open_to_others(folder)
    return folder


def _open_to_others(folder: Path) -> KernelError:
    return KernelError(
        "every user can write to this folder, and its code would run with your permissions",
        where=str(folder),
        do=f"run `chmod o-w {folder}`, if you trust its contents",
    )


def find(folder: Path, content: str, tools: str | None = None) -> CacheEntry | None:
    """Return the entry of a key; if `tools` is None, the newest entry that was not refused."""
    if tools is not None:
        return read(folder / content / tools)
    with contextlib.suppress(OSError):
        result = [read(path) for path in (folder / content).iterdir()]
        fit = [entry for entry in result if entry and not entry.manifest.refused]
        return max(fit, key=lambda entry: entry.manifest.created, default=None)
    return None


def read(folder: Path) -> CacheEntry | None:
    """Return the entry in a folder if it is complete, and if the folder's name is its key."""
    with contextlib.suppress(OSError, KernelError):
        entry = CacheEntry(folder, MANIFEST.load(folder / FILE))
        manifest = entry.manifest
        if (manifest.content, manifest.tools) != (folder.parent.name, folder.name):
            return None
        if manifest.refused or fingerprint(entry.library) == (manifest.size, manifest.sha256):
            return entry
    return None


def fingerprint(library: Path) -> tuple[int, str]:
    """Return size and SHA-256 of a regular file; raise `OSError`, also for a symbolic link."""
    descriptor = os.open(library, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a regular file")
        content = file.read()
    return len(content), hashlib.sha256(content).hexdigest()


def lock(folder: Path, content: str, tools: str) -> FileLock:
    """Return the lock for building an entry; its file stays, or two processes could own it."""
    locks = folder / "locks"
    locks.mkdir(exist_ok=True)
    return FileLock(locks / f"{content[:24]}-{tools[:8]}")


def workplace(folder: Path) -> Path:
    """Create and return a new build folder on the disk of the entries."""
    path = folder / f".build-{uuid.uuid4().hex}"
    path.mkdir()
    return path


def store(folder: Path, work: Path, manifest: Manifest) -> CacheEntry:
    """Turn the build folder `work` into an entry, replacing a damaged one; requires the lock."""
    path = folder / manifest.content / manifest.tools
    try:
        (work / FILE).write_text(MANIFEST.encode(manifest), encoding="utf-8")
        path.parent.mkdir(exist_ok=True)
        if os.path.lexists(path):
            discard(path, folder)
        work.rename(path)
    except OSError as error:
        raise KernelError(
            f"the library cannot be stored: {error.strerror or error}",
            where=str(path),
            do="check that the disk has free space, or set QSYNC_CACHE_DIR to a folder on "
            "another disk",
        ) from error
    return CacheEntry(path, manifest)


def discard(path: Path, folder: Path) -> None:
    """Remove a file or folder from a cache folder, atomically for readers."""
    aside = workplace(folder)
    os.rename(path, aside / path.name)
    shutil.rmtree(aside, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove leftovers of killed processes."""
    for path in folder.glob(".build-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE:
                shutil.rmtree(path)


def entries(folder: Path) -> Iterator[CacheEntry | Path]:
    """Yield the entries of a folder, sorted by key; the path of an entry that `find` rejects."""
    if not folder.is_dir():
        return
    for content in sorted(folder.iterdir()):
        if len(content.name) == 64 and content.is_dir():
            for path in sorted(content.iterdir()):
                yield read(path) or path


def clear(folder: Path, older_than: float = 0.0) -> tuple[int, int]:
    """Remove damaged entries and entries older than so many seconds; return count and bytes."""
    count = size = 0
    for item in list(entries(folder)):
        path = item.folder if isinstance(item, CacheEntry) else item
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
