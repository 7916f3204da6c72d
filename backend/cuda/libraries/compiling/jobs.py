"""Units that are not in the cache are compiled side by side, each under the lock of its key.

Invariant: whatever happens, an interrupt too, no compiler goes on running and nothing half-written stays. Of several processes that want
the same library, one compiles it and the others wait.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from qsync_fx.backend.cuda.libraries import cache, sass
from qsync_fx.backend.cuda.libraries.cache import Entry
from qsync_fx.backend.cuda.libraries.compiling import budget, nvcc
from qsync_fx.backend.cuda.libraries.compiling.progress import Waiting, watch
from qsync_fx.backend.cuda.libraries.library import shared_memory
from qsync_fx.backend.cuda.libraries.manifest import Manifest
from qsync_fx.backend.cuda.source.unit import Unit
from qsync_fx.backend.cuda.tools.toolchain import Toolchain
from qsync_fx.errors import KernelError


@dataclass(frozen=True)
class Todo:
    """A unit that is not in the cache, its keys, and what compiles it."""

    unit: Unit
    content: str
    tools: Toolchain
    key: str


@dataclass
class _Job:
    """A unit on its way: it waits for the lock of its key, then nvcc runs in `work`."""

    given: Todo
    lock: FileLock
    work: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    since: float = 0.0

    @property
    def unit(self) -> Unit:
        return self.given.unit


def compile_units(
    todo: Sequence[Todo], place: Path, jobs: int, progress: bool, ended: Callable[[Unit, Entry | KernelError], None]
) -> None:
    """Compiles units side by side, as memory allows, the heavy ones first, into the cache at `place`.

    Args:
        jobs: how many compilers may run at once.
        progress: whether to say on standard error what is compiled.
        ended: is called once for each unit, with its entry in the cache or with the error why there is none.
    """
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
                    ended(job.unit, entry)
                    _finish(job, running)
                    continue
                try:
                    with _interrupted_after():
                        job.work = cache.workplace(place)
                        job.since = time.monotonic()
                        job.process = nvcc.start(job.unit, job.work, job.given.tools)
                except KernelError as error:
                    ended(job.unit, error)
                    _finish(job, running)
            for job in [job for job in running if job.process is not None and job.process.poll() is not None]:
                try:
                    ended(job.unit, _stored(job, place))
                except KernelError as error:
                    ended(job.unit, error)
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
