"""Parallel compilation of translation units, within the cores and memory of the machine.

Each compilation runs under the lock of its cache key, so of several processes that need a library
one compiles it and the others wait. As many compilers run as cores and memory permit, and always at
least one. A unit of CUTLASS 3 needs 3.3 to 4.4 GB, and swapping or killed compilers cost more time
than waiting.

Invariant: on every exit, also by an interrupt, all compilers are ended and no partial output
remains. The command of a `ToolchainError` is the one that ran and can be repeated: source and
complete output are saved in a folder. Progress goes to standard error after the first second, only
from the first process of a training job.
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
from typing import TYPE_CHECKING, Final, Protocol

from filelock import FileLock, Timeout

from qsync_fx import environment
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import kernel_cache, sass
from qsync_fx.backend.cuda.kernel_build.kernel_cache import TEMPLATES, CacheEntry
from qsync_fx.backend.cuda.kernel_build.library import Manifest, shared_memory
from qsync_fx.backend.cuda.kernel_config import FORWARD
from qsync_fx.backend.cuda.toolchain import Toolchain, dotted, library_folders
from qsync_fx.errors import KernelError, OptionError, ToolchainError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


HEAVY: Final = 4_600_000_000
LIGHT: Final = 1_300_000_000
"""Peak bytes of nvcc for a heavy or light unit (measured with nvcc 13.0)."""


def need(unit: TranslationUnit) -> int:
    """Return the bytes of memory that compiling a unit needs."""
    return HEAVY if unit.heavy else LIGHT


def jobs(value: int | None = None) -> int:
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
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, cores // processes())


def processes() -> int:
    """Return the number of processes of a training job on this machine, as set by torchrun."""
    return environment.launcher_number("LOCAL_WORLD_SIZE") or 1


def available_memory() -> int:
    """Return the available bytes of memory of the machine and this process's cgroups."""
    free = [_machine(), *(_group(Path("/sys/fs/cgroup", part)) for part in _groups())]
    return min((value for value in free if value is not None), default=HEAVY)


def _machine() -> int | None:
    result = re.search(
        r"^MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")), flags=re.MULTILINE
    )
    return int(result[1]) * 1024 if result else None


def _groups() -> list[str]:
    """Return the paths of this process's cgroup (version 2) and its parents, which limit it too."""
    result = re.search(r"^0::/(.*)$", _text(Path("/proc/self/cgroup")), flags=re.MULTILINE)
    parts = result[1].split("/") if result and result[1] else []
    return ["/".join(parts[:count]) for count in range(len(parts) + 1)]


def _group(folder: Path) -> int | None:
    limit, used = (_text(folder / name).strip() for name in ("memory.max", "memory.current"))
    if not (limit.isdigit() and used.isdigit()):
        return None
    # The kernel can reclaim inactive file pages at once: compiling reads many files.
    cached = re.search(r"^inactive_file (\d+)$", _text(folder / "memory.stat"), flags=re.MULTILINE)
    return max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0))


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
    code = f"[sm_{number},compute_{number}]" if unit.arch in FORWARD else f"sm_{number}"
    includes = [f"-I{folder}" for folder in (TEMPLATES, *tools.cutlass.folders)]
    target = f"-gencode=arch=compute_{number},code={code}"
    head = [
        str(tools.nvcc.path),
        "-ccbin",
        str(tools.host.path),
        *FLAGS,
        target,
        *_runtime(tools.nvcc.path),
    ]
    return [*head, *includes, "-o", f"{unit.name}.so", f"{unit.name}.cu"]


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
    if not any((folder / "libcudart.so").exists() for folder in folders):
        for library in (
            path for folder in folders for path in sorted(folder.glob("libcudart.so.*"))
        ):
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
    of_the_source = False
    if status < 0 or re.search(r"\bKilled\b|signal 9|out of memory|Cannot allocate", report):
        gigabytes = need(unit) / 1e9
        do = (
            "the compiler was killed, probably for lack of memory (it needs about "
            f"{gigabytes:.1f} GB): set QSYNC_BUILD_JOBS=1"
        )
    elif "unsupported GNU version" in report or "unsupported clang version" in report:
        do = "set NVCC_CCBIN to a host compiler that this nvcc accepts"
    elif "No space left" in report:
        do = "set QSYNC_CACHE_DIR to a folder on a disk with free space"
    else:
        of_the_source = True
        do = f"see the complete output in {saved / unit.name}.log, and the source next to it"
    error = ToolchainError(
        f"nvcc failed with status {status} on {unit.name}"
        + (f"; its last lines:\n{last}" if last else " without output"),
        where=f"cd {shlex.quote(str(saved))} && {shlex.join(command(unit, tools))}",
        do=do,
    )
    error.output, error.of_the_source = report, of_the_source
    return error


