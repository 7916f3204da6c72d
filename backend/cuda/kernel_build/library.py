"""A compiled library, loaded.

Invariant: a Library answers for the unit that it was loaded as: it speaks this version of the C interface and tells that unit's name.
Functions take the argument structure of its interface and nothing else. No symbol of it is visible to other libraries. What is loaded is a
copy in memory, so its code stays as it is whatever becomes of the file: pages of a mapped file that is truncated or copied over are gone,
those that the loader has written to as well, and the process dies at the next call or at exit.

The C interface of compiled kernels: pointers and numbers, no torch.

Invariant: these structures and cpp/cutlass/abi.h say the same; a test compiles the header and compares sizes and offsets. Whoever changes
one raises `VERSION`, which is part of every library's key and which each library returns when asked.

Every library has the functions

    int qsync_abi(void)                                        VERSION
    const char *qsync_name(void)                               the name of its Unit
    int qsync_can_implement(const Arguments *)                 0, or a status
    int64_t qsync_workspace(const Arguments *)                 bytes
    int qsync_run(const Arguments *, void *workspace, void *stream)    0, or a status
    int qsync_shared_memory(void)                              bytes a threadblock
    const char *qsync_error(int status)

What is known of a compiled library, kept beside it as JSON.

Invariant: a Manifest that was read from a file is valid, field for field. Where the file came from does not matter: a file that does not
hold exactly this raises `ValueError` with the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.errors import KernelError, LaunchError, ToolchainError
from qsync_fx.serialization.convert import Check
from qsync_fx.serialization.schema import Schema

VERSION: Final = 1

_P, _I64, _I32, _U32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint32


class GemmArguments(ctypes.Structure):
    """`d = a @ b * a_scale * b_scale + bias`; strides in elements, of the dimension that is not contiguous."""

    _fields_ = (
        *((name, _P) for name in ("a", "b", "d", "a_scale", "b_scale", "bias")),
        *((name, _I64) for name in ("lda", "ldb", "ldd")),
        *((name, _I32) for name in ("m", "n", "k")),
        # 1: a scale for each row (column); 0: one for all. Pointers may be null: scale 1, bias 0.
        ("a_scale_per_row", _I32),
        ("b_scale_per_column", _I32),
        ("split", _I32),
        ("device", _I32),
        ("multiprocessors", _I32),
    )


class ConvArguments(ctypes.Structure):
    """Packed NHWC tensors: x `[n, h, w, c]`, weight `[k, r, s, c]`, y `[n, p, q, k]`; `a`, `b`, `d` by operation, see ConvProblem."""

    _fields_ = (
        *((name, _P) for name in ("a", "b", "d", "a_scale", "b_scale", "bias")),
        *((name, _I32) for name in ("n", "h", "w", "c", "k", "r", "s", "p", "q")),
        *(
            (name, _I32)
            for name in ("pad_h", "pad_w", "stride_h", "stride_w", "dilation_h", "dilation_w")
        ),
        ("b_scale_per_channel", _I32),
        ("split", _I32),
        ("device", _I32),
        ("multiprocessors", _I32),
    )


class QuantizeArguments(ctypes.Structure):
    """Largest magnitude in two steps, then rounding; see `qsync::quantize` for what is computed.

    `x` is a matrix `[rows, columns]` with the stride `ldx` between rows. `q` and, unless null, its transpose `qt` `[columns, rows]` have no
    gaps. `group`: 0 one scale, 1 a scale for each row, 2 a scale for each column. `seed` points to one int64 in device memory.
    """

    _fields_ = (
        *((name, _P) for name in ("x", "q", "qt", "scale", "seed")),
        *((name, _I64) for name in ("rows", "columns", "ldx")),
        ("stream", _U32),
        ("x_type", _I32),  # 0 float32, 1 float16, 2 bfloat16
        ("format", _I32),  # 0 int8, 1 float8_e4m3fn, 2 float8_e5m2
        ("rounding", _I32),  # 0 nearest, 1 stochastic, 2 floor
        ("group", _I32),
        ("device", _I32),
        ("multiprocessors", _I32),
    )


class ConvertArguments(ctypes.Structure):
    """Copies of matrices: `y[b, r, c] = x[b, r, c] * scale` or, turned, `x[b, c, r] * scale`, and zeros where `x` has nothing.

    `x` is `batches` matrices `[rows, columns]`, with the stride `ldx` between rows and `batch_stride` between matrices. `y` is `y_batches`
    matrices `[y_rows, y_columns]` without gaps. `scale` points to one FP32 number in device memory; null: 1. Types are the numbers of
    `convert_source.ELEMENTS`.
    """

    _fields_ = (
        *((name, _P) for name in ("x", "y", "scale")),
        *(
            (name, _I64)
            for name in (
                "batches",
                "rows",
                "columns",
                "ldx",
                "batch_stride",
                "y_batches",
                "y_rows",
                "y_columns",
            )
        ),
        *((name, _I32) for name in ("x_type", "y_type", "turned")),
        ("device", _I32),
        ("multiprocessors", _I32),
    )


FILE: Final = "manifest.json"
_LIMIT: Final = 2**53
_LONGEST: Final = 4096
_PATTERNS: Final = {
    "content": "[0-9a-f]{64}",
    "tools": "[0-9a-f]{64}",
    "name": r"[A-Za-z0-9_]{1,200}",
    "arch": r"sm_\d{2,3}[a-z]?",
    "sha256": "(?:[0-9a-f]{64})?",
    "opcode": r"[A-Z0-9_.]{0,60}",
}


@dataclass(frozen=True)
class Resources:
    """What a unit's kernels use, the largest of each: registers a thread; bytes of shared memory a threadblock, of stack, of spills."""

    registers: int
    shared_memory: int
    stack: int
    spills: int


