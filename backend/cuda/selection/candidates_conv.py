"""Candidate kernels of a convolution; see `candidates_gemm` for the choice of tiles.

On sm_90a, wgmma convolutions have a single schedule, in which one warp group has a tile of at most
128 x 128. CUTLASS 2.x kernels compute strided input gradients there, and weight gradients with
split-K; they are candidates next to the wgmma kernels.

Invariant: eight or more candidates per supported architecture, format and operation; equal problems
have equal candidates in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from qsync_fx.backend.cuda.kernel_config import (
    OPERANDS,
    OUTPUTS,
    SHARED_MEMORY,
    Arch,
    KernelConfig,
    Shape,
    instruction_of,
    size_of,
    wide,
)
from qsync_fx.backend.cuda.problem import ConvOperation, ConvProblem
from qsync_fx.backend.cuda.selection import constraints, select
from qsync_fx.formats import FORMATS


@dataclass(frozen=True)
class _Tile:
    """Tile of CUTLASS 2.x; `depth` is its k in bytes, `stages` the pipeline depth for sm_80."""

    m: int
    n: int
    depth: int
    stages: int
    warp: tuple[int, int]
    swizzle: int = 1
    split: bool = False


_TENSOR: Final = (
    _Tile(128, 128, 64, 4, (64, 64), 4),
    _Tile(128, 256, 64, 3, (64, 64), 4),
    _Tile(256, 128, 64, 3, (64, 64), 4),
    _Tile(128, 128, 128, 3, (64, 64)),
    _Tile(128, 64, 64, 5, (64, 32), 2),
    _Tile(64, 128, 64, 5, (32, 64), 2),
    _Tile(256, 64, 64, 4, (64, 64)),
    _Tile(64, 64, 64, 6, (32, 32)),
    _Tile(64, 64, 128, 5, (32, 32)),
)

_STRIDED: Final = (
    _Tile(128, 128, 64, 4, (64, 32), 4),
    _Tile(128, 128, 128, 3, (64, 32)),
    _Tile(256, 64, 64, 4, (64, 32)),
    _Tile(128, 64, 64, 5, (64, 32), 4),
    _Tile(64, 128, 64, 5, (32, 64), 4),
    _Tile(128, 64, 128, 4, (64, 32)),
    _Tile(64, 128, 128, 4, (32, 64)),
    _Tile(64, 64, 64, 6, (32, 32)),
    _Tile(64, 64, 128, 5, (32, 32)),
)
"""Tiles of strided input gradients.

Their threads have registers for half the accumulators, and their swizzle is never 2.
"""

_PARTS: Final = (
    _Tile(128, 128, 64, 4, (64, 64), split=True),
    _Tile(128, 64, 64, 5, (64, 32), split=True),
    _Tile(64, 128, 64, 5, (32, 64), split=True),
    _Tile(64, 64, 64, 6, (32, 32), split=True),
)

_SIMT: Final = (
    _Tile(128, 128, 32, 4, (32, 64), 4),
    _Tile(128, 64, 32, 5, (32, 32), 4),
    _Tile(64, 128, 32, 5, (32, 64), 4),
    _Tile(64, 64, 32, 5, (32, 32)),
    _Tile(128, 128, 32, 4, (64, 32), 4),
    _Tile(64, 256, 32, 4, (32, 64), 4),
    _Tile(128, 32, 32, 5, (32, 32)),
    _Tile(32, 128, 32, 5, (32, 32)),
)
"""Tiles of CUDA cores, also for strided input gradients.

Larger tiles, and more than 32 x 32 per warp in the second, spill there.
"""

_HOPPER: Final[tuple[tuple[int, int, Shape], ...]] = (
    (128, 128, (2, 1, 1)),
    (128, 128, (1, 1, 1)),
    (128, 128, (1, 2, 1)),
    (64, 256, (2, 1, 1)),
    (64, 256, (1, 1, 1)),
    (64, 128, (1, 1, 1)),
    (128, 64, (1, 1, 1)),
    (64, 64, (1, 1, 1)),
)

_BESIDE_HOPPER: Final[dict[ConvOperation, int]] = {"fprop": 4, "dgrad": 4, "wgrad": 1}
"""Number of CUTLASS 2.x tiles that are candidates where wgmma kernels exist.

