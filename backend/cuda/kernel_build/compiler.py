"""Libraries of translation units: from the cache, or compiled in parallel by nvcc and verified.

Each compilation runs under the lock of its cache key, so one of several processes compiles. A
library is used only without register spills and serialized matrix products, and with the tensor
core instruction: others are correct, but slow. Every exit ends all compilers and removes files.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from qsync_fx import environment
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import kernel_cache
from qsync_fx.backend.cuda.kernel_build.kernel_cache import (
    TEMPLATES,
    CacheEntry,
    content_key,
    tools_key,
)
from qsync_fx.backend.cuda.kernel_build.library import Manifest, Resources, shared_memory
from qsync_fx.backend.cuda.kernel_config import FORWARD
from qsync_fx.backend.cuda.toolchain import Toolchain, dotted, library_folders, tool, toolchain
from qsync_fx.errors import KernelError, OptionError, RefusedKernelError, ToolchainError
from qsync_fx.progress import progress as shown_progress


@dataclass(frozen=True)
class Built:
    """Result of a build: the library or the failure of each unit."""

    libraries: dict[TranslationUnit, Path]
    failures: dict[TranslationUnit, KernelError]

    def add(self, unit: TranslationUnit, result: CacheEntry | KernelError) -> None:
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


@dataclass
class Job:
    """Compilation of a unit that is not in the cache: nvcc runs in `work`, under `lock`."""

    unit: TranslationUnit
    content: str
    key: str
    tools: Toolchain
    lock: FileLock
    work: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    since: float = 0.0


def attempt(
    units: Sequence[TranslationUnit],
    *,
    progress: bool = True,
    jobs: int | None = None,
    folder: Path | None = None,
    compiling: bool = True,
) -> Built:
    """Return the library or the failure of each unit; compile those that are not in the cache.

    `folder` replaces the user's cache and the folders of kernels built ahead of time. Without
    `compiling` a missing library is a failure. See `job_limit` for `jobs`.
    """
    place = folder or kernel_cache.root()
    ahead = [] if folder else kernel_cache.ahead_of_time()
    tools_of = functools.cache(functools.partial(_tools, place))
    built, todo = Built({}, {}), []
    for unit in dict.fromkeys(units):
        content = content_key(unit)
        if entry := next(filter(None, (kernel_cache.find(path, content) for path in ahead)), None):
            built.add(unit, entry)
            continue
        tools, key = tools_of(unit.templates)
        if entry := kernel_cache.find(place, content, key):
            built.add(unit, entry)
        elif isinstance(tools, ToolchainError):
            built.add(unit, tools)
        elif not compiling:
            built.add(unit, KernelError("the kernel has not been compiled", where=unit.name))
        else:
            lock = kernel_cache.lock(place, content, str(key))
            todo.append(Job(unit, content, str(key), tools, lock))
    if todo:
        kernel_cache.sweep(place)
        compile_units(todo, place, job_limit(jobs), progress, built.add)
    return Built(
        {unit: built.libraries[unit] for unit in units if unit in built.libraries},
        {unit: built.failures[unit] for unit in units if unit in built.failures},
    )


def _tools(place: Path, templates: bool) -> tuple[Toolchain | ToolchainError, str | None]:
    """Return the tools of this machine and their key, or the error of a missing tool."""
    try:
        tools = toolchain(templates)
    except ToolchainError as error:
        if place.is_dir():
            kernel_cache.prepare(place)
        return error, None
    kernel_cache.prepare(place)
    return tools, tools_key(tools, FLAGS_IN_KEY)


HEAVY: Final = 4_600_000_000
LIGHT: Final = 1_300_000_000
"""Peak bytes of nvcc for a heavy or light unit (measured with nvcc 13.0)."""


def peak_bytes(unit: TranslationUnit) -> int:
    return HEAVY if unit.heavy else LIGHT


def job_limit(value: int | None = None) -> int:
    """Return the limit of parallel compilers: `value`, $QSYNC_BUILD_JOBS, or by cores."""
    if value is not None and value < 1:
        raise OptionError(
            f"the number of parallel compilers cannot be {value}",
            where="jobs",
            do="set a number of at least 1",
        )
    number = value or environment.count("QSYNC_BUILD_JOBS")
    return number or max(1, len(os.sched_getaffinity(0)) // local_processes())


def local_processes() -> int:
    """Return the number of processes of a training job on this machine, as set by torchrun."""
    return environment.launcher_number("LOCAL_WORLD_SIZE") or 1


def available_memory() -> int:
    """Return the available bytes of memory of the machine and this process's cgroups."""
    values = []
    if kilobytes := _match("/proc/meminfo", r"^MemAvailable:\s+(\d+) kB"):
        values.append(int(kilobytes) * 1024)
    # The cgroup (version 2) and its parents limit the process.
    path = Path("/sys/fs/cgroup", _match("/proc/self/cgroup", r"^0::/+(.*)$"))
    for folder in (path, *path.parents[:-3]):
        limit, used = _match(folder / "memory.max"), _match(folder / "memory.current")
        if limit and used:
            # The kernel can reclaim inactive file pages at once: compiling reads many files.
            cached = _match(folder / "memory.stat", r"^inactive_file (\d+)$") or 0
            values.append(max(0, int(limit) - int(used) + int(cached)))
    return min(values, default=HEAVY)