_PATIENCE: Final = 1.0
"""Seconds before the first progress report."""

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
        self._since = now if self._since is None else self._since
        if (passed := now - self._since) < self._next:
            return
        self._next += 12 * _LONG
        number = environment.launcher_number("RANK")
        rank = "" if number is None else f" (rank {number})"
        more = f" and {len(names) - 1} others" if len(names) > 1 else ""
        print(
            f"qsync{rank}: has been waiting {passed:.0f} s for another process that compiles "
            f"{names[0]}{more}; run `qsync kernels build` to compile before training",
            file=sys.stderr,
        )


class BuildWatcher(Protocol):
    """Receiver of a build's progress."""

    def __call__(self, done: int, running: Sequence[str]) -> None:
        """Report the number of finished units and the names of running ones.

        Called several times a second.
        """


@contextlib.contextmanager
def watch(total: int, wanted: bool) -> Iterator[BuildWatcher]:
    """Yield the receiver of the progress of `total` units."""
    if not wanted or environment.launcher_number("RANK"):
        yield lambda done, running: None
    elif sys.stderr.isatty():
        bar = _Bar(total)
        try:
            yield bar
        finally:
            bar.close()
    else:
        yield _Lines(total)


class _Bar:
    def __init__(self, total: int) -> None:
        self._total, self._since = total, time.monotonic()
        self._shown: tuple[Progress, TaskID] | None = None

    def __call__(self, done: int, running: Sequence[str]) -> None:
        if self._shown is None:
            if time.monotonic() - self._since < _PATIENCE:
                return
            self._shown = self._start()
        bar, task = self._shown
        bar.update(task, completed=done, running=", ".join(running))

    def _start(self) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )
        from rich.table import Column

        subject = TextColumn(
            "{task.fields[running]}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis"),
        )
        columns = (
            TextColumn("compiling CUDA kernels"),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            subject,
        )
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        bar.start()
        return bar, bar.add_task("", total=self._total, running="")

    def close(self) -> None:
        if self._shown is not None:
            self._shown[0].stop()


class _Lines:
    def __init__(self, total: int) -> None:
        self._total, self._since, self._said = total, time.monotonic(), -1

    def __call__(self, done: int, running: Sequence[str]) -> None:
        passed = time.monotonic() - self._since
        if passed >= _PATIENCE and done != self._said:
            now = f", now {', '.join(running)}" if running else ""
            print(
                f"qsync: compiling CUDA kernels: {done} of {self._total} after {passed:.0f} s{now}",
                file=sys.stderr,
            )
            self._said = done


@dataclass(frozen=True)
class Todo:
    """Unit that is not in the cache, its keys, and its toolchain."""

    unit: TranslationUnit
    content: str
    tools: Toolchain
    key: str


@dataclass
class _Job:
    """Compilation of a unit: it waits for the lock of its key, then nvcc runs in `work`."""

    given: Todo
    lock: FileLock
    work: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    since: float = 0.0

    @property
    def unit(self) -> TranslationUnit:
        return self.given.unit


def compile_units(
    todo: Sequence[Todo],
    place: Path,
    jobs: int,
    progress: bool,
    ended: Callable[[TranslationUnit, CacheEntry | KernelError], None],
) -> None:
    """Compile units in parallel, as memory permits, heavy ones first, into the cache at `place`.

    Args:
        jobs: limit of parallel compilers.
        progress: whether to report progress on standard error.
        ended: called once per unit, with its cache entry or its error.
    """
    waiting = [
        _Job(item, kernel_cache.lock(place, item.content, item.key))
        for item in sorted(todo, key=lambda item: not item.unit.heavy)
    ]
    running: list[_Job] = []
    memory = available_memory() // processes()
    say = WaitNotice()
    with watch(len(todo), progress) as tell, _cleared(running):
        while waiting or running:
            free = available_memory()
            for job in list(waiting):
                used = sum(need(other.unit) for other in running)
                wanted = need(job.unit)
                if running and (len(running) >= jobs or used + wanted > memory or wanted > free):
                    continue
                if not _acquired(job.lock, place):
                    continue
                waiting.remove(job)
                running.append(job)
                # Another process may have built it in the meantime.
                if entry := kernel_cache.find(place, job.given.content, job.given.key):
                    ended(job.unit, entry)
                    _finish(job, running)
                    continue
                try:
                    with _interrupted_after():
                        job.work = kernel_cache.workplace(place)
                        job.since = time.monotonic()
                        job.process = start(job.unit, job.work, job.given.tools)
                except KernelError as error:
                    ended(job.unit, error)
                    _finish(job, running)
            for job in [
                job for job in running if job.process is not None and job.process.poll() is not None
            ]:
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
    tools = job.given.tools
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
