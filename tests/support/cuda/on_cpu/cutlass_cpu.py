"""CUTLASS 2.x kernels, compiled for the CPU with the headers in cutlass_on_cpu and run on torch
tensors.

Invariant: the code is the code for nvcc in the same configurations, except for the few headers with
PTX. Tiles, layouts, swizzles, predicates, split tiles and epilogues therefore equal the GPU's.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qsync_fx.backend.cuda import codegen, toolchain
from qsync_fx.backend.cuda.kernel_build import kernel_cache
from qsync_fx.backend.cuda.kernel_build.library import ConvArguments, GemmArguments, Library
from qsync_fx.backend.cuda.kernel_config import KernelConfig, size_of
from qsync_fx.formats import FORMATS
from tests.gpu import kit
from tests.support import tiers
from tests.support.cuda.compiled import cuda_batches
from tests.support.cuda.on_cpu import cuda_emulation as emulation

HERE = Path(__file__).resolve().parent / "cutlass_on_cpu"
TOGETHER = 4
"""Number of kernels per file: they share the headers, and files are compiled concurrently."""

MULTIPROCESSORS = 5


def changed_headers(folder: Path, changes: Mapping[str, Callable[[str], str]]) -> Path:
    """Write CUTLASS headers, each changed by its function, into a folder; return the folder."""
    for name, change in changes.items():
        (original,) = (
            path
            for place in toolchain.toolchain().cutlass.folders
            if (path := place / name).is_file()
        )
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(change(original.read_text(encoding="utf-8")), encoding="utf-8")
    return folder


def build(
    configs: Sequence[KernelConfig],
    folder: Path,
    *changed: Path,
    jobs: int = 2,
    together: int = TOGETHER,
) -> dict[KernelConfig, Library]:
    """Compile kernels, which are all GEMMs or all convolutions; results accept CPU addresses."""
    parts = [list(configs[start : start + together]) for start in range(0, len(configs), together)]
    stems = (folder / f"part{number}" for number in range(len(parts)))
    with ThreadPoolExecutor(jobs) as pool:
        built = list(pool.map(lambda part, stem: compiled(part, stem, *changed), parts, stems))
    return {
        config: library_of(config, path)
        for part, path in zip(parts, built, strict=True)
        for config in part
    }


def library_of(config: KernelConfig, path: Path) -> Library:
    """Return a kernel of a file from `compiled`; it accepts CPU addresses."""
    functions = ctypes.CDLL(str(path))
    names = ("can_implement", "workspace", "run", "shared_memory", "error")
    handle = SimpleNamespace(
        **{f"qsync_{name}": getattr(functions, f"{name}_{config.digest}") for name in names}
    )
    handle.qsync_workspace.restype, handle.qsync_error.restype = ctypes.c_int64, ctypes.c_char_p
    arguments = GemmArguments if config.operation == "gemm" else ConvArguments
    handle.qsync_run.argtypes = (ctypes.POINTER(arguments), ctypes.c_void_p, ctypes.c_void_p)
    return Library(codegen.unit_of(config), path, handle)  # type: ignore[arg-type]


def compiled(configs: Sequence[KernelConfig], stem: Path, *changed: Path) -> Path:
    """Compile kernels into one library next to `stem`; headers in `changed` have priority."""
    header = "run.h" if configs[0].operation == "gemm" else "run_conv.h"
    lines = [f'#include "{header}"']
    for config in configs:
        lines.append(cuda_batches.structure(codegen.unit_of(config), f"Config_{config.digest}"))
        lines.append(f"ON_CPU(Config_{config.digest}, {config.digest})")
    source, library = stem.with_suffix(".cpp"), stem.with_suffix(".so")
    source.write_text("\n".join([*lines, ""]))
    tools = toolchain.toolchain()
    toolkit = [path.parent / "include" for path in toolchain.library_folders(tools.nvcc.path)]
    folders = (
        *changed,
        HERE,
        kernel_cache.TEMPLATES,
        *tools.cutlass.folders,
        *(path / "cccl" for path in toolkit),
        *toolkit,
    )
    flags = (
        "-std=c++17",
        "-O1",
        "-w",
        "-fpermissive",
        "-ffp-contract=off",
        "-DNDEBUG",
        "-shared",
        "-fPIC",
    )
    includes = (f"-I{path}" for path in folders)
    command = [
        str(tools.host.path),
        *flags,
        "-include",
        "prelude.h",
        *includes,
        "-o",
        str(library),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return library


def run(
    library: Library,
    config: KernelConfig,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    split: int = 1,
) -> Tensor:
    """Return `d` `[m, n]`.

    Operands are parts of larger memory whose other bytes are NaN or large values. The memory around
    `d` must not change.
    """
    (m, k), n = a.shape, b.shape[1]
    gap = 16
    a_memory = _surrounded(a if config.a_major == "row" else a.t(), gap)
    b_memory = _surrounded(b if config.b_major == "row" else b.t(), gap)
    d = torch.full((m + 1, n + gap), -77.0, dtype=FORMATS[config.out].dtype)
    arguments = GemmArguments(
        a=a_memory.data_ptr(),
        b=b_memory.data_ptr(),
        d=d.data_ptr(),
        a_scale=0 if a_scale is None else a_scale.data_ptr(),
        b_scale=0 if b_scale is None else b_scale.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        lda=a_memory.shape[1],
        ldb=b_memory.shape[1],
        ldd=d.shape[1],
        m=m,
        n=n,
        k=k,
        a_scale_per_row=a_scale is not None and a_scale.dim() > 0,
        b_scale_per_column=b_scale is not None and b_scale.dim() > 0,
        split=split,
        multiprocessors=MULTIPROCESSORS,
    )
    assert library.can_implement(arguments) is None
    workspace = torch.zeros(library.workspace(arguments) + 1, dtype=torch.uint8)
    library.run(arguments, workspace.data_ptr(), 0)
    assert (d[m:] == -77).all() and (d[:, n:] == -77).all(), "the kernel wrote beyond the result"
    return d[:m, :n]


def check(library: Library, config: KernelConfig) -> None:
    """Assert that a kernel equals its emulation bit for bit, for each size and kind of scales."""
    generator = torch.Generator().manual_seed(int(config.digest, 16))
    scaled = config.a_scale != "none"
    for m, n, k in sizes(config):
        a, b = operands(config, m, n, k, generator)
        # Small values stay in FP16's range: CUTLASS rounds to FP16 in software on the CPU.
        vectors = [torch.rand(size, generator=generator) / 32 + 0.01 for size in (m, n, n)]
        for per_vector in (False, True):
            # Scales per tensor without bias, and scales per row and column with bias.
            a_scale, b_scale = (
                (vector if per_vector else vector[0].clone() for vector in vectors[:2])
                if scaled
                else (None, None)
            )
            bias = vectors[2] if per_vector and config.bias else None
            split = 2 if per_vector and config.order == "stream_k" else 1
            result = run(library, config, a, b, a_scale, b_scale, bias, split)
            expected = emulation.gemm(a, b, a_scale, b_scale, bias, FORMATS[config.out].dtype)
            assert torch.equal(result, expected)


def _surrounded(matrix: Tensor, gap: int) -> Tensor:
    rows, columns = matrix.shape
    memory = torch.empty((rows + 1, columns + gap), dtype=matrix.dtype)
    memory.view(torch.uint8).fill_(0x7F)
    memory[:rows, :columns] = matrix
    return memory


def operands(
    config: KernelConfig, m: int, n: int, k: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return small integers `a` `[m, k]` and `b` `[k, n]`; FP32 sums are exact in any order."""

    def drawn(fmt: str, shape: tuple[int, int]) -> Tensor:
        high = 128 if fmt == "int8" else 5
        return torch.randint(-high, high, shape, generator=generator).to(FORMATS[fmt].dtype)

    return drawn(config.a, (m, k)), drawn(config.b, (k, n))


