"""Rules of kernel configurations: those of all kernels, then of GEMMs and of convolutions.

Rules reject configurations before compilation: CUTLASS detects most invalid ones only by a static
assertion after ten seconds, and some (a spill, a pipeline that does not fit) only when the kernel
runs. The check of the compiled library (`sass`) is final. No rule queries a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, get_args

from qsync_fx.backend.cuda.codegen import conv_on_hopper, gemm_on_hopper
from qsync_fx.backend.cuda.kernel_config import (
    ARCHITECTURES,
    OPERANDS,
    OUTPUTS,
    SHARED_MEMORY,
    KernelConfig,
    instruction_of,
    size_of,
)
from qsync_fx.backend.cuda.problem import ConvOperation, Major

_WARP: Final = 32
_ALL_REGISTERS: Final = 65536
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


@dataclass(frozen=True)
class RuleTables:
    """Rules of GEMMs or of convolutions.

    Attributes:
        plain: preconditions of all other rules.
        both: rules of CUTLASS 2.x and 3.x.
        on_hopper: returns whether a kernel is of CUTLASS 3.x.
    """

    plain: tuple[ConfigRule, ...]
    both: tuple[ConfigRule, ...]
    cutlass_2: tuple[ConfigRule, ...]
    cutlass_3: tuple[ConfigRule, ...]
    on_hopper: Callable[[KernelConfig], bool]

    @property
    def rules(self) -> tuple[ConfigRule, ...]:
        """All rules."""
        return (*self.plain, *self.both, *self.cutlass_2, *self.cutlass_3)

    def broken(self, config: KernelConfig) -> list[ConfigRule]:
        """Return the rules that a configuration breaks; only plain ones if it breaks any."""
        plain = [rule for rule in self.plain if rule.broken(config)]
        if plain:
            return plain
        table = self.cutlass_3 if self.on_hopper(config) else self.cutlass_2
        return [rule for rule in (*self.both, *table) if rule.broken(config)]


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


def _in_flight(c: KernelConfig) -> int:
    """Return the registers per thread for one stage in flight to shared memory.

    0 if the warp tile is missing or does not divide the tile.
    """
    return _stage_bytes(c) // (4 * _WARP * _warps(c)) if _divides(c) else 0


def _registers(sums: Callable[[KernelConfig], int]) -> ConfigRule:
    """Return the register limit of kernels below wgmma.

    Args:
        sums: returns the accumulators per thread; called only if the warp tile divides the tile.
    """
    return ConfigRule(
        "registers",
        lambda c: (
            _divides(c) and sums(c) + _ADDRESSES > min(256, _ALL_REGISTERS // (_WARP * _warps(c)))
        ),
        "the accumulators of a warp tile must fit into registers",
    )


def _shared_memory(epilogue: Callable[[KernelConfig], int]) -> ConfigRule:
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


_PLAIN: Final = (
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

_BOTH: Final = (
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

_CUTLASS_2: Final = (
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
            and any(c.tile[i] * c.tile[2] * size_of(c.a) % (16 * _WARP * _warps(c)) for i in (0, 1))
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

_CUTLASS_3: Final = (
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


_FP8: Final = ("fp8", "fp8_e5m2")


def _gemm_sums(c: KernelConfig) -> int:
    """Return the accumulators per thread.

    FP8 accumulators move to a second set every few instructions, except in "_fast" schedules.
    """
    sets = 2 if c.a in _FP8 and not c.schedule.endswith("_fast") else 1
    if gemm_on_hopper(c):
        return (
            sets * c.tile[0] * c.tile[1] // (256 if c.schedule.startswith("cooperative") else 128)
        )
    assert c.warp is not None
    return sets * c.warp[0] * c.warp[1] // _WARP


def _epilogue_bytes(c: KernelConfig) -> int:
    """Return the shared memory bytes of the sm_90a epilogue.

    It has four buffers of 32 columns, and the vectors of scales and bias.
    """
    return min(c.tile[0], 128) * 32 * size_of(c.out) * 4 + 8 * c.tile[1] + 1024


def _k_major(c: KernelConfig) -> bool:
    return (c.a_major, c.b_major) == ("row", "column")


_GEMM_PLAIN: Final = (
    *_PLAIN,
    ConfigRule(
        "operation",
        lambda c: c.operation != "gemm",
        "the operation must be gemm, fprop, dgrad or wgrad",
    ),
    ConfigRule(
        "operands",
        lambda c: (c.a, c.b) not in OPERANDS,
        "there are kernels for " + ", ".join(f"{a} x {b}" for a, b in OPERANDS),
    ),
    ConfigRule(
        "layouts",
        lambda c: not {c.a_major, c.b_major} <= set(get_args(Major)),
        "operands must be row-major or column-major",
    ),
    ConfigRule(
        "scales",
        lambda c: (c.a_scale, c.b_scale) not in (("none", "none"), ("channel", "channel")),
        'a kernel reads no scales, or any scale of both operands ("channel")',
    ),
    ConfigRule(
        "schedule",
        lambda c: (
            c.schedule
            not in (
                "multistage",
                "multistage_fast",
                "pipelined",
                "cooperative",
                "cooperative_fast",
                "pingpong",
                "pingpong_fast",
            )
        ),
        "the schedule must be multistage, pipelined, cooperative or pingpong",
    ),
)

_GEMM_BOTH: Final = (
    *_BOTH,
    ConfigRule(
        "K-major",
        lambda c: c.unit == "tensor" and c.a in ("int8", *_FP8) and not _k_major(c),
        "tensor cores need INT8 and FP8 contiguous along k: a row-major, b column-major",
    ),
    ConfigRule(
        "fast",
        lambda c: c.schedule.endswith("_fast") and c.a not in _FP8,
        "only FP8 products have a fast accumulation variant",
    ),
)

_GEMM_CUTLASS_2: Final = (
    *_CUTLASS_2,
    _registers(_gemm_sums),
    ConfigRule(
        "order",
        lambda c: (
            c.order not in ("identity", "stream_k") or (c.order == "stream_k" and c.swizzle != 1)
        ),
        "the tile order must be identity, or stream_k without swizzle",
    ),
    ConfigRule(
        "asynchronous copies",
        lambda c: c.schedule != "pipelined" and c.alignment * size_of(c.a) < 4,
        "asynchronous copies need at least 4 bytes",
    ),
    ConfigRule(
        "aligned bytes",
        lambda c: c.unit == "tensor" and size_of(c.a) == 1 and c.alignment != 16,
        "INT8 and FP8 operands of tensor cores must be aligned to 16 bytes",
    ),
    ConfigRule(
        "fp8 by wgmma",
        lambda c: c.a in _FP8 and c.arch == "sm_90a",
        "FP8 on sm_90a needs wgmma (cooperative or pingpong)",
    ),
)

_GEMM_CUTLASS_3: Final = (
    *_CUTLASS_3,
    ConfigRule(
        "hopper", lambda c: c.arch != "sm_90a", "cooperative and pingpong are schedules of sm_90a"
    ),
    ConfigRule(
        "cluster",
        lambda c: (
            c.cluster is None
            or not all(size in (1, 2, 4) for size in c.cluster)
            or c.cluster[2] != 1
            or c.cluster[0] * c.cluster[1] > 8
        ),
        "a cluster must have at most 8 threadblocks: 1, 2 or 4 in m and in n",
    ),
    ConfigRule(
        "tile m",
        lambda c: (
            c.tile[0] not in ((128, 256) if c.schedule.startswith("cooperative") else (64, 128))
        ),
        "m of the tile must be 128 or 256 for cooperative (two warp groups per tile), 64 or 128 "
        "for pingpong (one warp group per tile)",
    ),
    ConfigRule(
        "tile n",
        lambda c: c.tile[1] not in (32, 64, 128, 256),
        "n of the tile must be 32, 64, 128 or 256",
    ),
    ConfigRule(
        "registers",
        lambda c: _gemm_sums(c) > 128,
        "the accumulators of a tile, twice for accurate FP8, must fit into registers: 128 per "
        "thread",
    ),
    ConfigRule(
        "tf32 across k",
        lambda c: c.a == "tf32" and (c.a_major, c.b_major) != ("row", "column"),
        "wgmma needs TF32 contiguous along k: CUTLASS transposes a column-major a in registers, "
        "which spill, and stores the transposed result for a row-major b; use multistage",
    ),
    ConfigRule(
        "order",
        lambda c: (
            c.order not in ("persistent", "stream_k")
            or (c.order == "stream_k" and not c.schedule.startswith("cooperative"))
        ),
        "the tile order must be persistent, or stream_k for cooperative kernels",
    ),
    _shared_memory(_epilogue_bytes),
)

GEMM: Final = RuleTables(_GEMM_PLAIN, _GEMM_BOTH, _GEMM_CUTLASS_2, _GEMM_CUTLASS_3, gemm_on_hopper)

# Convolutions are implicit GEMMs. For fprop, rows are pixels, columns are output channels, and sums
# run over the filter and the input channels. For dgrad, columns are input channels. For wgrad, rows
# are output channels, columns are filter and input channels, and sums run over pixels.

_CONV_EPILOGUE_BYTES: Final = 32 * 1024  # bytes of shared memory for stores on sm_90a
_BESIDE_PIXELS: Final = 176
"""Registers of 255 that remain next to the addresses and masks of pixels.

