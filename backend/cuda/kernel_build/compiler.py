"""Libraries of translation units: from the cache, or compiled in parallel by nvcc.

Each compilation runs under the lock of its cache key, so of several processes that need a library
one compiles it and the others wait.

Invariant: a returned path is a library that was compiled from exactly this unit and that passed the
checks of `sass`. On every exit, also by an interrupt, all compilers are ended and no partial output
remains.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Final

from filelock import FileLock, Timeout

from qsync_fx import environment
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import kernel_cache, sass
from qsync_fx.backend.cuda.kernel_build.kernel_cache import (
    TEMPLATES,
    CacheEntry,
    content_key,
    tools_key,
)
from qsync_fx.backend.cuda.kernel_build.library import Manifest, shared_memory
from qsync_fx.backend.cuda.kernel_config import FORWARD
from qsync_fx.backend.cuda.toolchain import Toolchain, dotted, library_folders, toolchain
from qsync_fx.errors import KernelError, OptionError, RefusedKernelError, ToolchainError
from qsync_fx.progress import progress as shown_progress


@dataclass(frozen=True)
class Built:
    """Result of a build: the library or the failure of each unit."""

    libraries: dict[TranslationUnit, Path]
    failures: dict[TranslationUnit, KernelError]

    def add(self, unit: TranslationUnit, result: CacheEntry | KernelError) -> None:
        """Add the cache entry or the error of a unit."""
        if isinstance(result, KernelError):
            self.failures[unit] = result
        elif result.manifest.refused:
            self.failures[unit] = RefusedKernelError(
                f"the kernel must not be used: {result.manifest.refused}",
                where=unit.name,
                do="use another configuration; the refusal is cached until `qsync kernels clear`",
            )
        else:
            self.libraries[unit] = result.library


def build(
    units: Sequence[TranslationUnit],
    *,
    progress: bool = True,
    jobs: int | None = None,
    folder: Path | None = None,
) -> dict[TranslationUnit, Path]:
    """Return the library of each unit; compile those that are not in the cache.

    Args:
        progress: whether to report progress on standard error.
        jobs: limit of parallel compilers; see `job_limit`.
        folder: cache to use instead of the user's; folders of kernels built ahead of time are then
            ignored.

    Raises:
        ToolchainError: a unit must be compiled, and a tool is missing, unsuitable or fails.
        KernelError: the cache cannot be used, or a library failed the checks. All other units have
            been compiled by then.
    """
    built = attempt(units, progress=progress, jobs=jobs, folder=folder)
    for error in built.failures.values():
        raise error
    return built.libraries


def attempt(
    units: Sequence[TranslationUnit],
    *,
    progress: bool = True,
    jobs: int | None = None,
    folder: Path | None = None,
    compiling: bool = True,
) -> Built:
    """Build units like `build`, but return failures; both results are in the order of `units`.

    Args:
        compiling: False makes a missing library a failure.
    """
    contents = {unit: content_key(unit) for unit in units}
    built = Built({}, {})
    for place in [] if folder else kernel_cache.ahead_of_time():
        for unit, content in contents.items():
            if unit not in built.libraries and (entry := kernel_cache.find(place, content, None)):
                built.libraries[unit] = entry.library
    place = folder or kernel_cache.root()
    todo: list[Todo] = []
    for templates in (True, False):
        missing = {
            unit: content
            for unit, content in contents.items()
            if unit not in built.libraries and unit.templates is templates
        }
        if missing:
            todo += _not_cached(built, missing, templates, place)
    if todo and compiling:
        kernel_cache.sweep(place)
        compile_units(todo, place, job_limit(jobs), progress, built.add)
    elif todo:
        for item in todo:
            error = KernelError("the kernel has not been compiled", where=item.unit.name)
            built.failures[item.unit] = error
    return Built(
        {unit: built.libraries[unit] for unit in units if unit in built.libraries},
        {unit: built.failures[unit] for unit in units if unit in built.failures},
    )


@dataclass(frozen=True)
class Todo:
    """Unit that is not in the cache, its keys, and its toolchain."""

    unit: TranslationUnit
    content: str
    tools: Toolchain
    key: str


def _not_cached(
    built: Built, missing: dict[TranslationUnit, str], templates: bool, place: Path
) -> list[Todo]:
    """Add the cached results of one toolchain to `built`; return the units that it must compile."""
    try:
        tools = toolchain(templates)
    except ToolchainError as error:
        if place.is_dir():
            kernel_cache.prepare(place)
        for unit, content in missing.items():
            built.add(unit, kernel_cache.find(place, content, None) or error)
        return []
    kernel_cache.prepare(place)
    key = tools_key(tools, FLAGS_IN_KEY, place)
    todo = []
    for unit, content in missing.items():
        if entry := kernel_cache.find(place, content, key):
            built.add(unit, entry)
        else:
            todo.append(Todo(unit, content, tools, key))
    return todo


HEAVY: Final = 4_600_000_000
LIGHT: Final = 1_300_000_000
"""Peak bytes of nvcc for a heavy or light unit (measured with nvcc 13.0)."""


def peak_bytes(unit: TranslationUnit) -> int:
    """Return the bytes of memory that compiling a unit needs."""
    return HEAVY if unit.heavy else LIGHT


def job_limit(value: int | None = None) -> int:
    """Return the limit of parallel compilers: `value`, $QSYNC_BUILD_JOBS, or a share of the cores.

    Raises:
        OptionError: the number is below 1.
    """
    if value is not None:
        if value < 1:
            raise OptionError(
                f"the number of parallel compilers cannot be {value}",
                where="jobs",
                do="set a number of at least 1",
            )
        return value
    if (number := environment.count("QSYNC_BUILD_JOBS")) is not None:
        return number
    return max(1, len(os.sched_getaffinity(0)) // local_processes())


def local_processes() -> int:
    """Return the number of processes of a training job on this machine, as set by torchrun."""
    return environment.launcher_number("LOCAL_WORLD_SIZE") or 1


def available_memory() -> int:
    """Return the available bytes of memory of the machine and this process's cgroups."""
    values = []
    if kilobytes := _match(Path("/proc/meminfo"), r"^MemAvailable:\s+(\d+) kB"):
        values.append(int(kilobytes) * 1024)
    # The cgroup (version 2) and its parents limit the process.
    parts = (_match(Path("/proc/self/cgroup"), r"^0::/(.*)$") or "").split("/")
    for count in range(len(parts) + 1):
        folder = Path("/sys/fs/cgroup", *parts[:count])
        limit, used = (_match(folder / f"memory.{name}", r"^(\d+)$") for name in ("max", "current"))
        if limit and used:
            # The kernel can reclaim inactive file pages at once: compiling reads many files.
            cached = _match(folder / "memory.stat", r"^inactive_file (\d+)$") or 0
            values.append(max(0, int(limit) - int(used) + int(cached)))
    return min(values, default=HEAVY)


