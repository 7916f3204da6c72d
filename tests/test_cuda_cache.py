"""Building, keeping and loading libraries: real nvcc on units of a few lines, real processes, real damage."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from small_units import SPILLS, small_unit

from qsync_fx.backend.cuda import budget, cache, compiler, library, manifest, toolchain
from qsync_fx.backend.cuda.abi import GemmArguments
from qsync_fx.backend.cuda.keys import content_key
from qsync_fx.backend.cuda.manifest import Manifest, Resources
from qsync_fx.errors import KernelError, ToolchainError

try:
    TOOLS = toolchain.toolchain("sm_80")
except ToolchainError as error:
    pytest.skip(str(error), allow_module_level=True)

UNIT = small_unit()

WRAPPER = """\
#!/bin/sh
case "$*" in *--version*|*--dryrun*) exec {real} "$@";; esac
echo run >> {calls}
{before}
exec {real} "$@"
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds `UNIT`."""
    home = tmp_path_factory.mktemp("a cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("QSYNC_KERNELS_PATH", raising=False)
        patch.setenv("QSYNC_CACHE_DIR", str(home))
        compiler.build([UNIT], progress=False)
    return home


@pytest.fixture
def home(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which is the user's cache."""
    copy = tmp_path / "the cache"
    shutil.copytree(built, copy)
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(copy))
    monkeypatch.delenv("QSYNC_KERNELS_PATH", raising=False)
    return copy


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Puts a program that counts before nvcc; returns what tells how often it was called to compile."""
    return watched(tmp_path, monkeypatch)


def watched(folder: Path, monkeypatch: pytest.MonkeyPatch, before: str = "") -> Callable[[], int]:
    log, script = folder / "calls", folder / "nvcc"
    script.write_text(WRAPPER.format(real=TOOLS.nvcc.path, calls=log, before=before))
    script.chmod(0o755)
    monkeypatch.setenv("QSYNC_NVCC", str(script))
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


def entry_of(home: Path) -> cache.Entry:
    (found,) = cache.entries(home / "kernels")
    assert isinstance(found, cache.Entry)
    return found


def nothing_is_left(home: Path) -> bool:
    return not list((home / "kernels").glob(".build-*"))


# Building and loading.


def test_what_is_built_is_kept(home: Path, calls: Callable[[], int]) -> None:
    path = compiler.build([UNIT, UNIT])[UNIT]
    assert path == entry_of(home).library
    assert path.is_file()
    assert calls() == 0
    assert nothing_is_left(home)


def test_a_library_answers(home: Path) -> None:
    path = compiler.build([UNIT])[UNIT]
    loaded = library.load(path, UNIT)
    assert loaded is library.load(path, UNIT)
    assert loaded.can_implement(GemmArguments(n=8)) is None
    assert loaded.can_implement(GemmArguments(n=3)) == "Error Misaligned Operand"
    # More than 32 bits.
    assert loaded.workspace(GemmArguments(m=5000)) == 5000 * 1000000007
    assert loaded.shared_memory() == 4096
    with pytest.raises(KernelError, match="Error Workspace Null"):
        loaded.run(GemmArguments(n=8), 0, 0)
    assert not hasattr(ctypes.CDLL(None), "qsync_run"), "its symbols must not be seen by others"


def test_what_the_manifest_says(home: Path) -> None:
    found = entry_of(home).manifest
    assert (found.name, found.arch, found.refused) == ("small", "sm_80", "")
    assert 0 < found.resources.registers < 40
    assert (found.resources.stack, found.resources.spills) == (0, 0)
    assert found.seconds > 0
    assert abs(found.created - time.time()) < 3600
    assert found.compilers.startswith(f"nvcc {toolchain.dotted(TOOLS.nvcc.version)}, host compiler ")


def test_a_library_of_another_unit_is_not_taken(home: Path, tmp_path: Path) -> None:
    path = compiler.build([UNIT])[UNIT]
    with pytest.raises(KernelError, match="it is 'small', not 'other'"):
        library.load(path, small_unit("other"))
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(KernelError, match="cannot load it"):
        library.load(tmp_path / "text.so", UNIT)
    libc = next(Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if "/libc." in line)
    with pytest.raises(KernelError, match="no function qsync_"):
        library.load(libc, UNIT)


def test_a_library_of_another_version_is_not_taken(home: Path) -> None:
    unit = small_unit(abi="QSYNC_ABI_VERSION + 1")
    with pytest.raises(KernelError, match="version 2 of the interface, not 1"):
        library.load(compiler.build([unit])[unit], unit)


@pytest.mark.parametrize("change", [{"arch": "sm_86"}, {"opcode": "FFMA"}, {"remark": "!"}, {"interface": "conv"}])
def test_the_key_holds_everything(change: dict[str, str]) -> None:
    assert content_key(small_unit(**change)) != content_key(UNIT)
    assert content_key(small_unit()) == content_key(UNIT)


def test_headers_of_ours_are_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qsync_fx.backend.cuda import keys

    (tmp_path / "abi.h").write_text('#pragma once\n#  include "inner.cuh"\n')
    (tmp_path / "inner.cuh").write_text("// one\n")
    (tmp_path / "unused.h").write_text("// one\n")
    monkeypatch.setattr(keys, "TEMPLATES", tmp_path)
    assert set(keys.included(UNIT.source)) == {"abi.h", "inner.cuh"}
    before = content_key(UNIT)
    (tmp_path / "unused.h").write_text("// two\n")
    assert content_key(UNIT) == before
    (tmp_path / "inner.cuh").write_text("// two\n")
    assert content_key(UNIT) != before


def test_flags_in_the_environment_are_in_the_key(
    home: Path, calls: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    compiler.build([UNIT])
    assert calls() == 1


def test_the_digest_of_headers_is_remembered_and_made_anew(tmp_path: Path) -> None:
    from qsync_fx.backend.cuda.keys import headers_digest

    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "a.h").write_text("one")
    headers = toolchain.Headers((folder,), (4, 2, 0))
    first = headers_digest(headers, tmp_path)
    assert headers_digest(headers, tmp_path) == headers_digest(headers) == first
    (remembered,) = tmp_path.glob("headers-*")
    remembered.write_text("f" * 64)
    assert headers_digest(headers, tmp_path) == "f" * 64
    remembered.write_text("something else")
    assert headers_digest(headers, tmp_path) == first
    (folder / "a.h").write_text("three")
    assert headers_digest(headers, tmp_path) not in (first, "f" * 64)


# Failing.


def test_a_source_that_does_not_compile(home: Path) -> None:
    bad, good = small_unit("bad", body="int x = nowhere_defined;"), UNIT
    result = compiler.attempt([bad, good], progress=False)
    assert list(result.libraries) == [good]
    error = result.failures[bad]
    assert isinstance(error, ToolchainError)
    assert 'identifier "nowhere_defined" is undefined' in str(error)
    assert 'identifier "nowhere_defined" is undefined' in error.output
    assert nothing_is_left(home)
    # The command that the error shows can be run, and says the same.
    assert error.where is not None
    again = subprocess.run(error.where, shell=True, capture_output=True, text=True, check=False)
    assert again.returncode != 0
    assert "nowhere_defined" in again.stderr + again.stdout
    with pytest.raises(ToolchainError, match="nowhere_defined"):
        compiler.build([bad, good], progress=False)


def test_a_kernel_that_keeps_its_values_on_the_stack_is_refused_and_remembered(
    home: Path, calls: Callable[[], int]
) -> None:
    unit = small_unit("slow", body=SPILLS)
    for _ in range(2):
        with pytest.raises(KernelError, match="must not be used: it keeps 1200 bytes on the stack"):
            compiler.build([unit], progress=False)
    assert calls() == 1


def test_an_instruction_that_is_not_there_is_refused(home: Path) -> None:
    from qsync_fx.backend.cuda import sass

    if sass.disassembler() is None:
        pytest.skip("no cuobjdump and nvdisasm")
    units = [small_unit(opcode="FFMA"), small_unit("other", opcode="IMMA")]
    result = compiler.attempt(units, progress=False)
    assert result.libraries.keys() == {units[0]}
    assert "has no IMMA" in str(result.failures[units[1]])


def test_a_target_that_nvcc_has_not(home: Path) -> None:
    try:
        toolchain.toolchain("sm_70")
    except ToolchainError:
        with pytest.raises(ToolchainError, match="V100"):
            compiler.build([small_unit(arch="sm_70")])
    else:
        pytest.skip("something here compiles for sm_70")
    assert not home.exists() or nothing_is_left(home)


def test_a_name_that_leads_elsewhere(home: Path) -> None:
    with pytest.raises(KernelError, match="makes no file name"):
        compiler.build([dataclasses.replace(UNIT, name="../../x")])
    assert nothing_is_left(home)


# Machines without a compiler.


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSYNC_NVCC", "/nowhere/nvcc")


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_what_is_cached_serves(home: Path) -> None:
    assert compiler.build([UNIT])[UNIT] == entry_of(home).library
    with pytest.raises(ToolchainError, match="QSYNC_NVCC=/nowhere/nvcc"):
        compiler.build([UNIT, small_unit("other")])


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_what_was_built_ahead_of_time_serves(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(home / "kernels", tmp_path / "brought here")
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("QSYNC_KERNELS_PATH", f"{tmp_path / 'empty'}{os.pathsep}{tmp_path / 'brought here'}")
    path = compiler.build([UNIT])[UNIT]
    assert path.is_relative_to(tmp_path / "brought here")
    assert library.load(path, UNIT).shared_memory() == 4096
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ToolchainError):
        compiler.build([UNIT])
    monkeypatch.setenv("QSYNC_KERNELS_PATH", str(tmp_path / "missing"))
    with pytest.raises(KernelError, match=r"does not exist[\s\S]*QSYNC_KERNELS_PATH"):
        compiler.build([UNIT])


def test_a_folder_of_its_own(home: Path, tmp_path: Path, calls: Callable[[], int]) -> None:
    """What `qsync kernels build --output` does: the folder holds all of it, whatever the cache has."""
    path = compiler.build([UNIT], folder=tmp_path / "to carry")[UNIT]
    assert path.is_relative_to(tmp_path / "to carry")
    assert calls() == 1


# Damage.


def truncate(entry: cache.Entry) -> None:
    entry.library.write_bytes(entry.library.read_bytes()[:-100])


def flip_a_bit(entry: cache.Entry) -> None:
    content = bytearray(entry.library.read_bytes())
    content[len(content) // 2] ^= 1
    entry.library.write_bytes(content)


def link(entry: cache.Entry) -> None:
    entry.library.rename(entry.folder / "moved.so")
    entry.library.symlink_to(entry.folder / "moved.so")


def change(**fields: object) -> Callable[[cache.Entry], None]:
    def do(entry: cache.Entry) -> None:
        path = entry.folder / manifest.FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return do


def text(content: str | bytes) -> Callable[[cache.Entry], None]:
    def do(entry: cache.Entry) -> None:
        (entry.folder / manifest.FILE).write_bytes(content.encode() if isinstance(content, str) else content)

    return do


DAMAGE: dict[str, Callable[[cache.Entry], None]] = {
    "truncated library": truncate,
    "changed library": flip_a_bit,
    "link in place of the library": link,
    "no library": lambda entry: entry.library.unlink(),
    "folder in place of the library": lambda entry: (entry.library.unlink(), entry.library.mkdir())[1],
    "no manifest": lambda entry: (entry.folder / manifest.FILE).unlink(),
    "empty manifest": text(""),
    "half a manifest": lambda entry: text((entry.folder / manifest.FILE).read_text()[:200])(entry),
    "other bytes": text(b"\xff\xfe\x00"),
    "nested": text("[" * 50_000),
    "long": text(" " * 100_000 + "{}"),
    "no object": text("[]"),
    "another key": change(content="0" * 64),
    "another tool": change(tools="0" * 64),
    "a name that leads elsewhere": change(name="../../../small"),
    "another name": change(name="other"),
    "another digest": change(sha256="0" * 64),
    "another size": change(size=1),
    "a size that is no number": change(size="1"),
    "not a number": change(seconds=float("nan")),
    "a later format": change(format=2),
    "a field too many": change(extra=1),
    "refused and there": change(refused="because"),
    "control characters": change(compilers="\x1b[31m"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_entry_is_as_if_it_were_not_there(how: str, home: Path) -> None:
    entry = entry_of(home)
    key = entry.manifest.content, entry.manifest.tools
    assert cache.find(home / "kernels", *key) == entry
    DAMAGE[how](entry)
    assert cache.find(home / "kernels", *key) is None
    assert cache.find(home / "kernels", key[0], None) is None
    assert list(cache.entries(home / "kernels")) == [entry.folder]


def test_a_damaged_entry_is_built_anew(home: Path, calls: Callable[[], int]) -> None:
    DAMAGE["truncated library"](entry_of_damaged := entry_of(home))
    path = compiler.build([UNIT])[UNIT]
    assert calls() == 1
    assert path == entry_of_damaged.library
    assert entry_of(home).library == path
    assert nothing_is_left(home)


@given(
    st.text()
    | st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists).map(json.dumps)
)
def test_any_text_is_a_manifest_or_a_value_error(anything: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 each says something else
        manifest.parse(anything)


VALID = Manifest(
    "0" * 64, "1" * 64, "small", "sm_90a", "2" * 64, 12345, "", Resources(1, 2, 3, 4), "IMMA.16832.S8", 1.5, 2.5, "nvcc"
)


@given(
    st.sampled_from([*Manifest.__dataclass_fields__, "format"]),
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
)
def test_a_manifest_with_another_value_is_valid_or_a_value_error(name: str, value: object) -> None:
    fields = json.loads(VALID.text())
    assert manifest.parse(VALID.text()) == VALID
    try:
        parsed = manifest.parse(json.dumps(fields | {name: value}))
    except ValueError:
        return
    assert manifest.parse(parsed.text()) == parsed
    assert (name == "format" and value == 1) or getattr(parsed, name) == value


# Folders.


def test_a_folder_that_anybody_may_write_to_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "kernels").chmod(0o777)
    with pytest.raises(KernelError, match="anybody may write"):
        compiler.build([small_unit("other")])
    with pytest.raises(KernelError, match="anybody may write"):
        compiler.build([UNIT])
    monkeypatch.setenv("QSYNC_KERNELS_PATH", str(home / "kernels"))
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path / "elsewhere"))
    with pytest.raises(KernelError, match="anybody may write"):
        compiler.build([UNIT])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(home: Path) -> None:
    os.chown(home / "kernels", 12345, -1)
    with pytest.raises(KernelError, match="belongs to another user"):
        compiler.build([UNIT])


def test_a_folder_that_cannot_be_made(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(home / "file"))
    with pytest.raises(KernelError, match=r"cannot be kept[\s\S]*QSYNC_CACHE_DIR"):
        compiler.build([UNIT])


def test_the_folder_is_for_the_user_alone(tmp_path: Path) -> None:
    assert cache.prepare(tmp_path / "a/b").stat().st_mode & 0o077 == 0


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSYNC_CACHE_DIR", "/one")
    assert cache.root() == Path("/one/kernels")
    monkeypatch.delenv("QSYNC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert cache.root() == Path("/two/qsync_fx/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/three")
    assert cache.root() == Path("/home/three/.cache/qsync_fx/kernels")


def test_what_killed_processes_left_is_swept(home: Path) -> None:
    old, new = cache.workplace(home / "kernels"), cache.workplace(home / "kernels")
    (old / "tmp").mkdir()
    os.utime(old, (0, 0))
    cache.sweep(home / "kernels")
    assert not old.exists()
    assert new.exists()


# The runtime that libraries want.


def test_the_runtime_is_found_where_the_system_does_not_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime of a version that no machine has, as torch brings it along in a folder of its own."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "one.c").write_text("int cuda_of_test(void) { return 41; }")
    (tmp_path / "two.c").write_text("int cuda_of_test(void); int answer(void) { return cuda_of_test() + 1; }")
    for output, source, *flags in (
        ("lib/libcudart.so.99", "one.c", "-Wl,-soname,libcudart.so.99"),
        ("kernel.so", "two.c", str(tmp_path / "lib/libcudart.so.99")),
    ):
        subprocess.run(
            [TOOLS.host.path, "-x", "c", source, "-x", "none", "-shared", "-fPIC", "-o", output, *flags],
            cwd=tmp_path,
            check=True,
        )
    with pytest.raises(KernelError, match=r"needs CUDA's runtime libcudart.so.99[\s\S]*brings CUDA 99"):
        library._opened(tmp_path / "kernel.so")
    monkeypatch.setattr(toolchain, "wheel_folders", lambda name: [tmp_path / name])
    assert library._opened(tmp_path / "kernel.so").answer() == 42


def test_the_runtime_of_this_toolkit_is_found() -> None:
    assert [path.name for path in library._runtimes(f"libcudart.so.{TOOLS.nvcc.version[0]}")]


# Processes.

BUILDER = """\
import sys
sys.path.insert(0, {tests!r})
from small_units import small_unit
from qsync_fx.backend.cuda import compiler
print(*compiler.build([small_unit("raced"), small_unit("raced_too")]).values(), sep="\\n")
"""


def builder() -> subprocess.Popen[str]:
    code = BUILDER.format(tests=str(Path(__file__).parent))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_of_two_processes_one_compiles(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first compiler waits until both processes want the library, or the second would only find it in the cache.
    calls = watched(tmp_path, monkeypatch, before="sleep 2")
    processes = [builder(), builder()]
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert calls() == 2, "two units, each compiled once"
    assert nothing_is_left(home)


def test_an_interrupt_leaves_nothing(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    calls = watched(tmp_path, monkeypatch, before=f"sleep 300 & echo $! >> '{pids}'; wait")
    process = builder()
    while not pids.exists() or not pids.read_text().strip():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    assert list((home / "kernels").glob(".build-*"))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=200)
    assert "KeyboardInterrupt" in said
    assert calls() >= 1
    assert nothing_is_left(home)
    # A process that was killed is gone soon, not at once.
    until = time.monotonic() + 30
    while any(alive(int(pid)) for pid in pids.read_text().split()):
        assert time.monotonic() < until, "a compiler goes on running"
        time.sleep(0.05)
    assert entry_of(home).manifest.name == "small"


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_compilers_run_side_by_side_as_far_as_memory_goes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = tmp_path / "marks"
    watched(tmp_path, monkeypatch, before=f"echo start >> {marks}; sleep 0.3; echo end >> {marks}; exit 9")

    def most_at_once(jobs: int, heavy: bool) -> int:
        marks.write_text("")
        units = [small_unit(f"unit_{number}", heavy=heavy) for number in range(4)]
        assert len(compiler.attempt(units, progress=False, jobs=jobs).failures) == 4
        steps = [1 if line == "start" else -1 for line in marks.read_text().split()]
        assert steps.count(1) == 4
        return max(sum(steps[: count + 1]) for count in range(len(steps)))

    monkeypatch.setattr(budget, "memory", lambda: 10_000_000_000)
    assert most_at_once(jobs=1, heavy=False) == 1
    assert most_at_once(jobs=4, heavy=True) == 2
    assert most_at_once(jobs=3, heavy=False) == 3
    monkeypatch.setattr(budget, "memory", lambda: 100)
    assert most_at_once(jobs=4, heavy=False) == 1


def test_a_toolkit_from_pip_wheels_has_the_runtime_under_its_full_name_only(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = toolchain.library_folders(TOOLS.nvcc.path)
    shared = [path for folder in real for path in folder.glob("libcudart.so.*")]
    if not shared:
        pytest.skip("this toolkit has no shared runtime")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / shared[0].name).symlink_to(shared[0])
    monkeypatch.setattr("qsync_fx.backend.cuda.nvcc.library_folders", lambda compiler: (tmp_path / "lib",))
    unit = small_unit("linked")
    path = compiler.build([unit])[unit]
    assert library.load(path, unit).shared_memory() == 4096
