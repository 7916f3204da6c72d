"""Tables of candidate kernels, of GEMMs and then of convolutions.

Tiles follow CUTLASS's profiler: large tiles reuse loaded values more often; small tiles, stream-K
and split-K avoid idle multiprocessors; the swizzle improves reuse in the L2 cache. The order of a
table was not measured: its first entry runs until the tuner decides. There are 8 to 12 candidates
per architecture, formats and operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from qsync_fx.backend.cuda.kernel_config import (
    ARCHITECTURES,
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
from qsync_fx.backend.cuda.problem import ConvOperation, ConvProblem, GemmProblem, Major, Scale
from qsync_fx.backend.cuda.selection import constraints, select
from qsync_fx.formats import FORMATS


@dataclass(frozen=True)
class _Tile2:
    """Tile of CUTLASS 2.x; `depth` is its k in bytes."""

    m: int
    n: int
    depth: int
    stages: int
    warp: tuple[int, int]
    order: str = "identity"
    swizzle: int = 1
    loose: bool = False

    def config(self, kind: KernelConfig) -> KernelConfig:
        """Return `kind` with this tile."""
        width = size_of(kind.a)
        alignment, out_alignment = 16 // width, 16 // size_of(kind.out)
        if kind.unit == "simt" or self.loose:
            alignment, out_alignment = 4 // width, 1
        stages, schedule = self.stages, "multistage"
        if kind.arch == "sm_75":
            stages, schedule = 2, "pipelined"
        return replace(
            kind,
            tile=(self.m, self.n, self.depth // width),
            warp=(*self.warp, self.depth // width),
            instruction=instruction_of(kind),
            stages=stages,
            schedule=schedule,
            order=self.order,
            swizzle=self.swizzle,
            alignment=alignment,
            out_alignment=out_alignment,
        )


@dataclass(frozen=True)
class _Tile3:
    """Tile of CUTLASS 3.x, with 128 bytes along k."""

    m: int
    n: int
    schedule: str
    cluster: Shape = (2, 1, 1)
    order: str = "persistent"
    swizzle: int = 1

    def config(self, kind: KernelConfig) -> KernelConfig:
        """Return `kind` with this tile."""
        return replace(
            kind,
            tile=(self.m, self.n, 128 // size_of(kind.a)),
            cluster=self.cluster,
            schedule=self.schedule,
            order=self.order,
            swizzle=self.swizzle,
            alignment=16 // size_of(kind.a),
            out_alignment=16 // size_of(kind.out),
        )


_AMPERE: Final = (
    _Tile2(128, 128, 64, 4, (64, 64), swizzle=4),
    _Tile2(128, 256, 64, 3, (64, 64), swizzle=4),
    _Tile2(256, 128, 64, 3, (64, 64), swizzle=4),
    _Tile2(128, 128, 64, 4, (64, 64), "stream_k"),
    _Tile2(128, 256, 64, 3, (64, 64), "stream_k"),
    _Tile2(128, 128, 128, 3, (64, 64)),
    _Tile2(128, 64, 64, 5, (64, 32), swizzle=2),
    _Tile2(64, 128, 64, 5, (32, 64), swizzle=2),
    _Tile2(256, 64, 64, 4, (64, 64)),
    _Tile2(64, 64, 128, 5, (32, 32)),
    _Tile2(64, 64, 128, 5, (32, 32), "stream_k"),
)

_ADA_FP8: Final = (
    # Accumulators move to a second set of registers, so the warp tile is half as large as for
    # other formats.
    _Tile2(128, 128, 64, 4, (64, 32), swizzle=4),
    _Tile2(128, 128, 64, 4, (32, 64), swizzle=4),
    _Tile2(256, 64, 64, 4, (64, 32), swizzle=4),
    _Tile2(128, 128, 64, 4, (64, 32), "stream_k"),
    _Tile2(128, 64, 64, 5, (64, 32), swizzle=2),
    _Tile2(128, 64, 64, 5, (64, 32), "stream_k"),
    _Tile2(64, 128, 64, 5, (32, 64), swizzle=2),
    _Tile2(64, 64, 128, 5, (32, 32)),
    _Tile2(64, 64, 128, 5, (32, 32), "stream_k"),
)

_TURING: Final = (
    _Tile2(128, 128, 64, 2, (64, 64), swizzle=4),
    _Tile2(128, 256, 64, 2, (64, 64), swizzle=4),
    _Tile2(256, 128, 64, 2, (64, 64), swizzle=4),
    _Tile2(128, 128, 64, 2, (64, 64), "stream_k"),
    _Tile2(128, 64, 64, 2, (64, 32), swizzle=2),
    _Tile2(64, 128, 64, 2, (32, 64), swizzle=2),
    _Tile2(64, 64, 64, 2, (32, 32)),
    _Tile2(64, 64, 64, 2, (32, 32), "stream_k"),
)

# For sizes that are not multiples of 16 bytes: slower loads, but no padding copies. Asynchronous
# copies are at least 4 bytes.
_LOOSE: Final = _Tile2(128, 128, 64, 4, (64, 64), loose=True)

_SIMT: Final = (
    _Tile2(128, 128, 32, 4, (32, 64), swizzle=4),
    _Tile2(128, 256, 32, 4, (64, 64), swizzle=4),
    _Tile2(256, 128, 32, 4, (64, 64), swizzle=4),
    _Tile2(128, 128, 32, 4, (32, 64), "stream_k"),
    _Tile2(128, 64, 32, 5, (64, 32), swizzle=2),
    _Tile2(64, 128, 32, 5, (32, 64), swizzle=2),
    _Tile2(64, 64, 32, 5, (32, 32)),
    _Tile2(64, 64, 32, 5, (32, 32), "stream_k"),
)

_HOPPER: Final = (
    _Tile3(128, 256, "cooperative", swizzle=4),
    _Tile3(128, 128, "pingpong", swizzle=4),
    _Tile3(256, 128, "cooperative", swizzle=4),
    _Tile3(128, 256, "cooperative", (1, 2, 1), swizzle=4),
    _Tile3(128, 256, "cooperative", order="stream_k"),
    _Tile3(128, 128, "cooperative"),
    _Tile3(128, 128, "cooperative", order="stream_k"),
    _Tile3(64, 256, "pingpong", (2, 1, 1)),
    _Tile3(64, 128, "pingpong", (1, 1, 1)),
    _Tile3(64, 128, "pingpong", (2, 1, 1), swizzle=2),
    _Tile3(64, 64, "pingpong", (1, 1, 1)),
)

# Half as many accumulators per thread, because accurate FP8 has two sets.
_HOPPER_FP8: Final = (
    _Tile3(128, 128, "cooperative", swizzle=4),
    _Tile3(128, 128, "cooperative", (1, 2, 1), swizzle=4),
    _Tile3(256, 64, "cooperative", swizzle=4),
    _Tile3(64, 128, "pingpong", (2, 1, 1), swizzle=4),
    _Tile3(128, 64, "pingpong", (2, 1, 1), swizzle=4),
    _Tile3(128, 128, "cooperative", order="stream_k"),
    _Tile3(128, 64, "cooperative", order="stream_k"),
    _Tile3(64, 128, "pingpong", (1, 1, 1)),
    _Tile3(64, 64, "pingpong", (1, 1, 1)),
)


def gemm_candidates(problem: GemmProblem, arch: Arch, multiprocessors: int) -> list[KernelConfig]:
    """Return the kernels that serve a problem, the best general one first.

    Kernels whose tiles fit the sizes badly come last.
    """
    result = [
        config for config in _configs(problem, arch) if select.serves(config, problem) is None
    ]
    return sorted(result, key=lambda config: _misfit(config, problem, multiprocessors))


def gemm_configs(arch: Arch) -> Iterator[KernelConfig]:
    """Yield every kernel for each pair of formats and layout; one tile for other outputs.

    The output does not affect the registers of the main loop, so the full product is not compiled.
    """
    layouts: tuple[tuple[Major, Major], ...] = (
        ("row", "column"),
        ("row", "row"),
        ("column", "row"),
    )
    for a, b in OPERANDS:
        out = wide(arch)
        if a in ("fp32", "tf32"):
            out = "fp32"
        elif a == "fp16":
            out = "fp16"
        scale: Scale = "channel" if FORMATS[a].scaled else "none"
        plain = GemmProblem(1, 1, 1, a, b, out, a_scale=scale, b_scale=scale)
        for a_major, b_major in layouts:
            yield from _configs(replace(plain, a_major=a_major, b_major=b_major), arch)
        for other in ("fp32", "fp16", "bf16"):
            if other != out:
                yield from _configs(replace(plain, out=other), arch)[:1]


def _configs(problem: GemmProblem, arch: Arch) -> list[KernelConfig]:
    first = OPERANDS.get((problem.a, problem.b))
    if first is None or ARCHITECTURES.index(arch) < ARCHITECTURES.index(first):
        return []
    scaled = FORMATS[problem.a].scaled or problem.a_scale != "none" or problem.b_scale != "none"
    scale: Scale = "channel" if scaled else "none"
    k_major = (problem.a_major, problem.b_major) == ("row", "column")
    kind = KernelConfig(
        operation="gemm",
        arch=arch,
        a=problem.a,
        b=problem.b,
        out=problem.out,
        tile=(1, 1, 1),
        unit="simt" if problem.a == "fp32" else "tensor",
        a_major=problem.a_major,
        b_major=problem.b_major,
        a_scale=scale,
        b_scale=scale,
        # Products of a backward pass have no bias; they are the ones with other layouts.
        bias=problem.bias or k_major,
    )
    made = [tile.config(kind) for tile in _tiles(kind)]
    return [config for config in made if not constraints.GEMM.broken(config)]


def _tiles(kind: KernelConfig) -> tuple[_Tile2 | _Tile3, ...]:
    if kind.unit == "simt":
        return _SIMT
    fp8 = kind.a in ("fp8", "fp8_e5m2")
    if kind.arch == "sm_75":
        return _TURING
    loose = () if size_of(kind.a) == 1 else (_LOOSE,)
    # See the rule "tf32 across k".
    if kind.arch == "sm_90a" and (
        kind.a != "tf32" or (kind.a_major, kind.b_major) == ("row", "column")
    ):
        return (*(_HOPPER_FP8 if fp8 else _HOPPER), *loose)
    return _ADA_FP8 if fp8 else (*_AMPERE, *loose)


def _misfit(config: KernelConfig, problem: GemmProblem, multiprocessors: int) -> int:
    """Return the log2 of a tile's padding overhead and idle multiprocessors (none for stream-K)."""
    across, down = -(-problem.n // config.tile[1]), -(-problem.m // config.tile[0])
    larger = down * config.tile[0] * across * config.tile[1] / (problem.m * problem.n)
    idle = 1.0 if config.order == "stream_k" else max(1.0, multiprocessors / (down * across))
    return int(math.log2(larger) + math.log2(idle))


# Convolutions. On sm_90a, wgmma convolutions have a single schedule, in which one warp group has a
# tile of at most 128 x 128. CUTLASS 2.x kernels compute strided input gradients there, and weight
# gradients with split-K; they are candidates next to the wgmma kernels.


@dataclass(frozen=True)
class _ConvTile:
    """Tile of CUTLASS 2.x; `depth` is its k in bytes, `stages` the pipeline depth for sm_80."""

    m: int
    n: int
    depth: int
    stages: int
    warp: tuple[int, int]
    swizzle: int = 1
    split: bool = False


_CONV_TENSOR: Final = (
    _ConvTile(128, 128, 64, 4, (64, 64), 4),
    _ConvTile(128, 256, 64, 3, (64, 64), 4),
    _ConvTile(256, 128, 64, 3, (64, 64), 4),
    _ConvTile(128, 128, 128, 3, (64, 64)),
    _ConvTile(128, 64, 64, 5, (64, 32), 2),
    _ConvTile(64, 128, 64, 5, (32, 64), 2),
    _ConvTile(256, 64, 64, 4, (64, 64)),
    _ConvTile(64, 64, 64, 6, (32, 32)),
    _ConvTile(64, 64, 128, 5, (32, 32)),
)

_STRIDED: Final = (
    _ConvTile(128, 128, 64, 4, (64, 32), 4),
    _ConvTile(128, 128, 128, 3, (64, 32)),
    _ConvTile(256, 64, 64, 4, (64, 32)),
    _ConvTile(128, 64, 64, 5, (64, 32), 4),
    _ConvTile(64, 128, 64, 5, (32, 64), 4),
    _ConvTile(128, 64, 128, 4, (64, 32)),
    _ConvTile(64, 128, 128, 4, (32, 64)),
    _ConvTile(64, 64, 64, 6, (32, 32)),
    _ConvTile(64, 64, 128, 5, (32, 32)),
)
"""Tiles of strided input gradients.

Their threads have registers for half the accumulators, and their swizzle is never 2.
"""

_PARTS: Final = (
    _ConvTile(128, 128, 64, 4, (64, 64), split=True),
    _ConvTile(128, 64, 64, 5, (64, 32), split=True),
    _ConvTile(64, 128, 64, 5, (32, 64), split=True),
    _ConvTile(64, 64, 64, 6, (32, 32), split=True),
)

_CONV_SIMT: Final = (
    _ConvTile(128, 128, 32, 4, (32, 64), 4),
    _ConvTile(128, 64, 32, 5, (32, 32), 4),
    _ConvTile(64, 128, 32, 5, (32, 64), 4),
    _ConvTile(64, 64, 32, 5, (32, 32)),
    _ConvTile(128, 128, 32, 4, (64, 32), 4),
    _ConvTile(64, 256, 32, 4, (32, 64), 4),
    _ConvTile(128, 32, 32, 5, (32, 32)),
    _ConvTile(32, 128, 32, 5, (32, 32)),
)
"""Tiles of CUDA cores, also for strided input gradients.

Larger tiles, and more than 32 x 32 per warp in the second, spill there.
"""

_CONV_HOPPER: Final[tuple[tuple[int, int, Shape], ...]] = (
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
    result = _conv_configs(problem.operation, problem.a, problem.out, arch, scaled, strided)
    return [config for config in result if select.serves(config, problem) is None]


def conv_configs(arch: Arch) -> Iterator[KernelConfig]:
    """Yield all kernels for each format, operation and usual output; one for other outputs."""
    for (a, b), since in OPERANDS.items():
        if a != b or a.startswith("fp8") or not _has(arch, since):
            continue
        usual = {"int8": wide(arch), "fp16": "fp16", "bf16": "bf16"}.get(a, "fp32")
        scaled = FORMATS[a].scaled
        yield from _conv_configs("fprop", a, usual, arch, scaled, True)
        for out in (other for other in OUTPUTS if other != usual):
            yield from _conv_configs("fprop", a, out, arch, scaled, True)[:1]
        if a == "int8":
            continue
        for strided in (False, True):
            yield from _conv_configs("dgrad", a, usual, arch, False, strided)
        yield from _conv_configs("wgrad", a, "fp32", arch, True, True)
        yield from _conv_configs("wgrad", a, usual, arch, True, True)[:1]


def _has(arch: Arch, since: Arch) -> bool:
    return int(arch[3:5]) >= int(since[3:5])


def _conv_configs(
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
    tiles: tuple[_ConvTile, ...]
    if fmt == "fp32":
        tiles = _CONV_SIMT
    elif operation == "dgrad" and strided:
        tiles = _STRIDED
    elif wgmma:
        tiles = _CONV_TENSOR[: _BESIDE_HOPPER[operation]]
    else:
        tiles = _CONV_TENSOR
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


def _parts(fmt: str) -> tuple[_ConvTile, ...]:
    if fmt == "fp32":
        return tuple(replace(tile, swizzle=1, split=True) for tile in _CONV_SIMT[:4])
    return _PARTS


def _of_tile(tile: _ConvTile, fmt: str, out: str, arch: Arch) -> dict[str, object]:
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


def _stages(tile: _ConvTile, arch: Arch) -> int:
    """Return the stages of the table, limited by the smaller shared memory of sm_86 and sm_89."""
    return max(3, min(tile.stages, SHARED_MEMORY[arch] // ((tile.m + tile.n) * tile.depth)))


def _hopper_table(fmt: str, out: str) -> Iterator[dict[str, object]]:
    size = size_of(fmt)
    for m, n, cluster in _CONV_HOPPER:
        yield {
            "tile": (m, n, 128 // size),
            "cluster": cluster,
            "schedule": "warp_specialized",
            "alignment": 16 // size,
            "out_alignment": 16 // FORMATS[out].dtype.itemsize,
        }