def _match(path: Path, pattern: str) -> str | None:
    """Return the group of a pattern in a file; None if it does not match or cannot be read."""
    result = re.search(pattern, _text(path), flags=re.MULTILINE)
    return result[1] if result else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


FLAGS: Final = (
    "-std=c++17",
    "-O3",
    # Assertions in device code make ptxas serialize Hopper's matrix products (C7510).
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "-shared",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    # Report missing symbols at link time, not when the library is loaded.
    "-Xlinker=-z,defs",
    "-Xptxas=-v",
)
FLAGS_IN_KEY: Final = (*FLAGS, f"PTX for {', '.join(FORWARD)}")
"""The flags of `command` without paths, which are part of a library's key."""

_SHOWN_LINES: Final = 15


def command(unit: TranslationUnit, tools: Toolchain) -> list[str]:
    """Return the command that compiles NAME.cu in the current folder to NAME.so."""
    number = unit.arch.removeprefix("sm_")
    code = f"sm_{number}"
    if unit.arch in FORWARD:
        code = f"[{code},compute_{number}]"
    includes = [f"-I{folder}" for folder in (TEMPLATES, *tools.cutlass.folders)]
    target = f"-gencode=arch=compute_{number},code={code}"
    head = [str(tools.nvcc.path), "-ccbin", str(tools.host.path)]
    flags = [*FLAGS, target, *_runtime(tools.nvcc.path), *includes]
    return [*head, *flags, "-o", f"{unit.name}.so", f"{unit.name}.cu"]


def described(tools: Toolchain) -> str:
    """Return the names and versions of the compilers."""
    versions = f"nvcc {dotted(tools.nvcc.version)}, host compiler {dotted(tools.host.version)}"
    if tools.cutlass.folders:
        versions += f", CUTLASS {dotted(tools.cutlass.version)}"
    return versions


def _runtime(compiler: Path) -> list[str]:
    """Return the flags that link the CUDA runtime shared with torch.

    Pip wheels contain it only under its full name.
    """
    folders = library_folders(compiler)
    if any((folder / "libcudart.so").exists() for folder in folders):
        return ["-cudart", "shared"]
    for library in (path for folder in folders for path in sorted(folder.glob("libcudart.so.*"))):
        return ["-cudart", "none", f"-Xlinker={library}"]
    return ["-cudart", "shared"]