@dataclass(frozen=True)
class Manifest:
    """
    Attributes:
        content, tools: keys, see `keys`.
        name, arch: of the unit.
        sha256, size: of the library; "" and 0 where there is none because it was refused.
        refused: why the library must not be used, such as spills; "" where it may.
        opcode: the instruction that was found in the machine code; "" where none was asked for, or nothing could look.
        seconds: that compiling took.
        created: seconds since 1970.
        compilers: versions and flags, for people.
    """

    content: str
    tools: str
    name: str
    arch: str
    sha256: str
    size: int
    refused: str
    resources: Resources
    opcode: str
    seconds: float
    created: float
    compilers: str

    def text(self) -> str:
        """Returns the manifest as its file holds it."""
        return MANIFEST.encode(self)


def read(path: Path) -> Manifest:
    """Returns the manifest in a file; raises `OSError` where it cannot be read, `ValueError` for anything that it should not say."""
    with open(path, "rb") as file:
        return parse(file.read(MANIFEST.largest + 1))


def parse(text: str | bytes) -> Manifest:
    """Returns the manifest that a text holds; raises `ValueError` for anything else."""
    try:
        return MANIFEST.decode(text)
    except KernelError as error:
        raise ValueError(str(error)) from None


def _resources(result: Resources) -> str | None:
    return _beyond(vars(result))


def _manifest(result: Manifest) -> str | None:
    texts = {name: value for name, value in vars(result).items() if isinstance(value, str)}
    for name, value in texts.items():
        if len(value) > _LONGEST or not value.isprintable():
            return f"{name} is no short text"
        if not re.fullmatch(_PATTERNS.get(name, ".*"), value, flags=re.DOTALL):
            return f"{name} is not what it should be"
    if bool(result.refused) == bool(result.sha256):
        return "a library is there or it was refused, not both"
    return _beyond({"size": result.size, "seconds": result.seconds, "created": result.created})


def _beyond(numbers: Mapping[str, float]) -> str | None:
    return next(
        (f"{name} cannot be {value}" for name, value in numbers.items() if not 0 <= value < _LIMIT),
        None,
    )


_CHECKS: Final[Mapping[Any, Check]] = {Resources: _resources, Manifest: _manifest}
MANIFEST: Final = Schema(
    Manifest,
    noun="manifest",
    error=KernelError,
    remedy="qsync kernels clear",
    name=None,
    largest=64 * 1024,
    checks=_CHECKS,
)