def sizes(config: KernelConfig) -> list[tuple[int, int, int]]:
    """Return sizes that a kernel supports: less than a tile, and several tiles with remainders."""
    step = {"m": 1, "n": config.out_alignment, "k": 1}
    for name, major, inner in (("a", config.a_major, "row"), ("b", config.b_major, "column")):
        contiguous = "k" if major == inner else "m" if name == "a" else "n"
        step[contiguous] = max(step[contiguous], config.alignment)
    tile = dict(zip("mnk", config.tile, strict=True))
    small = {name: step[name] for name in "mnk"}
    large = {name: _up(tile[name] * (2 if name == "k" else 1) + 3, step[name]) for name in "mnk"}
    return [(s["m"], s["n"], s["k"]) for s in (small, large)]


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def as_a_gpu(libraries: Mapping[KernelConfig, Library], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run GPU tests on the CPU with these kernels."""
    monkeypatch.setattr(kit, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(
        kit,
        "library",
        {codegen.unit_of(config): library for config, library in libraries.items()}.get,
    )
    torch.manual_seed(0)


def parameters(
    configs: Sequence[KernelConfig], all_tier: Sequence[KernelConfig], fast: Set[str]
) -> list[Any]:
    """Return parameters of a slow test; the smallest kernel of each format is in the fast tier."""
    quick = {min((c for c in all_tier if c.a == fmt), key=bytes_a_tile) for fmt in fast}
    return [
        pytest.param(
            c, id=c.name, marks=() if c in quick else tiers.ALL if c in all_tier else tiers.EVERY
        )
        for c in configs
    ]


def smallest(kinds: Iterable[tuple[tuple[object, ...], KernelConfig]]) -> list[KernelConfig]:
    """Return the kernel with the smallest tile of each kind."""
    by_kind: dict[tuple[object, ...], KernelConfig] = {}
    for kind, config in kinds:
        by_kind[kind] = min(by_kind.get(kind, config), config, key=bytes_a_tile)
    return list(by_kind.values())


def covering(
    configs: Sequence[KernelConfig],
    facts: Callable[[KernelConfig], Iterable[object]],
    tested: Sequence[KernelConfig] = (),
) -> list[KernelConfig]:
    """Return few kernels that, with `tested`, cover each property of all kernels (greedy)."""
    chosen: list[KernelConfig] = []
    left = {fact for config in configs for fact in facts(config)}.difference(*map(facts, tested))
    while left:
        chosen.append(max(configs, key=lambda config: len(left.intersection(facts(config)))))
        left.difference_update(facts(chosen[-1]))
    return chosen


def bytes_a_tile(config: KernelConfig) -> int:
    return sum(config.tile[:2]) * config.tile[2] * size_of(config.a)
