"""Rules of kernel configurations that GEMMs and convolutions share, and their building blocks.

Rules reject configurations before compilation: CUTLASS detects most invalid ones only by a static
assertion after ten seconds, and some (a spill, a pipeline that does not fit) only when the kernel
runs. The check of the compiled library (`sass`) is final.

Invariant: a predicate of `PLAIN` accepts any configuration; other predicates rely on `PLAIN`. No
rule queries a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from qsync_fx.backend.cuda.kernel_config import (
    ARCHITECTURES,
    OPERANDS,
    OUTPUTS,
    SHARED_MEMORY,
    KernelConfig,
    instruction_of,
    size_of,
)

WARP: Final = 32
_REGISTERS: Final = 65536
# Registers for addresses, masks, operands and scales, besides the accumulators (measured).
_ADDRESSES: Final = 96


@dataclass(frozen=True)
class ConfigRule:
    """Constraint on every configuration of a kind.

    Attributes:
        name: for tests and messages.
        broken: whether a configuration breaks it.
        sentence: the requirement.
    """

    name: str
    broken: Callable[[KernelConfig], bool]
    sentence: str


def _positive(shape: object) -> bool:
    sizes = shape if isinstance(shape, tuple) else ()
    return len(sizes) == 3 and all(type(size) is int and 0 < size <= 1024 for size in sizes)


def _warps(c: KernelConfig) -> int:
    assert c.warp is not None
    return (c.tile[0] // c.warp[0]) * (c.tile[1] // c.warp[1])


def _divides(c: KernelConfig) -> bool:
    """Return whether the warp tile divides the tile; later rules divide by the warp tile."""
    return (
        c.warp is not None
        and c.tile[0] % c.warp[0] == c.tile[1] % c.warp[1] == 0
        and c.tile[2] == c.warp[2]
    )


def _stage_bytes(c: KernelConfig) -> int:
    """Return the shared memory bytes of one stage: a tile of each operand."""
    m, n, k = c.tile
    return k * (m * size_of(c.a) + n * size_of(c.b))


def in_flight(c: KernelConfig) -> int:
    """Return the registers per thread for one stage in flight to shared memory.

    0 if the warp tile is missing or does not divide the tile.
    """
    return _stage_bytes(c) // (4 * WARP * _warps(c)) if _divides(c) else 0


def registers(sums: Callable[[KernelConfig], int]) -> ConfigRule:
    """Return the register limit of kernels below wgmma.

    Args:
        sums: returns the accumulators per thread; called only if the warp tile divides the tile.
    """
    return ConfigRule(
        "registers",
        lambda c: _divides(c) and sums(c) + _ADDRESSES > min(256, _REGISTERS // (WARP * _warps(c))),
        "the accumulators of a warp tile must fit into registers",
    )


def shared_memory(epilogue: Callable[[KernelConfig], int]) -> ConfigRule:
    """Return the shared memory limit of wgmma kernels.

    Args:
        epilogue: returns the bytes of shared memory for stores.
    """
    return ConfigRule(
        "shared memory",
        lambda c: _stage_bytes(c) * max(c.stages, 2) + epilogue(c) > SHARED_MEMORY[c.arch],
        "two stages, or the requested number of stages, must fit into shared memory together "
        "with the epilogue",
    )


PLAIN: Final = (
    ConfigRule(
        "arch",
        lambda c: c.arch not in ARCHITECTURES,
        f"the architecture must be one of {', '.join(ARCHITECTURES)}",
    ),
    ConfigRule(
        "shapes",
        lambda c: (
            not all(
                map(
                    _positive,
                    (c.tile, *(x for x in (c.warp, c.instruction, c.cluster) if x is not None)),
                )
            )
        ),
        "tile, warp, instruction and cluster must each have three sizes from 1 to 1024",
    ),
    ConfigRule("output", lambda c: c.out not in OUTPUTS, "the output must be fp32, fp16 or bf16"),
    ConfigRule(
        "swizzle", lambda c: c.swizzle not in (1, 2, 4, 8), "the swizzle must be 1, 2, 4 or 8"
    ),
    ConfigRule(
        "alignment",
        lambda c: c.alignment not in (1, 2, 4, 8, 16) or c.out_alignment not in (1, 2, 4, 8),
        "alignments must be powers of two, up to 16 (operands) and 8 (output)",
    ),
    ConfigRule(
        "stages",
        lambda c: type(c.stages) is not int or not 0 <= c.stages <= 16,
        "there must be at most 16 stages",
    ),
)
"""Preconditions of the other rules."""

BOTH: Final = (
    ConfigRule(
        "since",
        lambda c: ARCHITECTURES.index(c.arch) < ARCHITECTURES.index(OPERANDS[c.a, c.b]),
        "the architecture must have tensor cores for the formats",
    ),
    ConfigRule(
        "unit",
        lambda c: (c.unit == "simt") != (c.a == "fp32"),
        'fp32 needs the unit "simt"; all other formats need tensor cores',
    ),
    ConfigRule(
        "wide",
        lambda c: c.alignment * size_of(c.a) > 16 or c.out_alignment * size_of(c.out) > 16,
        "a memory access has at most 16 bytes",
    ),
)
"""Rules of kernels of CUTLASS 2.x and 3.x."""

CUTLASS_2: Final = (
    ConfigRule(
        "names",
        lambda c: c.warp is None or c.instruction is None or c.cluster is not None,
        "a kernel without wgmma needs warp and instruction, and no cluster",
    ),
    ConfigRule(
        "warp divides tile",
        lambda c: not _divides(c),
        "the warp tile must divide the tile in m and n, and have the same k",
    ),
    ConfigRule(
        "instruction",
        lambda c: c.instruction != instruction_of(c),
        "the instruction must be the one that the architecture has for the format",
    ),
    ConfigRule(
        "iterations",
        lambda c: (
            c.warp is not None
            and c.instruction is not None
            and (
                any(w % i for w, i in zip(c.warp, c.instruction, strict=True))
                or c.warp[2] // c.instruction[2] % 2 != 0
            )
        ),
        "the warp tile must be a multiple of the instruction, and an even multiple in k: the "
        "loads of one half overlap with the other half",
    ),
    ConfigRule(
        "rows of memory",
        lambda c: c.unit == "tensor" and c.tile[2] * size_of(c.a) not in (64, 128),
        "a tile must have 64 or 128 bytes along k: shared memory is laid out for these sizes to "
        "avoid bank conflicts",
    ),
    ConfigRule(
        "simt tile",
        lambda c: (
            c.unit == "simt"
            and (
                c.tile[2] * size_of(c.a) != 32
                or c.alignment * size_of(c.a) != 4
                or c.out_alignment != 1
            )
        ),
        "simt tiles must have 32 bytes along k, an alignment of 4 bytes, and an output alignment "
        "of 1",
    ),
    ConfigRule(
        "warps",
        lambda c: _divides(c) and not 1 <= _warps(c) <= 16,
        "a threadblock must have 1 to 16 warps",
    ),
    ConfigRule(
        "loads",
        lambda c: (
            _divides(c)
            and c.unit == "tensor"
            and any(c.tile[i] * c.tile[2] * size_of(c.a) % (16 * WARP * _warps(c)) for i in (0, 1))
        ),
        "the loads of a tile must divide evenly among threads, 16 bytes each",
    ),
    ConfigRule(
        "pipeline",
        lambda c: (c.schedule == "pipelined") != (c.arch == "sm_75"),
        "sm_75 needs the schedule pipelined: multistage needs asynchronous copies, which it lacks",
    ),
    ConfigRule(
        "stages of the pipeline",
        lambda c: (c.stages != 2) if c.schedule == "pipelined" else not 3 <= c.stages <= 10,
        "pipelined needs two stages, multistage three to ten",
    ),
    ConfigRule(
        "shared memory",
        lambda c: _stage_bytes(c) * c.stages > SHARED_MEMORY[c.arch],
        "the stages must fit into shared memory",
    ),
)

CUTLASS_3: Final = (
    ConfigRule(
        "wgmma",
        lambda c: c.unit != "tensor" or c.warp is not None or c.instruction is not None,
        'wgmma kernels have the unit "tensor", and no warp and instruction: the schedule '
        "determines them",
    ),
    ConfigRule(
        "tile k",
        lambda c: c.tile[2] * size_of(c.a) != 128,
        "a tile must have 128 bytes along k, the widest swizzle of TMA",
    ),
    ConfigRule(
        "TMA",
        lambda c: c.alignment * size_of(c.a) != 16 or c.out_alignment * size_of(c.out) != 16,
        "TMA copies 16 aligned bytes: alignments must be 16 bytes",
    ),
    ConfigRule(
        "stages of the pipeline",
        lambda c: c.stages == 1,
        "a pipeline needs at least two stages; 0 selects as many as fit",
    ),
)