Arguments = GemmArguments | ConvArguments | QuantizeArguments | ConvertArguments

_STRUCTURES: Final[dict[str, type[ctypes.Structure]]] = {
    "gemm": GemmArguments,
    "conv": ConvArguments,
    "quantize": QuantizeArguments,
    "convert": ConvertArguments,
}


@dataclass(frozen=True)
class Library:
    """The functions of one library, see `abi`. Loading the same file twice gives equal code twice; `load` remembers."""

    unit: TranslationUnit
    path: Path
    _handle: ctypes.CDLL

    def can_implement(self, arguments: Arguments) -> str | None:
        """Returns None where the kernel can compute this, else why not, in CUTLASS's words."""
        status: int = self._handle.qsync_can_implement(ctypes.byref(arguments))
        return None if status == 0 else self.error(status)

    def workspace(self, arguments: Arguments) -> int:
        """Returns how many bytes of device memory `run` needs."""
        size: int = self._handle.qsync_workspace(ctypes.byref(arguments))
        if size < 0:
            raise KernelError(f"the kernel tells a workspace of {size} bytes", where=self.unit.name)
        return size

    def run(self, arguments: Arguments, workspace: int, stream: int) -> None:
        """Queues the kernel.

        Args:
            workspace: address in device memory, aligned to 16 bytes; 0 where none is needed.
            stream: of CUDA, as `torch.cuda.Stream.cuda_stream` tells it.

        Raises:
            LaunchError: it could not be queued. What fails later, on the device, CUDA tells at the next call.
        """
        status = self._handle.qsync_run(ctypes.byref(arguments), workspace, stream)
        if status:
            raise LaunchError(
                f"the kernel cannot be started: {self.error(status)}",
                where=self.unit.name,
                do="see qsync doctor for the device and its driver",
            )

    def shared_memory(self) -> int:
        """Returns how many bytes of shared memory a threadblock takes."""
        size: int = self._handle.qsync_shared_memory()
        return size

    def error(self, status: int) -> str:
        """Returns what a status means."""
        text: bytes | None = self._handle.qsync_error(status)
        return text.decode("utf-8", errors="replace") if text else f"status {status}"


@functools.cache
def load(path: Path, unit: TranslationUnit) -> Library:
    """Returns the library at `path`, as `compiler.build` made it for `unit`.

    Raises:
        KernelError: it cannot be loaded, or is not of this unit.
    """
    handle = _opened(path)
    _declare(handle, path, _STRUCTURES[unit.interface])
    version = handle.qsync_abi()
    if version != VERSION:
        raise _foreign(path, f"it speaks version {version} of the interface, not {VERSION}")
    name = (handle.qsync_name() or b"").decode("utf-8", errors="replace")
    if name != unit.name:
        raise _foreign(path, f"it is {name!r}, not {unit.name!r}")
    return Library(unit, path, handle)


def shared_memory(path: Path) -> int:
    """Returns how many bytes of shared memory a threadblock of the kernel at `path` takes, which its machine code does not say.

    A process of its own loads it for that. Unloading a library from a process that uses CUDA leaves that process's runtime with addresses
    of kernels that are gone: the next copy lies at the same place, and is started as the old one is (seen on an H200: it dies or hangs).

    Raises:
        KernelError: the library cannot be loaded, or has not the functions that it should have.
    """
    folders = map(str, _runtime_folders())
    # -I: what a user's environment puts in front of Python's own modules is not run.
    command = [sys.executable, "-I", "-c", _ASKED, str(path), *folders]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode or not done.stdout.strip().isdecimal():
        text = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        raise _foreign(path, f"asked for its shared memory, {text[-1]}")
    return int(done.stdout)