def _match(path: str | Path, pattern: str = r"^(\d+)$") -> str:
    """Return the group of a pattern in a file; "" without a match."""
    with contextlib.suppress(OSError):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        return "".join(re.findall(pattern, text, flags=re.MULTILINE)[:1])
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


def _runtime(compiler: Path) -> list[str]:
    """Return the flags that link the shared CUDA runtime; wheels have only its full name."""
    folders = library_folders(compiler)
    full = [path for folder in folders for path in sorted(folder.glob("libcudart.so.*"))]
    if full and not any((folder / "libcudart.so").exists() for folder in folders):
        return ["-cudart", "none", f"-Xlinker={full[0]}"]
    return ["-cudart", "shared"]


def described(tools: Toolchain) -> str:
    """Return the names and versions of the compilers."""
    versions = f"nvcc {dotted(tools.nvcc.version)}, host compiler {dotted(tools.host.version)}"
    if tools.cutlass.folders:
        versions += f", CUTLASS {dotted(tools.cutlass.version)}"
    return versions


def compile_units(
    jobs: Sequence[Job],
    place: Path,
    limit: int,
    progress: bool,
    ended: Callable[[TranslationUnit, CacheEntry | KernelError], None],
) -> None:
    """Compile units in parallel, heavy ones first, into the cache at `place`.

    As many compilers run as `limit` and memory permit, and always at least one. `ended` gets the
    cache entry or the error of each unit.
    """
    waiting = sorted(jobs, key=lambda job: not job.unit.heavy)
    running: list[Job] = []
    memory = available_memory() // local_processes()
    idle_until: float | None = time.monotonic() + _LONG
    shown = progress and not environment.launcher_number("RANK")
    bar = shown_progress("compiling CUDA kernels", len(jobs), shown)
    with bar as advance:
        try:
            while waiting or running:
                free = available_memory()
                for job in list(waiting):
                    used = sum(peak_bytes(other.unit) for other in running)
                    fits = used + peak_bytes(job.unit) <= memory and peak_bytes(job.unit) <= free
                    if running and not (fits and len(running) < limit):
                        continue
                    if _acquired(job.lock, place):
                        waiting.remove(job)
                        running.append(job)
                count = 0
                for job in list(running):
                    if (result := _result(job, place)) is not None:
                        ended(job.unit, result)
                        _finish(job)
                        running.remove(job)
                        count += 1
                advance(", ".join(job.unit.name for job in running), count=count)
                if running or count:
                    idle_until = time.monotonic() + _LONG
                elif idle_until and time.monotonic() > idle_until:
                    _report_waiting(waiting)
                    idle_until = None
                time.sleep(0.05)
        finally:
            for job in running:
                _finish(job)


_LONG: Final = 5.0
"""Seconds of waiting for another process before the notice."""


def _report_waiting(jobs: Sequence[Job]) -> None:
    """Print that this process, which looks hung, waits for others; every rank does so."""
    process = "qsync"
    if (rank := environment.launcher_number("RANK")) is not None:
        process += f" (rank {rank})"
    print(
        f"{process}: has been waiting {_LONG:.0f} s for another process that compiles "
        f"{jobs[0].unit.name} (kernels to wait for: {len(jobs)}); run `qsync kernels build` to "
        "compile before training",
        file=sys.stderr,
    )


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


def _result(job: Job, place: Path) -> CacheEntry | KernelError | None:
    """Start the compiler of a job, or return its result; None while it runs."""
    try:
        if job.process is None:
            # Another process may have built it in the meantime.
            if entry := kernel_cache.find(place, job.content, job.key):
                return entry
            _start(job, place)
        elif job.process.poll() is not None:
            return _stored(job, place)
    except KernelError as error:
        return error
    return None