For weight gradients, other tiles spill on sm_90a.
"""


def conv_candidates(problem: ConvProblem, arch: Arch) -> list[KernelConfig]:
    """Return the kernels that serve a problem, the best general one first."""
    scaled = (problem.a_scale, problem.b_scale) != ("none", "none")
    strided = problem.stride != (1, 1)
    result = _configs(problem.operation, problem.a, problem.out, arch, scaled, strided)
    return [config for config in result if select.serves(config, problem) is None]


def conv_configs(arch: Arch) -> Iterator[KernelConfig]:
    """Yield all kernels for each format, operation and usual output; one for other outputs."""
    for (a, b), since in OPERANDS.items():
        if a != b or a.startswith("fp8") or not _has(arch, since):
            continue
        usual = {"int8": wide(arch), "fp16": "fp16", "bf16": "bf16"}.get(a, "fp32")
        scaled = FORMATS[a].scaled
        yield from _configs("fprop", a, usual, arch, scaled, True)
        for out in (other for other in OUTPUTS if other != usual):
            yield from _configs("fprop", a, out, arch, scaled, True)[:1]
        if a == "int8":
            continue
        for strided in (False, True):
            yield from _configs("dgrad", a, usual, arch, False, strided)
        yield from _configs("wgrad", a, "fp32", arch, True, True)
        yield from _configs("wgrad", a, usual, arch, True, True)[:1]


def _has(arch: Arch, since: Arch) -> bool:
    return int(arch[3:5]) >= int(since[3:5])


def _configs(
    operation: ConvOperation, fmt: str, out: str, arch: Arch, scaled: bool, strided: bool
) -> list[KernelConfig]:
    wgmma = (
        arch == "sm_90a"
        and fmt != "fp32"
        and (fmt != "tf32" or operation == "fprop")
        and not (operation == "dgrad" and strided)
    )
    tables = []
    if wgmma:
        tables = list(_hopper_table(fmt, out))
    tiles: tuple[_Tile, ...]
    if fmt == "fp32":
        tiles = _SIMT
    elif operation == "dgrad" and strided:
        tiles = _STRIDED
    elif wgmma:
        tiles = _TENSOR[: _BESIDE_HOPPER[operation]]
    else:
        tiles = _TENSOR
    if operation == "wgrad" and out == "fp32":
        # Split-K first: most weight gradients have fewer tiles than a device has multiprocessors.
        tiles = (*_parts(fmt), *tiles)
    owned = [_of_tile(tile, fmt, out, arch) for tile in tiles]
    shapes = owned + tables if operation == "wgrad" else tables + owned
    fprop = operation == "fprop"
    scales = {"a_scale": "tensor", "b_scale": "channel" if fprop else "tensor"} if scaled else {}
    result = (
        KernelConfig(
            operation=operation,
            arch=arch,
            a=fmt,
            b=fmt,
            out=out,
            bias=fprop,
            # Only dgrad kernels are specialized for the kind of stride.
            strided=strided or operation != "dgrad",
            **{**shape, **scales},  # type: ignore[arg-type]
        )
        for shape in shapes
    )
    return [config for config in result if not constraints.CONV.broken(config)]


def _parts(fmt: str) -> tuple[_Tile, ...]:
    if fmt == "fp32":
        return tuple(replace(tile, swizzle=1, split=True) for tile in _SIMT[:4])
    return _PARTS


def _of_tile(tile: _Tile, fmt: str, out: str, arch: Arch) -> dict[str, object]:
    size, simt = size_of(fmt), fmt == "fp32"
    k = tile.depth // size
    named = KernelConfig(
        "fprop", arch, fmt, fmt, out, (tile.m, tile.n, k), unit="simt" if simt else "tensor"
    )
    turing = arch == "sm_75"
    return {
        "tile": (tile.m, tile.n, k),
        "warp": (*tile.warp, k),
        "instruction": instruction_of(named),
        "unit": named.unit,
        "stages": 2 if turing else _stages(tile, arch),
        "schedule": "pipelined" if turing else "multistage",
        "swizzle": tile.swizzle,
        "order": "split_k" if tile.split else "identity",
        "alignment": 1 if simt else 16 // size,
        "out_alignment": 1 if simt else 16 // FORMATS[out].dtype.itemsize,
    }


def _stages(tile: _Tile, arch: Arch) -> int:
    """Return the stages of the table, limited by the smaller shared memory of sm_86 and sm_89."""
    return max(3, min(tile.stages, SHARED_MEMORY[arch] // ((tile.m + tile.n) * tile.depth)))


def _hopper_table(fmt: str, out: str) -> Iterator[dict[str, object]]:
    size = size_of(fmt)
    for m, n, cluster in _HOPPER:
        yield {
            "tile": (m, n, 128 // size),
            "cluster": cluster,
            "schedule": "warp_specialized",
            "alignment": 16 // size,
            "out_alignment": 16 // FORMATS[out].dtype.itemsize,
        }