_ASKED: Final = r"""
import ctypes, os, re, sys
path, folders = sys.argv[1], sys.argv[2:]
try:
    library = ctypes.CDLL(path)
except OSError as error:
    missing = re.match(r"(libcudart\.so\.\d+):", str(error))
    found = [os.path.join(folder, missing[1]) for folder in folders] if missing else []
    for runtime in [name for name in found if os.path.isfile(name)]:
        try:
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
            break
        except OSError:
            pass
    library = ctypes.CDLL(path)
print(library.qsync_shared_memory())
"""
"""What that process runs. Its arguments: the library, and folders in which CUDA's runtime may lie."""


def _declare(handle: ctypes.CDLL, path: Path, structure: type[ctypes.Structure]) -> None:
    pointer = ctypes.POINTER(structure)
    functions: tuple[tuple[str, type | None, tuple[type, ...]], ...] = (
        ("qsync_abi", ctypes.c_int, ()),
        ("qsync_name", ctypes.c_char_p, ()),
        ("qsync_can_implement", ctypes.c_int, (pointer,)),
        ("qsync_workspace", ctypes.c_int64, (pointer,)),
        ("qsync_run", ctypes.c_int, (pointer, ctypes.c_void_p, ctypes.c_void_p)),
        ("qsync_shared_memory", ctypes.c_int, ()),
        ("qsync_error", ctypes.c_char_p, (ctypes.c_int,)),
    )
    for name, result, arguments in functions:
        try:
            function = getattr(handle, name)
        except AttributeError:
            raise _foreign(path, f"it has no function {name}") from None
        function.restype, function.argtypes = result, arguments


def _opened(path: Path) -> ctypes.CDLL:
    """Opens a library; where it wants a CUDA runtime that is not loaded, that one first."""
    try:
        return _private(path)
    except OSError as error:
        missing = re.match(r"(libcudart\.so\.\d+):", str(error))
        if missing is None:
            raise _foreign(path, f"the system cannot load it: {error}") from error
        for candidate in _runtimes(missing[1]):
            with contextlib.suppress(OSError):
                # Libraries that are opened later find it by its name among those that are loaded.
                ctypes.CDLL(str(candidate), mode=ctypes.RTLD_GLOBAL)
                return _private(path)
    raise KernelError(
        f"the kernel needs CUDA's runtime {missing[1]}, and it is nowhere to be found",
        where=str(path),
        do=f"use a torch that brings CUDA {missing[1].rpartition('.')[2]}, install that toolkit, or put its lib folder in LD_LIBRARY_PATH",
    )


def _private(path: Path) -> ctypes.CDLL:
    """Opens a copy of a library that no file on disk stands behind; raises `OSError`."""
    # Called here, as a Python that was built against an old C library has no os.memfd_create.
    system = ctypes.CDLL(None, use_errno=True)
    descriptor: int = system.memfd_create(path.name.encode(), 0)
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"a copy of {path.name} in memory")
    # The loader takes equal names for one library, and descriptors are numbered anew: each copy gets a name of its own.
    with (
        open(descriptor, "wb") as copy,
        open(path, "rb") as file,
        tempfile.TemporaryDirectory() as folder,
    ):
        shutil.copyfileobj(file, copy)
        copy.flush()
        name = Path(folder) / path.name
        name.symlink_to(f"/proc/self/fd/{descriptor}")
        return ctypes.CDLL(str(name), mode=ctypes.RTLD_LOCAL)


def _runtimes(name: str) -> Iterator[Path]:
    """Yields where a CUDA runtime may lie: beside torch, in pip wheels, with nvcc."""
    return (folder / name for folder in _runtime_folders() if (folder / name).is_file())


def _runtime_folders() -> Iterator[Path]:
    torch_folders = [place / "lib" for place in toolchain.package_folders("torch")]
    yield from (*torch_folders, *toolchain.wheel_folders("lib"), Path("/usr/local/cuda/lib64"))
    with contextlib.suppress(ToolchainError):
        yield from toolchain.library_folders(toolchain.nvcc().path)


def _foreign(path: Path, why: str) -> KernelError:
    return KernelError(
        f"this is no library of kernels that can be used: {why}",
        where=str(path),
        do="qsync kernels clear, and build it again; one that was built elsewhere must be built for this system",
    )