def _start(job: Job, place: Path) -> None:
    """Start the compiler of a job in a new folder, with its output in the file `log`."""
    name = job.unit.name
    if not re.fullmatch(r"[A-Za-z0-9_]{1,200}", name):
        raise KernelError(
            "the name of this unit is not a valid file name",
            where=name,
            do="use letters, digits and _ only",
        )
    arguments = command(job.unit, job.tools)
    job.since = time.monotonic()
    try:
        job.work = kernel_cache.workplace(place)
        (job.work / f"{name}.cu").write_text(job.unit.source, encoding="utf-8")
        (job.work / "tmp").mkdir()
        with open(job.work / "log", "wb") as log:
            # A process group, so that the children of nvcc can be killed with it.
            job.process = subprocess.Popen(
                arguments,
                cwd=job.work,
                env=environment.child_environment(TMPDIR=str(job.work / "tmp")),
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


def _stored(job: Job, place: Path) -> CacheEntry:
    """Return the cache entry of a finished compilation, after verifying it."""
    assert job.work is not None and job.process is not None
    unit = job.unit
    report = (job.work / "log").read_text(encoding="utf-8", errors="replace")
    library = job.work / f"{unit.name}.so"
    if job.process.returncode or not library.is_file():
        raise _failure(job, report, job.process.returncode, place / "failed")
    used, refused, opcode = resources(report), complaint(report), ""
    if unit.opcode and not refused and (result := instructions(listing(library))):
        opcode = next((name for name in result if name.startswith(unit.opcode)), "")
        if not opcode:
            refused = f"its machine code has no {unit.opcode} instruction"
    size, digest = kernel_cache.fingerprint(library)
    if refused:
        size, digest = 0, ""
        library.unlink()
    else:
        used = replace(used, shared_memory=max(used.shared_memory, shared_memory(library)))
    manifest = Manifest(
        content=job.content,
        tools=job.key,
        name=unit.name,
        arch=unit.arch,
        sha256=digest,
        size=size,
        refused=refused,
        resources=used,
        opcode=opcode,
        seconds=round(time.monotonic() - job.since, 2),
        created=round(time.time(), 3),
        compilers=f"{described(job.tools)}, {' '.join(FLAGS_IN_KEY)}",
    )
    shutil.rmtree(job.work / "tmp")
    return kernel_cache.store(place, job.work, manifest)


_KILLED: Final = "the compiler was killed, probably for lack of memory: set QSYNC_BUILD_JOBS=1"
_OF_THE_MACHINE: Final = (
    (r"\bKilled\b|signal 9|out of memory|Cannot allocate", _KILLED),
    ("unsupported (GNU|clang) version", "set NVCC_CCBIN to a host compiler that this nvcc accepts"),
    ("No space left", "set QSYNC_CACHE_DIR to a folder on a disk with free space"),
)
"""Patterns of the output of a compiler whose failure another source would not avoid, and advice."""


def _failure(job: Job, report: str, status: int, saved: Path) -> ToolchainError:
    """Return the error for a compiler that failed, and move source and output to `saved`."""
    assert job.work is not None
    name = job.unit.name
    with contextlib.suppress(OSError):
        saved.mkdir(exist_ok=True)
        os.replace(job.work / f"{name}.cu", saved / f"{name}.cu")
        os.replace(job.work / "log", saved / f"{name}.log")
    last = "\n".join(f"  | {line}" for line in report.strip().splitlines()[-15:])
    advice = [do for pattern, do in _OF_THE_MACHINE if re.search(pattern, report)]
    if status < 0:
        advice = [_KILLED]
    see = f"see the complete output in {saved / name}.log, and the source next to it"
    error = ToolchainError(
        f"nvcc failed with status {status} on {name}; its last lines:\n{last}",
        where=f"cd {shlex.quote(str(saved))} && {shlex.join(command(job.unit, job.tools))}",
        do=next(iter(advice), see),
    )
    error.of_the_source = not advice
    return error


def _finish(job: Job) -> None:
    """End a job in any state: its processes, files and lock."""
    if job.process is not None and job.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()
    if job.work is not None and job.work.exists():
        shutil.rmtree(job.work, ignore_errors=True)
    job.lock.release()


def resources(report: str) -> Resources:
    """Return the resources reported by `ptxas -v`, the maximum over all kernels."""

    def largest(pattern: str) -> int:
        return max(map(int, re.findall(pattern, report)), default=0)

    return Resources(
        registers=largest(r"Used (\d+) registers"),
        shared_memory=largest(r"(\d+)(?:\+\d+)? bytes smem"),
        stack=largest(r"(\d+) bytes stack frame"),
        spills=largest(r"(\d+) bytes spill (?:stores|loads)"),
    )


def complaint(report: str) -> str:
    """Return why kernels with this `ptxas -v` report must not be used; "" if they may."""
    if re.search(r"Performance Loss|instructions are serialized", report):
        codes = dict.fromkeys(re.findall(r"C75\d\d", report))
        return f"ptxas serializes its matrix products ({', '.join(codes)})"
    used = resources(report)
    if used.spills:
        return f"it spills {used.spills} bytes of registers to memory (it uses {used.registers})"
    if used.stack:
        return f"it uses {used.stack} bytes of stack"
    return "" if used.registers else "it contains no kernel"


def disassembler() -> Path | None:
    """Return cuobjdump, if nvdisasm, which it calls, exists too."""
    result = tool("cuobjdump")
    return result and tool("nvdisasm", result.parent) and result


def listing(code: Path) -> str:
    """Return the disassembly of a library or object file; "" without a suitable disassembler."""
    program = disassembler()
    nvdisasm = program and tool("nvdisasm", program.parent)
    if program is None or nvdisasm is None:
        return ""
    env = environment.child_environment(NVDISASM_PATH=str(nvdisasm.parent))
    done = subprocess.run(
        [program, "-sass", code],
        capture_output=True,
        text=True,
        errors="replace",
        env=env,
        check=False,
    )
    return "" if done.returncode else done.stdout


def instructions(listed: str) -> Counter[str]:
    """Return the count of each SASS instruction in a disassembly ("IMMA.16832.S8.S8.SAT")."""
    return Counter(_INSTRUCTION.findall(listed))


_INSTRUCTION: Final = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_.]*)", flags=re.MULTILINE
)