def start(unit: TranslationUnit, work: Path, tools: Toolchain) -> subprocess.Popen[bytes]:
    """Start the compiler of a unit in the folder `work`, with its output in the file `log`.

    Raises:
        KernelError: it cannot start, or the unit's name is no file name.
    """
    if not re.fullmatch(r"[A-Za-z0-9_]{1,200}", unit.name):
        raise KernelError(
            "the name of this unit is not a valid file name",
            where=unit.name,
            do="use letters, digits and _ only",
        )
    arguments = command(unit, tools)
    try:
        (work / f"{unit.name}.cu").write_text(unit.source, encoding="utf-8")
        (work / "tmp").mkdir()
        with open(work / "log", "wb") as log:
            # A process group, so that the children of nvcc can be killed with it; its temporary
            # files stay in the build folder.
            return subprocess.Popen(
                arguments,
                cwd=work,
                env=environment.child_environment(TMPDIR=str(work / "tmp")),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
    except OSError as error:
        raise KernelError(
            f"the compiler cannot be started: {error}",
            where=shlex.join(arguments),
            do="check that the disk has free space",
        ) from error


def failure(
    unit: TranslationUnit, work: Path, status: int, tools: Toolchain, saved: Path
) -> ToolchainError:
    """Return the error for a compiler that ended with `status`.

    Source and output move from `work` to the folder `saved`.
    """
    report = (work / "log").read_text(encoding="utf-8", errors="replace")
    with contextlib.suppress(OSError):
        saved.mkdir(exist_ok=True)
        os.replace(work / f"{unit.name}.cu", saved / f"{unit.name}.cu")
        os.replace(work / "log", saved / f"{unit.name}.log")
    last = "\n".join(f"  | {line}" for line in report.strip().splitlines()[-_SHOWN_LINES:])
    output = f"; its last lines:\n{last}" if last else " without output"
    of_the_source = False
    if status < 0 or re.search(r"\bKilled\b|signal 9|out of memory|Cannot allocate", report):
        do = (
            "the compiler was killed, probably for lack of memory (it needs about "
            f"{peak_bytes(unit) / 1e9:.1f} GB): set QSYNC_BUILD_JOBS=1"
        )
    elif "unsupported GNU version" in report or "unsupported clang version" in report:
        do = "set NVCC_CCBIN to a host compiler that this nvcc accepts"
    elif "No space left" in report:
        do = "set QSYNC_CACHE_DIR to a folder on a disk with free space"
    else:
        of_the_source = True
        do = f"see the complete output in {saved / unit.name}.log, and the source next to it"
    error = ToolchainError(
        f"nvcc failed with status {status} on {unit.name}{output}",
        where=f"cd {shlex.quote(str(saved))} && {shlex.join(command(unit, tools))}",
        do=do,
    )
    error.output, error.of_the_source = report, of_the_source
    return error


_LONG: Final = 5.0
"""Seconds of waiting for another process before the first notice.

Further notices follow at twelve times this interval.
"""


class WaitNotice:
    """Notice on standard error that this process waits for compilations by other processes.

    Such a process looks hung, so every rank reports for itself.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._next = _LONG

    def __call__(self, names: Sequence[str]) -> None:
        """Update with the units that other processes compile; empty if this one is not waiting."""
        now = time.monotonic()
        if not names:
            self._since, self._next = None, _LONG
            return
        if self._since is None:
            self._since = now
        if (passed := now - self._since) < self._next:
            return
        self._next += 12 * _LONG
        rank = more = ""
        if (number := environment.launcher_number("RANK")) is not None:
            rank = f" (rank {number})"
        if len(names) > 1:
            more = f" and {len(names) - 1} others"
        print(
            f"qsync{rank}: has been waiting {passed:.0f} s for another process that compiles "
            f"{names[0]}{more}; run `qsync kernels build` to compile before training",
            file=sys.stderr,
        )


@dataclass
class _Job:
    """Compilation of a unit: it waits for the lock of its key, then nvcc runs in `work`."""

    todo: Todo
    lock: FileLock
    work: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    since: float = 0.0

    @property
    def unit(self) -> TranslationUnit:
        return self.todo.unit


def compile_units(
    todo: Sequence[Todo],
    place: Path,
    jobs: int,
    progress: bool,
    ended: Callable[[TranslationUnit, CacheEntry | KernelError], None],
) -> None:
    """Compile units in parallel, heavy ones first, into the cache at `place`.

    As many compilers run as `jobs` and memory permit, and always at least one: swapping and killed
    compilers cost more time than waiting.

    Args:
        progress: whether to report progress on standard error, if this is the first process.
        ended: called once per unit, with its cache entry or its error.
    """
    waiting = [
        _Job(item, kernel_cache.lock(place, item.content, item.key))
        for item in sorted(todo, key=lambda item: not item.unit.heavy)
    ]
    running: list[_Job] = []
    memory = available_memory() // local_processes()
    notice = WaitNotice()
    shown = progress and not environment.launcher_number("RANK")
    bar = shown_progress("compiling CUDA kernels", len(todo), shown, delay_s=1.0)
    with bar as advance, _cleared(running):
        while waiting or running:
            before = len(waiting) + len(running)
            free = available_memory()
            for job in list(waiting):
                used = sum(peak_bytes(other.unit) for other in running)
                wanted = peak_bytes(job.unit)
                if running and (len(running) >= jobs or used + wanted > memory or wanted > free):
                    continue
                if not _acquired(job.lock, place):
                    continue
                waiting.remove(job)
                running.append(job)
                # Another process may have built it in the meantime.
                if entry := kernel_cache.find(place, job.todo.content, job.todo.key):
                    ended(job.unit, entry)
                    _finish(job, running)
                    continue
                try:
                    with _interrupted_after():
                        job.work = kernel_cache.workplace(place)
                        job.since = time.monotonic()
                        job.process = start(job.unit, job.work, job.todo.tools)
                except KernelError as error:
                    ended(job.unit, error)
                    _finish(job, running)
            for job in list(running):
                if job.process is None or job.process.poll() is None:
                    continue
                try:
                    ended(job.unit, _stored(job, place))
                except KernelError as error:
                    ended(job.unit, error)
                finally:
                    _finish(job, running)
            names = [job.unit.name for job in running]
            advance(", ".join(names), count=before - len(waiting) - len(running))
            notice([] if running else [job.unit.name for job in waiting])
            if waiting or running:
                time.sleep(0.05)


@contextlib.contextmanager
def _cleared(running: list[_Job]) -> Iterator[None]:
    """Kill the running compilers and remove their files when the block exits, also by an error."""
    try:
        yield
    finally:
        for job in list(running):
            _finish(job, running)


@contextlib.contextmanager
def _interrupted_after() -> Iterator[None]:
    """Defer an interrupt until the block exits: inside, a new process has no job yet."""
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


def _stored(job: _Job, place: Path) -> CacheEntry:
    """Return the cache entry of a finished compilation, after verifying it.

    Raises:
        ToolchainError: the compiler failed.
    """
    assert job.work is not None and job.process is not None
    tools = job.todo.tools
    seconds = time.monotonic() - job.since
    report = (job.work / "log").read_text(encoding="utf-8", errors="replace")
    library = job.work / f"{job.unit.name}.so"
    if job.process.returncode or not library.is_file():
        raise failure(job.unit, job.work, job.process.returncode, tools, place / "failed")
    refused, opcode = sass.complaint(report), ""
    if job.unit.opcode and not refused and (result := sass.instructions(library)):
        opcode = next((name for name in result if name.startswith(job.unit.opcode)), "")
        refused = "" if opcode else f"its machine code has no {job.unit.opcode} instruction"
    used = sass.resources(report)
    if not refused:
        used = replace(used, shared_memory=max(used.shared_memory, shared_memory(library)))
    size, digest = kernel_cache.fingerprint(library)
    manifest = Manifest(
        content=job.todo.content,
        tools=job.todo.key,
        name=job.unit.name,
        arch=job.unit.arch,
        sha256="" if refused else digest,
        size=0 if refused else size,
        refused=refused,
        resources=used,
        opcode=opcode,
        seconds=round(seconds, 2),
        created=round(time.time(), 3),
        compilers=f"{described(tools)}, {' '.join(FLAGS_IN_KEY)}",
    )
    if refused:
        library.unlink()
    shutil.rmtree(job.work / "tmp")
    return kernel_cache.store(place, job.work, manifest)


def _finish(job: _Job, running: list[_Job]) -> None:
    """End a job in any state: its processes, files and lock."""
    if job.process is not None and job.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()
    if job.work is not None and job.work.exists():
        shutil.rmtree(job.work, ignore_errors=True)
    job.lock.release()
    running.remove(job)
