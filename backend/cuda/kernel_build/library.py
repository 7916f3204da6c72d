"""C interface, manifest and loading of compiled kernel libraries.

Invariant: the argument structures match cpp/cutlass/abi.h, whose sizes and offsets a test compares.
Every change raises `VERSION`, which is part of each library's key and which each library returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qsync_fx import environment
from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.errors import KernelError, LaunchError, ToolchainError
from qsync_fx.serialization.schema import Schema

VERSION: Final = 1

_P, _I64, _I32, _U32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint32
_DEVICE: Final = tuple((name, _I32) for name in ("split", "device", "multiprocessors"))


class GemmArguments(ctypes.Structure):
    """`d = a @ b * a_scale * b_scale + bias`; leading dimensions in elements."""

    _fields_ = (
        *((name, _P) for name in ("a", "b", "d", "a_scale", "b_scale", "bias")),
        *((name, _I64) for name in ("lda", "ldb", "ldd")),
        *((name, _I32) for name in ("m", "n", "k")),
        # 1: a scale per row (column); 0: a single scale. Null pointers mean scale 1, bias 0.
        *((name, _I32) for name in ("a_scale_per_row", "b_scale_per_column")),
        *_DEVICE,
    )


class ConvArguments(ctypes.Structure):
    """Dense tensors; `ConvProblem` describes their sizes and which of them are `a`, `b` and `d`."""

    _fields_ = (
        *((name, _P) for name in ("a", "b", "d", "a_scale", "b_scale", "bias")),
        *((name, _I32) for name in ("n", "h", "w", "c", "k", "r", "s", "p", "q")),
        *((name, _I32) for name in ("pad_h", "pad_w", "stride_h", "stride_w")),
        *((name, _I32) for name in ("dilation_h", "dilation_w", "b_scale_per_channel")),
        *_DEVICE,
    )


class QuantizeArguments(ctypes.Structure):
    """Absolute maximum in two steps, then rounding; see `qsync::quantize` for the semantics.

    `x` is a matrix `[rows, columns]` with row stride `ldx`. `q` and, unless null, its transpose
    `qt` `[columns, rows]` are dense. `group`: 0 a single scale, 1 a scale per row, 2 a scale per
    column. `seed` points to one int64 in device memory.
    """

    _fields_ = (
        *((name, _P) for name in ("x", "q", "qt", "scale", "seed")),
        *((name, _I64) for name in ("rows", "columns", "ldx")),
        ("stream", _U32),
        ("x_type", _I32),  # 0 float32, 1 float16, 2 bfloat16
        ("format", _I32),  # 0 int8, 1 float8_e4m3fn, 2 float8_e5m2
        ("rounding", _I32),  # 0 nearest, 1 stochastic, 2 floor
        ("group", _I32),
        *_DEVICE[1:],
    )


class ConvertArguments(ctypes.Structure):
    """Matrix copy: `y[b, r, c] = x[b, r, c] * scale`, or `x[b, c, r] * scale` if transposed.

    `x` is `batches` matrices `[rows, columns]` with row stride `ldx` and `batch_stride`, in
    elements. `y` is `y_batches` dense matrices `[y_rows, y_columns]`, zero beyond the elements of
    `x`. `scale` points to one FP32 number in device memory; null means 1. Types are the numbers of
    `codegen.CONVERT_TYPES`.
    """

    _fields_ = (
        *((name, _P) for name in ("x", "y", "scale")),
        *((name, _I64) for name in ("batches", "rows", "columns", "ldx", "batch_stride")),
        *((name, _I64) for name in ("y_batches", "y_rows", "y_columns")),
        *((name, _I32) for name in ("x_type", "y_type", "turned")),
        *_DEVICE[1:],
    )


FILE: Final = "manifest.json"


@dataclass(frozen=True)
class Resources:
    """Largest usage among a unit's kernels: `shared_memory` per threadblock, others per thread."""

    registers: int
    shared_memory: int
    stack: int
    spills: int


@dataclass(frozen=True)
class Manifest:
    """Description of a compiled library.

    Attributes:
        content, tools: keys, see `kernel_cache`.
        sha256, size: of the library; "" and 0 if it was refused and does not exist.
        refused: why the library must not be used, such as spills; "" if it may.
        opcode: the required instruction as found in the machine code, if it was looked for.
        seconds: compile time. `created` is in seconds since 1970.
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


def _check(manifest: Manifest) -> str | None:
    if not all(text.isprintable() for text in vars(manifest).values() if isinstance(text, str)):
        return "a text is not printable"
    # The name is part of paths.
    if not re.fullmatch(r"[A-Za-z0-9_]{1,200}", manifest.name):
        return "its name is not a valid file name"
    if bool(manifest.refused) == bool(manifest.sha256):
        return "it must have either a library or a refusal, not both"
    return None


MANIFEST: Final = Schema(
    Manifest,
    noun="manifest",
    error=KernelError,
    remedy="qsync kernels clear",
    name=None,
    largest=64 * 1024,
    checks={Manifest: _check},
)


Arguments = GemmArguments | ConvArguments | QuantizeArguments | ConvertArguments

_STRUCTURES: Final = {
    "gemm": GemmArguments,
    "conv": ConvArguments,
    "quantize": QuantizeArguments,
    "convert": ConvertArguments,
}


@dataclass(frozen=True)
class Library:
    """Loaded library; its ABI version and the name of its unit have been verified."""

    unit: TranslationUnit
    path: Path
    _handle: ctypes.CDLL

    def can_implement(self, arguments: Arguments) -> str | None:
        """Return CUTLASS's reason why the kernel does not support the arguments, or None."""
        status: int = self._handle.qsync_can_implement(ctypes.byref(arguments))
        return self.error(status) if status else None

    def workspace(self, arguments: Arguments) -> int:
        """Return the bytes of device memory that `run` needs."""
        size: int = self._handle.qsync_workspace(ctypes.byref(arguments))
        if size < 0:
            message = f"the kernel returned an invalid workspace size of {size} bytes"
            raise KernelError(message, where=self.unit.name)
        return size

    def run(self, arguments: Arguments, workspace: int, stream: int) -> None:
        """Queue the kernel on a CUDA stream; raise `LaunchError` if that fails.

        Args:
            workspace: address in device memory, aligned to 16 bytes; 0 if none is needed.
        """
        status = self._handle.qsync_run(ctypes.byref(arguments), workspace, stream)
        if status:
            raise LaunchError(
                f"the kernel cannot be launched: {self.error(status)}",
                where=self.unit.name,
                do="run `qsync doctor` to check the device and its driver",
            )

    def error(self, status: int) -> str:
        text: bytes | None = self._handle.qsync_error(status)
        return text.decode("utf-8", errors="replace") if text else f"status {status}"