Measured: 168 fit on sm_75, 192 spill.
"""

_FEW_SUMS: Final = 64
"""Accumulators per thread if few registers remain for them.

Measured: 64 use up to 224 registers, 128 exceed the limit.
"""


def _conv_sums(c: KernelConfig) -> int:
    """Return the accumulators per thread; on sm_90a one group of four warps has the whole tile."""
    m, n = (c.tile[0], c.tile[1]) if conv_on_hopper(c) or c.warp is None else (c.warp[0], c.warp[1])
    return m * n // (4 * _WARP if conv_on_hopper(c) else _WARP)


_CONV_PLAIN: Final = (
    *_PLAIN,
    ConfigRule(
        "operation",
        lambda c: c.operation not in get_args(ConvOperation),
        "the operation of a convolution must be fprop, dgrad or wgrad",
    ),
    ConfigRule(
        "operands",
        lambda c: (c.a, c.b) not in OPERANDS or c.a.startswith("fp8"),
        "both operands of a convolution must have the same format: int8, fp16, bf16, tf32 or fp32",
    ),
    ConfigRule(
        "schedule",
        lambda c: c.schedule not in ("multistage", "pipelined", "warp_specialized"),
        "the schedule of a convolution must be multistage, pipelined or warp_specialized",
    ),
)

_CONV_BOTH: Final = (
    *_BOTH,
    ConfigRule(
        "int8",
        lambda c: c.a == "int8" and c.operation != "fprop",
        "tensor cores need INT8 contiguous along the reduction, and the channels of gradients "
        "are not: only fprop supports INT8",
    ),
    ConfigRule(
        "scales",
        lambda c: (
            (c.a_scale, c.b_scale)
            not in (("none", "none"), ("tensor", "channel" if c.operation == "fprop" else "tensor"))
        ),
        'a kernel reads no scales, or a per-tensor scale of a and any scale of b ("tensor", '
        '"channel"; for gradients "tensor")',
    ),
    ConfigRule(
        "gradients",
        lambda c: c.operation != "fprop" and c.bias,
        "gradient kernels have no bias",
    ),
    ConfigRule(
        "parts",
        lambda c: (
            c.order == "split_k"
            and (c.operation != "wgrad" or c.out != "fp32" or conv_on_hopper(c))
        ),
        "only weight gradients in FP32, by multistage or pipelined kernels, support split_k",
    ),
)

_CONV_CUTLASS_2: Final = (
    *_CUTLASS_2,
    ConfigRule(
        "columns of memory",
        lambda c: (
            c.unit == "tensor"
            and c.operation != "fprop"
            and (
                c.tile[1] * size_of(c.b) % 128 != 0
                or (c.operation == "wgrad" and c.tile[0] * size_of(c.a) % 128 != 0)
            )
        ),
        "gradient operands that are not contiguous along the reduction need tile rows of 128 bytes",
    ),
    ConfigRule(
        "16 bytes",
        lambda c: c.unit == "tensor" and c.alignment * size_of(c.a) != 16,
        "tensor cores read 16 bytes at a time: other channel counts must be padded",
    ),
    _registers(_conv_sums),
    ConfigRule(
        "in flight",
        lambda c: (
            c.schedule == "pipelined"
            and c.operation != "wgrad"
            and _in_flight(c) + _conv_sums(c) > _BESIDE_PIXELS
        ),
        "the values that a pipelined kernel has loaded must fit into registers, together with "
        "the accumulators of a warp tile",
    ),
    ConfigRule(
        "order",
        lambda c: c.order not in ("identity", "split_k"),
        "the tile order must be identity or split_k",
    ),
    ConfigRule(
        "strided sums",
        lambda c: (
            c.operation == "dgrad"
            and c.strided
            and c.unit == "tensor"
            and _conv_sums(c) > _FEW_SUMS
        ),
        "strided gradients compute pixel indices: this leaves a thread registers for 64 "
        "accumulators",
    ),
    ConfigRule(
        "deep sums",
        lambda c: (
            c.arch == "sm_90a"
            and c.operation == "wgrad"
            and c.tile[2] * size_of(c.a) > 64
            and _conv_sums(c) > _FEW_SUMS
        ),
        "weight gradients on sm_90a with more than 64 accumulators per thread need tiles of 64 "
        "bytes along the reduction",
    ),
    ConfigRule(
        "strided swizzle",
        lambda c: c.operation == "dgrad" and c.strided and c.swizzle == 2,
        "the swizzle of strided gradients must be 1, 4 or 8",
    ),
)

_CONV_CUTLASS_3: Final = (
    *_CUTLASS_3,
    ConfigRule("hopper", lambda c: c.arch != "sm_90a", "warp_specialized is a schedule of sm_90a"),
    ConfigRule(
        "tf32",
        lambda c: c.a == "tf32" and c.operation != "fprop",
        "wgmma needs TF32 contiguous along the reduction",
    ),
    ConfigRule(
        "stride",
        lambda c: c.operation == "dgrad" and c.strided,
        "TMA supports only input gradients of stride 1: strided gradients need multistage",
    ),
    ConfigRule(
        "cluster",
        lambda c: (
            c.cluster is None or not all(size in (1, 2) for size in c.cluster) or c.cluster[2] != 1
        ),
        "a cluster must have 1 or 2 threadblocks in m and in n",
    ),
    ConfigRule("tile m", lambda c: c.tile[0] not in (64, 128), "m of the tile must be 64 or 128"),
    ConfigRule(
        "tile n", lambda c: c.tile[1] not in (64, 128, 256), "n of the tile must be 64, 128 or 256"
    ),
    ConfigRule(
        "registers",
        lambda c: _conv_sums(c) > 128,
        "the accumulators of a tile must fit into registers: 128 per thread",
    ),
    ConfigRule(
        "order",
        lambda c: c.order != "identity" or c.swizzle != 1,
        "the tile order must be identity, with swizzle 1",
    ),
    _shared_memory(lambda _: _CONV_EPILOGUE_BYTES),
)

CONV: Final = RuleTables(_CONV_PLAIN, _CONV_BOTH, _CONV_CUTLASS_2, _CONV_CUTLASS_3, conv_on_hopper)


def tables_of(config: KernelConfig) -> RuleTables:
    """Return the rules for the operation of a configuration."""
    return CONV if config.operation in get_args(ConvOperation) else GEMM
