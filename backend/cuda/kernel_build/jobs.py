"""Units that are not in the cache are compiled side by side, each under the lock of its key.

Invariant: whatever happens, an interrupt too, no compiler goes on running and nothing half-written stays. Of several processes that want
the same library, one compiles it and the others wait.

How many compilers may run at once: as many as there are cores and memory for.

Invariant: one may always run. Compiling a kernel of CUTLASS 3 takes 3.3 to 4.4 GB; a machine that swaps, or kills processes for lack
of memory, compiles slower than one that waits.

One run of nvcc, or of what takes its place for sm_70 (`nvrtc`): its command line, its process, and the error when it fails.

Invariant: the command that an error shows is the one that ran, and can be run again: the source and the whole output stay in a folder.

What is said while kernels compile: nothing in the first second, then a bar on a terminal and plain lines elsewhere.

Invariant: it writes to standard error only, and of the processes of a training job only the first one says anything.
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
from qsync_fx.backend.cuda import toolchain
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
"""Bytes that nvcc takes for a unit, heavy or not; measured with nvcc 13.0."""


def need(unit: TranslationUnit) -> int:
    """Returns how many bytes of memory compiling a unit takes."""
    return HEAVY if unit.heavy else LIGHT


def jobs(value: int | None = None) -> int:
    """Returns how many compilers may run as far as cores go: the number given, $QSYNC_BUILD_JOBS, or this process's share of the cores.

    Raises:
        OptionError: the number is no whole number from 1.
    """
    if value is not None:
        if value < 1:
            raise OptionError(
                f"{value} compilers cannot run at once", where="jobs", do="give a number from 1"
            )
        return value
    if (number := environment.count("QSYNC_BUILD_JOBS")) is not None:
        return number
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, cores // processes())


def processes() -> int:
    """Returns how many processes of a training job share this machine, as torchrun tells them."""
    return environment.launcher_number("LOCAL_WORLD_SIZE") or 1


def available_memory() -> int:
    """Returns how many bytes of memory are free for use, by the machine and by the limits of this process's control group."""
    free = [_machine(), *(_group(Path("/sys/fs/cgroup", part)) for part in _groups())]
    return min((value for value in free if value is not None), default=HEAVY)


def _machine() -> int | None:
    result = re.search(
        r"^MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")), flags=re.MULTILINE
    )
    return int(result[1]) * 1024 if result else None


def _groups() -> list[str]:
    """Returns the paths of this process's control group (version 2) and those around it, which limit it too."""
    result = re.search(r"^0::/(.*)$", _text(Path("/proc/self/cgroup")), flags=re.MULTILINE)
    parts = result[1].split("/") if result and result[1] else []
    return ["/".join(parts[:count]) for count in range(len(parts) + 1)]


def _group(folder: Path) -> int | None:
    limit, used = (_text(folder / name).strip() for name in ("memory.max", "memory.current"))
    if not (limit.isdigit() and used.isdigit()):
        return None
    # What the kernel can drop at once is no use of memory: compiling reads many files.
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
    # What is missing shows now, not when the library is loaded.
    "-Xlinker=-z,defs",
    "-Xptxas=-v",
)
_SHOWN_LINES: Final = 15


def command(unit: TranslationUnit, tools: Toolchain) -> list[str]:
    """Returns the command that compiles NAME.cu in the current folder to NAME.so; raises `KernelError` for what NVRTC does not take."""
    if tools.toolkit:
        if unit.interface != "gemm":
            raise KernelError(
                "without an nvcc of CUDA 12 there are products for sm_70 alone: torch does the rest",
                where=unit.name,
                do="install CUDA 12.4 to 12.9 and set QSYNC_NVCC to its nvcc, if this is wanted",
            )
        return toolchain.command(unit.name, unit.arch, tools, (TEMPLATES,))
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


def flags(tools: Toolchain) -> tuple[str, ...]:
    """Returns the flags of `command`, without paths."""
    return toolchain.FLAGS if tools.toolkit else (*FLAGS, f"PTX for {', '.join(FORWARD)}")


def described(tools: Toolchain) -> str:
    """Returns what compiles, with versions."""
    name = "NVRTC" if tools.toolkit else "nvcc"
    templates = f", CUTLASS {dotted(tools.cutlass.version)}" if tools.cutlass.folders else ""
    return f"{name} {dotted(tools.nvcc.version)}, host compiler {dotted(tools.host.version)}{templates}"


def _runtime(compiler: Path) -> list[str]:
    """Returns how to link CUDA's runtime, one for all libraries and torch. Pip wheels hold it under its full name only."""
    folders = library_folders(compiler)
    if not any((folder / "libcudart.so").exists() for folder in folders):
        for library in (
            path for folder in folders for path in sorted(folder.glob("libcudart.so.*"))
        ):
            return ["-cudart", "none", f"-Xlinker={library}"]
    return ["-cudart", "shared"]