@functools.cache
def load(path: Path, unit: TranslationUnit) -> Library:
    """Return the library of `unit`; raise `KernelError` if it cannot be loaded, or is another."""
    handle = _opened(path)
    _declare(handle, path, _STRUCTURES[unit.interface])
    if (version := handle.qsync_abi()) != VERSION:
        raise _foreign(path, f"its ABI version is {version}, not {VERSION}")
    name = (handle.qsync_name() or b"").decode("utf-8", errors="replace")
    if name != unit.name:
        raise _foreign(path, f"its name is {name!r}, not {unit.name!r}")
    return Library(unit, path, handle)


def shared_memory(path: Path) -> int:
    """Return the shared memory bytes per threadblock, which the machine code does not contain.

    A separate process loads the library: unloading it from one that uses CUDA leaves stale kernel
    addresses, at which the next library is mapped (seen on an H200: crash or hang).
    """
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).qsync_shared_memory())"
    folders = filter(None, [*map(str, _runtime_folders()), environment.text("LD_LIBRARY_PATH")])
    # -I ignores the user's environment, which might shadow Python's own modules.
    command = [sys.executable, "-I", "-c", code, str(path)]
    env = environment.child_environment(LD_LIBRARY_PATH=":".join(folders))
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=env, check=False
    )
    if done.returncode or not done.stdout.strip().isdecimal():
        raise _foreign(path, f"its shared memory size cannot be read: {done.stderr.strip()[-200:]}")
    return int(done.stdout)


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
            raise _foreign(path, f"it does not export the function {name}") from None
        function.restype, function.argtypes = result, arguments


def _opened(path: Path) -> ctypes.CDLL:
    """Open a library, after the CUDA runtime that it needs if that is not yet loaded."""
    try:
        return _private(path)
    except OSError as error:
        missing = re.match(r"(libcudart\.so\.\d+):", str(error))
        if missing is None:
            raise _foreign(path, f"the system cannot load it: {error}") from error
        for folder in _runtime_folders():
            with contextlib.suppress(OSError):
                # Libraries opened later resolve it by its name among the loaded libraries.
                ctypes.CDLL(str(folder / missing[1]), mode=ctypes.RTLD_GLOBAL)
                return _private(path)
    raise KernelError(
        f"the kernel needs the CUDA runtime {missing[1]}, which was not found",
        where=str(path),
        do=f"use a torch that includes CUDA {missing[1].rpartition('.')[2]}, install that "
        "toolkit, or add its lib folder to LD_LIBRARY_PATH",
    )


def _private(path: Path) -> ctypes.CDLL:
    """Open an in-memory copy of a library; raise `OSError`.

    A truncated or overwritten mapped file would crash the process at the next call or at exit.
    """
    # Through libc: a Python built against an old C library has no os.memfd_create.
    descriptor: int = ctypes.CDLL(None).memfd_create(path.name.encode(), 0)
    if descriptor < 0:
        raise OSError("the system has no memory for a copy of the library")
    # The loader identifies libraries by name, and descriptor numbers are reused, so each copy needs
    # a unique name.
    with open(descriptor, "wb") as copy, tempfile.TemporaryDirectory() as folder:
        copy.write(path.read_bytes())
        copy.flush()
        name = Path(folder) / path.name
        name.symlink_to(f"/proc/self/fd/{descriptor}")
        return ctypes.CDLL(str(name), mode=ctypes.RTLD_LOCAL)


def _runtime_folders() -> Iterator[Path]:
    torch_folders = [place / "lib" for place in toolchain.package_folders("torch")]
    yield from (*torch_folders, *toolchain.wheel_folders("lib"), Path("/usr/local/cuda/lib64"))
    with contextlib.suppress(ToolchainError):
        yield from toolchain.library_folders(toolchain.nvcc().path)


def _foreign(path: Path, why: str) -> KernelError:
    return KernelError(
        f"this is not a valid kernel library: {why}",
        where=str(path),
        do="run `qsync kernels clear` and build it again; a library from another machine must be "
        "built for this system",
    )
