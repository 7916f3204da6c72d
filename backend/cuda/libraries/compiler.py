"""Units to libraries: from the cache where it has them, else by nvcc.

Invariant: a path that is returned is of a library that was compiled from exactly this unit and passed the checks of `sass`. Whatever
happens, an interrupt too, no compiler goes on running and nothing half-written stays. Of several processes that want the same library, one
compiles it and the others wait.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from qsync_fx.backend.cuda.kernel.config import Arch
from qsync_fx.backend.cuda.libraries import budget, cache, nvcc, sass
from qsync_fx.backend.cuda.libraries.cache import Entry
from qsync_fx.backend.cuda.libraries.keys import content_key, tools_key
from qsync_fx.backend.cuda.libraries.library import shared_memory
from qsync_fx.backend.cuda.libraries.manifest import Manifest
from qsync_fx.backend.cuda.libraries.progress import Waiting, watch
from qsync_fx.backend.cuda.source.unit import Unit
from qsync_fx.backend.cuda.tools.toolchain import Toolchain, toolchain
from qsync_fx.errors import KernelError, RefusedKernelError, ToolchainError


@dataclass(frozen=True)
class Built:
    """What became of units: a library, or the reason why there is none."""

    libraries: dict[Unit, Path]
    failures: dict[Unit, KernelError]


@dataclass(frozen=True)
class _Todo:
    """A unit that is not in the cache, its keys, and what compiles it."""

    unit: Unit
    content: str
    tools: Toolchain
    key: str


@dataclass
class _Job:
    """A unit on its way: it waits for the lock of its key, then nvcc runs in `work`."""

    given: _Todo
    lock: FileLock
    work: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    since: float = 0.0

    @property
    def unit(self) -> Unit:
        return self.given.unit


def build(
    units: Sequence[Unit], *, progress: bool = True, jobs: int | None = None, folder: Path | None = None
) -> dict[Unit, Path]:
    """Returns the library of each unit, and compiles those that are not in the cache.

    Args:
        progress: whether to say on standard error what is compiled.
        jobs: how many compilers may run at once; by default $QSYNC_BUILD_JOBS, or one a core as far as memory goes.
        folder: keeps libraries, in place of the user's cache; folders of kernels built ahead of time are then not looked at.

    Raises:
        ToolchainError: something is to be compiled, and a tool is missing, does not serve or fails.
        KernelError: the cache cannot be used, or a library did not pass the checks. All other units have been compiled by then.
    """
    built = attempt(units, progress=progress, jobs=jobs, folder=folder)
    for error in built.failures.values():
        raise error
    return built.libraries


def attempt(
    units: Sequence[Unit],
    *,
    progress: bool = True,
    jobs: int | None = None,
    folder: Path | None = None,
    compiling: bool = True,
) -> Built:
    """Does what `build` does, and returns failures in place of raising them. Both are in the order of `units`.

    With `compiling` False what would have to be compiled is a failure.
    """
    built = _attempt({unit: content_key(unit) for unit in units}, progress, jobs, folder, compiling)
    return Built(
        {unit: built.libraries[unit] for unit in units if unit in built.libraries},
        {unit: built.failures[unit] for unit in units if unit in built.failures},
    )


def _attempt(
    contents: dict[Unit, str], progress: bool, jobs: int | None, folder: Path | None, compiling: bool
) -> Built:
    built = Built({}, {})
    elsewhere = [] if folder else cache.ahead_of_time()
    for unit, content in contents.items():
        for place in elsewhere:
            if unit not in built.libraries and (entry := cache.find(place, content, None)):
                built.libraries[unit] = entry.library
    missing = {unit: content for unit, content in contents.items() if unit not in built.libraries}
    if not missing:
        return built
    place = folder or cache.root()
    todo: list[_Todo] = []
    for arch in ("sm_70", None):
        for templates in (True, False):
            part = {
                unit: content
                for unit, content in missing.items()
                if (unit.arch == "sm_70") == (arch == "sm_70") and unit.templates is templates
            }
            if part:
                todo += _kept(built, part, arch, templates, place)
    if not compiling:
        for item in todo:
            built.failures[item.unit] = KernelError("it has not been compiled", where=item.unit.name)
    elif todo:
        cache.sweep(place)
        _compile(built, todo, place, budget.jobs(jobs), progress)
    return built


def _kept(built: Built, missing: dict[Unit, str], arch: Arch | None, templates: bool, place: Path) -> list[_Todo]:
    """Takes from the cache what the tools that compile for `arch`, or for all but sm_70, have made; returns what they are to make."""
    try:
        tools = toolchain(arch, templates)
    except ToolchainError as error:
        for unit, content in missing.items():
            entry = cache.find(cache.prepare(place), content, None) if place.is_dir() else None
            _take(built, unit, entry, error)
        return []
    cache.prepare(place)
    key = tools_key(tools, nvcc.flags(tools), place)
    for unit, content in missing.items():
        if entry := cache.find(place, content, key):
            _take(built, unit, entry)
    return [
        _Todo(unit, content, tools, key)
        for unit, content in missing.items()
        if unit not in built.libraries and unit not in built.failures
    ]


def _take(built: Built, unit: Unit, entry: Entry | None, error: KernelError | None = None) -> None:
    """Notes what is in the cache for a unit, or the error why there is nothing."""
    if entry is None:
        built.failures[unit] = error or KernelError("there is no such library", where=unit.name)
    elif entry.manifest.refused:
        built.failures[unit] = RefusedKernelError(
            f"the kernel must not be used: {entry.manifest.refused}",
            where=unit.name,
            do="use another configuration; this is remembered until qsync kernels clear",
        )
    else:
        built.libraries[unit] = entry.library


def _compile(built: Built, todo: list[_Todo], place: Path, jobs: int, progress: bool) -> None:
    """Compiles units side by side, as memory allows, the heavy ones first."""
    waiting = [
        _Job(item, cache.lock(place, item.content, item.key))
        for item in sorted(todo, key=lambda item: not item.unit.heavy)
    ]
    running: list[_Job] = []
    memory = budget.memory() // budget.processes()
    say = Waiting()
    with watch(len(todo), progress) as tell, _cleared(running):
        while waiting or running:
            free = budget.memory()
            for job in list(waiting):
                taken = sum(budget.need(other.unit) for other in running)
                wanted = budget.need(job.unit)
                if running and (len(running) >= jobs or taken + wanted > memory or wanted > free):
                    continue
                if not _acquired(job.lock, place):
                    continue
                waiting.remove(job)
                running.append(job)
                # Another process may have built it while this one waited.
                if entry := cache.find(place, job.given.content, job.given.key):
                    _take(built, job.unit, entry)
                    _finish(job, running)
                    continue
                try:
                    with _interrupted_after():
                        job.work = cache.workplace(place)
                        job.since = time.monotonic()
                        job.process = nvcc.start(job.unit, job.work, job.given.tools)
                except KernelError as error:
                    built.failures[job.unit] = error
                    _finish(job, running)
            for job in [job for job in running if job.process is not None and job.process.poll() is not None]:
                try:
                    _take(built, job.unit, _stored(job, place))
                except KernelError as error:
                    built.failures[job.unit] = error
                finally:
                    _finish(job, running)
            done = len(todo) - len(waiting) - len(running)
            tell(done, [job.unit.name for job in running])
            say([] if running else [job.unit.name for job in waiting])
            if waiting or running:
                time.sleep(0.05)


@contextlib.contextmanager
def _cleared(running: list[_Job]) -> Iterator[None]:
    """Ends the compilers that still run when the block is left, by an interrupt or any other error, and removes what they wrote."""
    try:
        yield
    finally:
        for job in list(running):
            _finish(job, running)


@contextlib.contextmanager
def _interrupted_after() -> Iterator[None]:
    """Puts an interrupt off until the block is left: inside it, a process may have begun that no job knows of, and nobody would end it."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(signal.SIGINT, came[0])


