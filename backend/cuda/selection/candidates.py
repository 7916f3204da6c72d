"""Candidate kernels of a problem: built-in tables, and configurations that users add.

Tiles follow CUTLASS's profiler: large tiles reuse loaded values; small tiles, stream-K and split-K
avoid idle multiprocessors; the swizzle improves reuse in the L2 cache. The order of a table was not
measured: its first entry runs until the tuner decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from qsync_fx.backend.cuda.kernel_config import (
    ARCHITECTURES,
    MULTIPROCESSORS,
    OPERANDS,
    OUTPUTS,
    Arch,
    KernelConfig,
    Shape,
    instruction_of,
    multiplies,
    size_of,
    wide,
)
from qsync_fx.backend.cuda.problem import ConvOperation, ConvProblem, GemmProblem, Problem
from qsync_fx.backend.cuda.selection import constraints
from qsync_fx.errors import OptionError, nearest
from qsync_fx.formats import FORMATS


@dataclass(frozen=True)
class _Tile2:
    """Tile of CUTLASS 2.x; `depth` is its k in bytes. sm_75 ignores `stages`: it has two."""

    m: int
    n: int
    depth: int
    stages: int
    warp: tuple[int, int]
    order: str = "identity"
    swizzle: int = 1
    loose: bool = False

    def config(self, kind: KernelConfig) -> KernelConfig:
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
    *_AMPERE[:4],
    *_AMPERE[6:8],
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


# Convolutions. On sm_90a, wgmma convolutions have a single schedule, in which one warp group has a
# tile of at most 128 x 128. CUTLASS 2.x kernels compute strided input gradients there, and weight
# gradients with split-K; they are candidates next to the wgmma kernels.

_CONV_TENSOR: Final = (
    *_AMPERE[:3],
    *_AMPERE[5:9],
    _Tile2(64, 64, 64, 6, (32, 32)),
    _AMPERE[9],
)

# Strided input gradients: their threads have registers for half the accumulators, and their swizzle
# is never 2.
_STRIDED: Final = (
    _Tile2(128, 128, 64, 4, (64, 32), swizzle=4),
    _Tile2(128, 128, 128, 3, (64, 32)),
    _Tile2(256, 64, 64, 4, (64, 32)),
    _Tile2(128, 64, 64, 5, (64, 32), swizzle=4),
    _Tile2(64, 128, 64, 5, (32, 64), swizzle=4),
    _Tile2(128, 64, 128, 4, (64, 32)),
    _Tile2(64, 128, 128, 4, (32, 64)),
    _Tile2(64, 64, 64, 6, (32, 32)),
    _Tile2(64, 64, 128, 5, (32, 32)),
)

_SPLIT: Final = tuple(replace(_CONV_TENSOR[i], order="split_k", swizzle=1) for i in (0, 4, 5, 7))

# Also for strided input gradients. Larger tiles, and more than 32 x 32 per warp in the second,
# spill there.
_CONV_SIMT: Final = (
    _Tile2(128, 128, 32, 4, (32, 64), swizzle=4),
    _Tile2(128, 64, 32, 5, (32, 32), swizzle=4),
    _Tile2(64, 128, 32, 5, (32, 64), swizzle=4),
    _Tile2(64, 64, 32, 5, (32, 32)),
    _Tile2(128, 128, 32, 4, (64, 32), swizzle=4),
    _Tile2(64, 256, 32, 4, (32, 64), swizzle=4),
    _Tile2(128, 32, 32, 5, (32, 32)),
    _Tile2(32, 128, 32, 5, (32, 32)),
)
_SPLIT_SIMT: Final = tuple(replace(tile, order="split_k", swizzle=1) for tile in _CONV_SIMT[:4])

_CONV_HOPPER: Final = tuple(
    _Tile3(m, n, "warp_specialized", cluster, order="identity")
    for m, n, cluster in (
        (128, 128, (2, 1, 1)),
        (128, 128, (1, 1, 1)),
        (128, 128, (1, 2, 1)),
        (64, 256, (2, 1, 1)),
        (64, 256, (1, 1, 1)),
        (64, 128, (1, 1, 1)),
        (128, 64, (1, 1, 1)),
        (64, 64, (1, 1, 1)),
    )
)

# Number of CUTLASS 2.x tiles that are candidates where wgmma kernels exist. For weight gradients,
# other tiles spill on sm_90a.
_BESIDE_HOPPER: Final[dict[ConvOperation, int]] = {"fprop": 4, "dgrad": 4, "wgrad": 1}

_ADDED: Final[dict[str, KernelConfig]] = {}
"""Configurations added by users, by name, for all models of the process."""


def candidates(
    problem: Problem, arch: Arch, multiprocessors: int | None = None
) -> tuple[KernelConfig, ...]:
    """Return the kernels for a problem: the best general one first, kernels of users last.

    GEMM kernels whose tiles fit the sizes badly come after the others. `multiprocessors` are by
    default those of a typical device. Raise `OptionError` for an unknown architecture.
    """
    _check(arch)
    if isinstance(problem, ConvProblem):
        scaled = (problem.a_scale, problem.b_scale) != ("none", "none")
        strided = problem.stride != (1, 1)
        owned = _conv_configs(problem.operation, problem.a, problem.out, arch, scaled, strided)
    else:
        count = multiprocessors or MULTIPROCESSORS[arch]
        owned = sorted(_gemm_configs(problem, arch), key=lambda c: _misfit(c, problem, count))
    users = (config for config in _ADDED.values() if config.arch == arch)
    every = dict.fromkeys((*owned, *users))
    return tuple(config for config in every if constraints.serves(config, problem) is None)


def _misfit(config: KernelConfig, problem: GemmProblem, multiprocessors: int) -> int:
    """Return the log2 of a tile's padding overhead and idle multiprocessors (none for stream-K)."""
    across, down = -(-problem.n // config.tile[1]), -(-problem.m // config.tile[0])
    larger = down * config.tile[0] * across * config.tile[1] / (problem.m * problem.n)
    idle = 1.0
    if config.order != "stream_k":
        idle = max(1.0, multiprocessors / (down * across))
    return int(math.log2(larger) + math.log2(idle))


def all_configs(arch: Arch) -> tuple[KernelConfig, ...]:
    """Return every configuration of an architecture; raise `OptionError` if it is unknown."""
    _check(arch)
    users = (config for config in _ADDED.values() if config.arch == arch)
    return tuple(dict.fromkeys((*gemm_configs(arch), *conv_configs(arch), *users)))


def add(config: KernelConfig) -> KernelConfig:
    """Add a kernel as a candidate for every problem that it serves, in this process; idempotent.

    Raise `OptionError` with the rules that it breaks.
    """
    if wrong := constraints.problems(config):
        raise OptionError(
            "the kernel configuration is invalid: " + "; ".join(wrong),
            where=repr(config),
            do="change it, or start from one of `candidates(problem, arch)`",
        )
    return _ADDED.setdefault(config.name, config)


def remove(config: KernelConfig) -> None:
    """Undo `add`; ignore configurations that were not added."""
    _ADDED.pop(config.name, None)


def _check(arch: str) -> None:
    if arch not in ARCHITECTURES:
        raise OptionError(
            f"there are no kernels for the architecture {arch!r}",
            do=nearest(str(arch), ARCHITECTURES),
        )


def gemm_configs(arch: Arch) -> Iterator[KernelConfig]:
    """Yield every kernel for each pair of formats and layout; one tile for other outputs.

    The output does not affect the registers of the main loop, so the full product is not compiled.
    """
    for a, b in OPERANDS:
        out = _usual_output(a, arch)
        scale: Any = "channel" if FORMATS[a].scaled else "none"
        plain = GemmProblem(1, 1, 1, a, b, out, a_scale=scale, b_scale=scale)
        yield from _gemm_configs(plain, arch)
        yield from _gemm_configs(replace(plain, b_major="row"), arch)
        yield from _gemm_configs(replace(plain, a_major="column", b_major="row"), arch)
        for other in OUTPUTS:
            if other != out:
                yield from _gemm_configs(replace(plain, out=other), arch)[:1]


def conv_configs(arch: Arch) -> Iterator[KernelConfig]:
    """Yield all kernels for each format, operation and usual output; one for other outputs."""
    for a, b in OPERANDS:
        if a != b or a.startswith("fp8") or not multiplies(arch, a, b):
            continue
        usual = _usual_output(a, arch)
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


def _usual_output(fmt: str, arch: Arch) -> str:
    return {"fp32": "fp32", "tf32": "fp32", "fp16": "fp16", "bf16": "bf16"}.get(fmt) or wide(arch)


def _unit(fmt: str) -> Literal["tensor", "simt"]:
    return "simt" if fmt == "fp32" else "tensor"


def _valid(tiles: Iterable[_Tile2 | _Tile3], kind: KernelConfig) -> list[KernelConfig]:
    made = [tile.config(kind) for tile in tiles]
    return [config for config in made if not constraints.problems(config)]


def _gemm_configs(problem: GemmProblem, arch: Arch) -> list[KernelConfig]:
    if not multiplies(arch, problem.a, problem.b):
        return []
    scale: Any = "none"
    if FORMATS[problem.a].scaled or {problem.a_scale, problem.b_scale} != {"none"}:
        scale = "channel"
    k_major = (problem.a_major, problem.b_major) == ("row", "column")
    kind = KernelConfig(
        operation="gemm",
        arch=arch,
        a=problem.a,
        b=problem.b,
        out=problem.out,
        tile=(1, 1, 1),
        unit=_unit(problem.a),
        a_major=problem.a_major,
        b_major=problem.b_major,
        a_scale=scale,
        b_scale=scale,
        # Products of a backward pass have no bias; they are the ones with other layouts.
        bias=problem.bias or k_major,
    )
    return _valid(_gemm_tiles(kind, k_major), kind)


def _gemm_tiles(kind: KernelConfig, k_major: bool) -> tuple[_Tile2 | _Tile3, ...]:
    if kind.unit == "simt":
        return _SIMT
    if kind.arch == "sm_75":
        return _TURING
    # TF32 needs K-major operands on sm_90a; see `constraints`.
    hopper = kind.arch == "sm_90a" and (kind.a != "tf32" or k_major)
    if kind.a in ("fp8", "fp8_e5m2"):
        return _HOPPER_FP8 if hopper else _ADA_FP8
    tiles = _HOPPER if hopper else _AMPERE
    return tiles if size_of(kind.a) == 1 else (*tiles, _LOOSE)


def _conv_configs(
    operation: ConvOperation, fmt: str, out: str, arch: Arch, scaled: bool, strided: bool
) -> list[KernelConfig]:
    a_scale: Any = "none"
    b_scale: Any = "none"
    if scaled:
        a_scale, b_scale = "tensor", {"fprop": "channel"}.get(operation, "tensor")
    kind = KernelConfig(
        operation=operation,
        arch=arch,
        a=fmt,
        b=fmt,
        out=out,
        tile=(1, 1, 1),
        unit=_unit(fmt),
        bias=operation == "fprop",
        # Only dgrad kernels are specialized for the kind of stride.
        strided=strided or operation != "dgrad",
        a_scale=a_scale,
        b_scale=b_scale,
    )
    return _valid(_conv_tiles(kind, operation), kind)


def _conv_tiles(kind: KernelConfig, operation: ConvOperation) -> tuple[_Tile2 | _Tile3, ...]:
    simt, weight = kind.unit == "simt", operation == "wgrad"
    tiles: tuple[_Tile2, ...] = _CONV_TENSOR
    split: tuple[_Tile2, ...] = _SPLIT
    strided = operation == "dgrad" and kind.strided
    if simt:
        tiles, split = _CONV_SIMT, _SPLIT_SIMT
    elif strided:
        tiles = _STRIDED
    hopper: tuple[_Tile3, ...] = ()
    wgmma = kind.arch == "sm_90a" and not simt and not strided
    if wgmma and (kind.a != "tf32" or operation == "fprop"):
        hopper, tiles = _CONV_HOPPER, tiles[: _BESIDE_HOPPER[operation]]
    if weight and kind.out == "fp32":
        # Split-K first: most weight gradients have fewer tiles than a device has multiprocessors.
        tiles = (*split, *tiles)
    return (*tiles, *hopper) if weight else (*hopper, *tiles)
