"""What makes a configuration of a GEMM a kernel: tables of rules, each with a name and a sentence.

Why before compiling: CUTLASS refuses most of these by a static assertion after ten seconds, and some not at all (a spill, a pipeline that
does not fit) until the kernel runs. The report on the compiled library (`sass`) stays the judge.

Invariant: a predicate of `_PLAIN` takes any configuration; the others may rely on those. Nothing here looks at a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, get_args

from qsync_fx.backend.cuda.config import ARCHITECTURES, KernelConfig
from qsync_fx.backend.cuda.gemm_source import hopper
from qsync_fx.backend.cuda.hardware import OPERANDS, OUTPUTS, SHARED_MEMORY, instruction_of, size_of
from qsync_fx.backend.cuda.problem import Activation, Major

_FP8: Final = ("fp8", "fp8_e5m2")
_WARP: Final = 32
_REGISTERS: Final = 65536
_ADDRESSES: Final = 96  # registers that addresses, operands and scales take beside the sums, measured


@dataclass(frozen=True)
class Rule:
    """What every configuration of a kind keeps to.

    Attributes:
        name: for tests and messages.
        broken: whether a configuration breaks it.
        sentence: what it asks for.
    """

    name: str
    broken: Callable[[KernelConfig], bool]
    sentence: str


# What products and convolutions have in common.
SWIZZLE: Final = Rule("swizzle", lambda c: c.swizzle not in (1, 2, 4, 8), "the swizzle is 1, 2, 4 or 8")
ALIGNMENT: Final = Rule(
    "alignment",
    lambda c: c.alignment not in (1, 2, 4, 8, 16) or c.out_alignment not in (1, 2, 4, 8),
    "alignments are powers of two, up to 16 (operands) and 8 (output)",
)
STAGES: Final = Rule(
    "stages", lambda c: type(c.stages) is not int or not 0 <= c.stages <= 16, "there are up to 16 stages"
)
SINCE: Final = Rule(
    "since",
    lambda c: ARCHITECTURES.index(c.arch) < ARCHITECTURES.index(OPERANDS[c.a, c.b]),
    "the architecture has tensor cores for the formats",
)
UNIT: Final = Rule(
    "unit",
    lambda c: (c.unit == "simt") != (c.a == "fp32"),
    'fp32 runs on the ordinary units ("simt"), all other formats on tensor cores',
)


def _positive(shape: object) -> bool:
    sizes = shape if isinstance(shape, tuple) else ()
    return len(sizes) == 3 and all(type(size) is int and 0 < size <= 1024 for size in sizes)


def _warps(c: KernelConfig) -> int:
    assert c.warp is not None
    return (c.tile[0] // c.warp[0]) * (c.tile[1] // c.warp[1])


def _divides(c: KernelConfig) -> bool:
    """Later rules divide by what this one grants: it is false for shapes that do not fit into each other."""
    return c.warp is not None and c.tile[0] % c.warp[0] == c.tile[1] % c.warp[1] == 0 and c.tile[2] == c.warp[2]


def _sums(c: KernelConfig) -> int:
    """Accumulators a thread. FP8 ones are moved to a second set every few instructions, unless the unit's own accuracy is enough."""
    sets = 2 if c.a in _FP8 and not c.schedule.endswith("_fast") else 1
    if hopper(c):
        return sets * c.tile[0] * c.tile[1] // (256 if c.schedule.startswith("cooperative") else 128)
    assert c.warp is not None
    return sets * c.warp[0] * c.warp[1] // _WARP


def _stage_bytes(c: KernelConfig) -> int:
    m, n, k = c.tile
    return k * (m * size_of(c.a) + n * size_of(c.b))


def _epilogue_bytes(c: KernelConfig) -> int:
    """What is left of shared memory at sm_90a for stores: four buffers of 32 columns, and the vectors of scales and bias."""
    return min(c.tile[0], 128) * 32 * size_of(c.out) * 4 + 8 * c.tile[1] + 1024


def _k_major(c: KernelConfig) -> bool:
    return (c.a_major, c.b_major) == ("row", "column")


