"""Call kernel libraries on a fake CUDA runtime that checks requests and computes nothing.

    python stand_in.py RUNTIME UNITS

See runtime_on_cpu.cpp. This is a separate process, because a runtime cannot be unloaded. UNITS is
JSON on standard input: libraries and their calls. It prints a JSON list with the launches and
errors of each call.

Invariant: the stand-in is loaded before any library under the runtime's name, so the real runtime
is never opened.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.kernel_config import BY_CAPABILITY, MULTIPROCESSORS, SHARED_MEMORY, Arch

STREAM = 0x5157
"""User's stream; all work must be queued on it."""


@dataclass(frozen=True)
class Call:
    """Call of a library: file, name and interface of its unit, target, and argument fields."""

    path: str
    name: str
    interface: str
    arch: Arch
    arguments: dict[str, int]


def runtime(folder: Path, name: str | None = None) -> Path:
    """Compile the stand-in and return it; libraries use it only under the runtime's name."""
    nvcc = toolchain.nvcc()
    name = name or f"libcudart.so.{nvcc.version[0]}"
    (folder / "names").write_text(f"{name} {{ global: *; }};\n")
    includes = [f"-I{path.parent / 'include'}" for path in toolchain.library_folders(nvcc.path)]
    source = Path(__file__).with_name("runtime_on_cpu.cpp")
    flags = [
        "-std=c++17",
        "-O1",
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{name}",
        f"-Wl,--version-script={folder / 'names'}",
    ]
    subprocess.run(["g++", *flags, *includes, str(source), "-o", str(folder / name)], check=True)
    return folder / name


def checked(library: Path, calls: list[Call]) -> list[dict[str, Any]]:
    """Make calls in a new process and return the status, launches and errors of each."""
    requests = json.dumps([vars(call) for call in calls])
    command = [sys.executable, __file__, str(library)]
    done = subprocess.run(
        command, input=requests, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    reports: list[dict[str, Any]] = json.loads(done.stdout)
    return reports


def _main() -> None:
    stand_in = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    stand_in.stand_in_lines.restype = ctypes.c_char_p
    from qsync_fx.backend.cuda.codegen import TranslationUnit
    from qsync_fx.backend.cuda.kernel_build.library import _STRUCTURES, load

    capability = {arch: version for version, arch in reversed(BY_CAPABILITY.items())}
    answers = []
    for call in (Call(**fields) for fields in json.load(sys.stdin)):
        stand_in.stand_in_reset(
            *capability[call.arch], MULTIPROCESSORS[call.arch], SHARED_MEMORY[call.arch]
        )
        library = load(Path(call.path), TranslationUnit(call.name, call.arch, "", call.interface))  # type: ignore[arg-type]
        arguments = _STRUCTURES[call.interface](**call.arguments)
        why = library.can_implement(arguments)  # type: ignore[arg-type]
        size = library.workspace(arguments) if why is None else 0  # type: ignore[arg-type]
        status = (
            library._handle.qsync_run(ctypes.byref(arguments), 1 << 30 if size else 0, STREAM)
            if why is None
            else why
        )
        lines = stand_in.stand_in_lines().decode().splitlines()
        answers.append(
            {
                "status": status,
                "workspace": size,
                "wrong": [line for line in lines if line.startswith("wrong")],
                "lines": [line for line in lines if not line.startswith("wrong")],
                "elsewhere": [
                    line
                    for line in lines
                    if " stream " in line and not line.endswith(f" stream {STREAM}")
                ],
            }
        )
    print(json.dumps(answers))


if __name__ == "__main__":
    _main()