def start(unit: TranslationUnit, work: Path, tools: Toolchain) -> subprocess.Popen[bytes]:
    """Starts nvcc on a unit in the folder `work`, where its output goes to the file `log`; raises `KernelError` where that fails."""
    if not re.fullmatch(r"[A-Za-z0-9_]{1,200}", unit.name):
        raise KernelError(
            "this name of a unit makes no file name",
            where=unit.name,
            do="use letters, digits and _",
        )
    arguments = command(unit, tools)
    try:
        (work / f"{unit.name}.cu").write_text(unit.source, encoding="utf-8")
        (work / "tmp").mkdir()
        with open(work / "log", "wb") as log:
            # A group of its own, so that what nvcc starts can be ended with it; its temporary files go where ours go.
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
            f"compiling cannot start: {error}",
            where=shlex.join(arguments),
            do="check that the disk has space",
        ) from error


def failure(
    unit: TranslationUnit, work: Path, status: int, tools: Toolchain, saved: Path
) -> ToolchainError:
    """Returns the error for a compiler that has ended with `status`; source and output move from `work` to the folder `kept`."""
    report = (work / "log").read_text(encoding="utf-8", errors="replace")
    with contextlib.suppress(OSError):
        saved.mkdir(exist_ok=True)
        os.replace(work / f"{unit.name}.cu", saved / f"{unit.name}.cu")
        os.replace(work / "log", saved / f"{unit.name}.log")
    last = "\n".join(f"  | {line}" for line in report.strip().splitlines()[-_SHOWN_LINES:])
    of_the_source = False
    if status < 0 or re.search(r"\bKilled\b|signal 9|out of memory|Cannot allocate", report):
        gigabytes = need(unit) / 1e9
        do = f"it was killed, mostly for lack of memory (this takes about {gigabytes:.1f} GB): set QSYNC_BUILD_JOBS=1"
    elif "unsupported GNU version" in report or "unsupported clang version" in report:
        do = "name a host compiler that this nvcc accepts in NVCC_CCBIN"
    elif "No space left" in report:
        do = "set QSYNC_CACHE_DIR to a folder on a disk with space"
    else:
        of_the_source = True
        do = f"the whole output is in {saved / unit.name}.log, the source beside it"
    error = ToolchainError(
        f"{'NVRTC' if tools.toolkit else 'nvcc'} failed with status {status} on {unit.name}"
        + (f"; its last lines:\n{last}" if last else " and said nothing"),
        where=f"cd {shlex.quote(str(saved))} && {shlex.join(command(unit, tools))}",
        do=do,
    )
    error.output, error.of_the_source = report, of_the_source
    return error


_PATIENCE: Final = 1.0
"""Seconds without a word."""

_LONG: Final = 5.0
"""Seconds that one waits for another process before it is said, and then again twelve times as long."""


class WaitNotice:
    """Says that a process waits for what others compile, which looks like one that hangs; all ranks say it, each for itself."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._next = _LONG

    def __call__(self, names: Sequence[str]) -> None:
        """Takes what others compile while this process compiles nothing; nothing, where it does not wait."""
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
            f"qsync{rank}: has waited {passed:.0f} s for another process that compiles {names[0]}{more}; "
            "qsync kernels build compiles before a run",
            file=sys.stderr,
        )


class BuildWatcher(Protocol):
    """What is told how far a build is."""

    def __call__(self, done: int, running: Sequence[str]) -> None:
        """Takes how many units are done, and the names of those that are being compiled; called several times a second."""


@contextlib.contextmanager
def watch(total: int, wanted: bool) -> Iterator[BuildWatcher]:
    """Yields what to tell while `total` units are compiled."""
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
    """A unit that is not in the cache, its keys, and what compiles it."""

    unit: TranslationUnit
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
    def unit(self) -> TranslationUnit:
        return self.given.unit


def compile_units(
    todo: Sequence[Todo],
    place: Path,
    jobs: int,
    progress: bool,
    ended: Callable[[TranslationUnit, CacheEntry | KernelError], None],
) -> None:
    """Compiles units side by side, as memory allows, the heavy ones first, into the cache at `place`.

    Args:
        jobs: how many compilers may run at once.
        progress: whether to say on standard error what is compiled.
        ended: is called once for each unit, with its entry in the cache or with the error why there is none.
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
                # Another process may have built it while this one waited.
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


def _stored(job: _Job, place: Path) -> CacheEntry:
    """Returns the entry of what nvcc has made, after looking at it; raises `ToolchainError` where it failed."""
    assert job.work is not None and job.process is not None
    tools = job.given.tools
    seconds = time.monotonic() - job.since
    report = (job.work / "log").read_text(encoding="utf-8", errors="replace")
    library = job.work / f"{job.unit.name}.so"
    if job.process.returncode or not library.is_file():
        raise failure(job.unit, job.work, job.process.returncode, tools, place / "failed")
    # NVRTC's machine code lies in the library as bytes, which no tool finds there.
    code = job.work / f"{job.unit.name}.cubin" if tools.toolkit else library
    refused, opcode = sass.complaint(report), ""
    if job.unit.opcode and not refused and (result := sass.instructions(code)):
        opcode = next((name for name in result if name.startswith(job.unit.opcode)), "")
        refused = "" if opcode else f"its machine code has no {job.unit.opcode}"
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
        compilers=f"{described(tools)}, {' '.join(flags(tools))}",
    )
    if refused:
        library.unlink()
    if code != library:
        code.unlink()
    shutil.rmtree(job.work / "tmp")
    return kernel_cache.store(place, job.work, manifest)


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