_PLAIN: Final = (
    Rule("arch", lambda c: c.arch not in ARCHITECTURES, f"the architecture is one of {', '.join(ARCHITECTURES)}"),
    Rule(
        "volta",
        lambda c: c.arch == "sm_70",
        "sm_70 needs NVRTC 12, for which there is no template yet: nvcc 13 cannot compile it",
    ),
    Rule("operation", lambda c: c.operation != "gemm", "the operation is gemm, fprop, dgrad or wgrad"),
    Rule(
        "shapes",
        lambda c: not all(map(_positive, (c.tile, *(x for x in (c.warp, c.instruction, c.cluster) if x is not None)))),
        "tile, warp, instruction and cluster are three sizes from 1 to 1024",
    ),
    Rule(
        "operands",
        lambda c: (c.a, c.b) not in OPERANDS,
        "there are kernels for " + ", ".join(f"{a} x {b}" for a, b in OPERANDS),
    ),
    Rule("output", lambda c: c.out not in OUTPUTS, "the output is fp32, fp16 or bf16"),
    Rule("layouts", lambda c: not {c.a_major, c.b_major} <= set(get_args(Major)), "operands lie by rows or by columns"),
    Rule("activation", lambda c: c.activation not in get_args(Activation), "the activation is none, relu or gelu"),
    Rule(
        "scales",
        lambda c: (c.a_scale, c.b_scale) not in (("none", "none"), ("channel", "channel")),
        'a kernel reads no scales, or any kind of scale of both operands ("channel")',
    ),
    Rule(
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
        "the schedule is multistage, pipelined, cooperative or pingpong",
    ),
    SWIZZLE,
    ALIGNMENT,
    STAGES,
)
"""What the other rules take for granted."""

_BOTH: Final = (
    SINCE,
    UNIT,
    Rule(
        "K-major",
        lambda c: c.a in ("int8", *_FP8) and not _k_major(c),
        "tensor cores take INT8 and FP8 only contiguous along k: a by rows, b by columns",
    ),
    Rule(
        "fast",
        lambda c: c.schedule.endswith("_fast") and c.a not in _FP8,
        "only sums of FP8 products have a fast variant",
    ),
    Rule(
        "wide",
        lambda c: c.alignment * size_of(c.a) > 16 or c.out_alignment * size_of(c.out) > 16,
        "one access has at most 16 bytes",
    ),
)