def _acquired(lock: FileLock, place: Path) -> bool:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    except (OSError, NotImplementedError) as error:
        raise KernelError(
            f"files in this folder cannot be locked: {error}",
            where=str(place),
            do="set QSYNC_CACHE_DIR to a folder on a local disk",
        ) from error
    return True


def _stored(job: _Job, place: Path) -> Entry:
    """Returns the entry of what nvcc has made, after looking at it; raises `ToolchainError` where it failed."""
    assert job.work is not None and job.process is not None
    tools = job.given.tools
    seconds = time.monotonic() - job.since
    report = (job.work / "log").read_text(encoding="utf-8", errors="replace")
    library = job.work / f"{job.unit.name}.so"
    if job.process.returncode or not library.is_file():
        raise nvcc.failure(job.unit, job.work, job.process.returncode, tools, place / "failed")
    # NVRTC's machine code lies in the library as bytes, which no tool finds there.
    code = job.work / f"{job.unit.name}.cubin" if tools.toolkit else library
    refused, opcode = sass.complaint(report), ""
    if job.unit.opcode and not refused and (found := sass.instructions(code)):
        opcode = next((name for name in found if name.startswith(job.unit.opcode)), "")
        refused = "" if opcode else f"its machine code has no {job.unit.opcode}"
    used = sass.resources(report)
    if not refused:
        used = replace(used, shared_memory=max(used.shared_memory, shared_memory(library)))
    size, digest = cache.fingerprint(library)
    manifest = Manifest(
        content=job.given.content,
        tools=job.given.key,
        name=job.unit.name,
        arch=job.unit.arch,
        sha256="" if refused else digest,
        size=0 if refused else size,
        refused=refused,
        resources=used,
        opcode=opcode,
        seconds=round(seconds, 2),
        created=round(time.time(), 3),
        compilers=f"{nvcc.described(tools)}, {' '.join(nvcc.flags(tools))}",
    )
    if refused:
        library.unlink()
    if code != library:
        code.unlink()
    shutil.rmtree(job.work / "tmp")
    return cache.store(place, job.work, manifest)


def _finish(job: _Job, running: list[_Job]) -> None:
    """Ends a job, whatever its state: its processes, its files, its lock."""
    if job.process is not None and job.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()
    if job.work is not None and job.work.exists():
        shutil.rmtree(job.work, ignore_errors=True)
    job.lock.release()
    running.remove(job)