_CUTLASS_2: Final = (
    Rule(
        "parts",
        lambda c: c.warp is None or c.instruction is None or c.cluster is not None,
        "a kernel below wgmma names warp and instruction, and no cluster",
    ),
    Rule("warp divides tile", lambda c: not _divides(c), "the warp tile divides the tile in m and n, and has its k"),
    Rule(
        "instruction",
        lambda c: c.instruction != instruction_of(c),
        "the instruction is the one that the architecture has for the format",
    ),
    Rule(
        "iterations",
        lambda c: (
            c.warp is not None
            and c.instruction is not None
            and (
                any(w % i for w, i in zip(c.warp, c.instruction, strict=True)) or c.warp[2] // c.instruction[2] % 2 != 0
            )
        ),
        "the warp tile is a multiple of the instruction, an even one in k: loads of one half hide behind the other",
    ),
    Rule(
        "rows of memory",
        lambda c: c.unit == "tensor" and c.tile[2] * size_of(c.a) not in (64, 128),
        "a tile has 64 or 128 bytes along k, which is what shared memory without bank conflicts is laid out for",
    ),
    Rule(
        "simt tile",
        lambda c: c.unit == "simt" and (c.tile[2] != 8 or c.alignment != 1 or c.out_alignment != 1),
        "FP32 tiles have 8 along k, and alignments of 1",
    ),
    Rule("warps", lambda c: _divides(c) and not 1 <= _warps(c) <= 16, "a threadblock has 1 to 16 warps"),
    Rule(
        "loads",
        lambda c: (
            _divides(c)
            and c.unit == "tensor"
            and any(c.tile[i] * c.tile[2] * size_of(c.a) % (16 * _WARP * _warps(c)) for i in (0, 1))
        ),
        "threads share the loads of a tile evenly, 16 bytes each",
    ),
    Rule(
        "registers",
        lambda c: _divides(c) and _sums(c) + _ADDRESSES > min(256, _REGISTERS // (_WARP * _warps(c))),
        "the sums of a warp tile fit into registers",
    ),
    Rule(
        "order",
        lambda c: c.order not in ("identity", "stream_k") or (c.order == "stream_k" and c.swizzle != 1),
        "tiles are in the order identity, or stream_k, which has no swizzle",
    ),
    Rule(
        "pipeline",
        lambda c: (c.schedule == "pipelined") != (c.arch == "sm_75"),
        "sm_75 is pipelined: it has no asynchronous copies, which multistage needs",
    ),
    Rule(
        "stages of the pipeline",
        lambda c: (c.stages != 2) if c.schedule == "pipelined" else not 3 <= c.stages <= 10,
        "pipelined has two stages, multistage three to ten",
    ),
    Rule(
        "asynchronous copies",
        lambda c: c.schedule != "pipelined" and c.alignment * size_of(c.a) < 4,
        "asynchronous copies have at least 4 bytes",
    ),
    Rule("aligned bytes", lambda c: size_of(c.a) == 1 and c.alignment != 16, "INT8 and FP8 operands are aligned to 16"),
    Rule(
        "shared memory",
        lambda c: _stage_bytes(c) * c.stages > SHARED_MEMORY[c.arch],
        "the stages fit into shared memory",
    ),
    Rule(
        "fp8 by wgmma",
        lambda c: c.a in _FP8 and c.arch == "sm_90a",
        "sm_90a multiplies FP8 by wgmma (cooperative or pingpong)",
    ),
)

_CUTLASS_3: Final = (
    Rule("hopper", lambda c: c.arch != "sm_90a", "cooperative and pingpong are schedules of sm_90a"),
    Rule(
        "wgmma",
        lambda c: c.unit != "tensor" or c.warp is not None or c.instruction is not None,
        "the schedule says warp and instruction",
    ),
    Rule(
        "cluster",
        lambda c: (
            c.cluster is None
            or not all(size in (1, 2, 4) for size in c.cluster)
            or c.cluster[2] != 1
            or c.cluster[0] * c.cluster[1] > 8
        ),
        "a cluster has up to 8 threadblocks, 1, 2 or 4 in m and n",
    ),
    Rule(
        "tile m",
        lambda c: c.tile[0] not in ((128, 256) if c.schedule.startswith("cooperative") else (64, 128)),
        "two groups of warps share a cooperative tile, m 128 or 256; one has a pingpong tile, m 64 or 128",
    ),
    Rule("tile n", lambda c: c.tile[1] not in (32, 64, 128, 256), "n of the tile is 32, 64, 128 or 256"),
    Rule(
        "tile k", lambda c: c.tile[2] * size_of(c.a) != 128, "a tile has 128 bytes along k, the widest swizzle of TMA"
    ),
    Rule(
        "TMA",
        lambda c: c.alignment * size_of(c.a) != 16 or c.out_alignment * size_of(c.out) != 16,
        "TMA moves 16 aligned bytes: alignments are 16 bytes",
    ),
    Rule(
        "registers",
        lambda c: _sums(c) > 128,
        "the sums of a tile, twice for accurate FP8, fit into registers: 128 a thread",
    ),
    Rule(
        "tf32 by columns",
        lambda c: c.a == "tf32" and c.a_major == "column",
        "wgmma takes TF32 only contiguous along k; an a by columns is transposed in registers, which spill: multistage",
    ),
    Rule(
        "order",
        lambda c: (
            c.order not in ("persistent", "stream_k")
            or (c.order == "stream_k" and not c.schedule.startswith("cooperative"))
        ),
        "tiles are in the order persistent, or, cooperative ones, stream_k",
    ),
    Rule(
        "shared memory",
        lambda c: _stage_bytes(c) * max(c.stages, 2) + _epilogue_bytes(c) > SHARED_MEMORY[c.arch],
        "two stages or as many as are asked for fit into shared memory beside the epilogue",
    ),
    Rule(
        "stages of the pipeline", lambda c: c.stages == 1, "a pipeline has two stages or more; 0 takes as many as fit"
    ),
)

TABLES: Final = (_PLAIN, _BOTH, _CUTLASS_2, _CUTLASS_3)


def broken(config: KernelConfig) -> list[Rule]:
    """Returns the rules that a GEMM's configuration breaks. Where plain ones are, the others are not asked."""
    plain = [rule for rule in _PLAIN if rule.broken(config)]
    return plain or [rule for rule in (*_BOTH, *(_CUTLASS_3 if hopper(config) else _CUTLASS_2)) if rule.broken(config)]
