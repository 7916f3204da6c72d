"""Rules of GEMM configurations, in addition to `constraints_shared`.

Invariant: as in `constraints_shared`, whose tables come first.
"""

from __future__ import annotations

from typing import Final, get_args

from qsync_fx.backend.cuda.codegen import gemm_on_hopper
from qsync_fx.backend.cuda.kernel_config import OPERANDS, KernelConfig, size_of
from qsync_fx.backend.cuda.problem import Major
from qsync_fx.backend.cuda.selection import constraints_shared as shared
from qsync_fx.backend.cuda.selection.constraints_shared import (
    WARP,
    ConfigRule,
    registers,
    shared_memory,
)

_FP8: Final = ("fp8", "fp8_e5m2")


def _sums(c: KernelConfig) -> int:
    """Return the accumulators per thread.

    FP8 accumulators move to a second set every few instructions, except in "_fast" schedules.
    """
    sets = 2 if c.a in _FP8 and not c.schedule.endswith("_fast") else 1
    if gemm_on_hopper(c):
        return (
            sets * c.tile[0] * c.tile[1] // (256 if c.schedule.startswith("cooperative") else 128)
        )
    assert c.warp is not None
    return sets * c.warp[0] * c.warp[1] // WARP


def _epilogue_bytes(c: KernelConfig) -> int:
    """Return the shared memory bytes of the sm_90a epilogue.

    It has four buffers of 32 columns, and the vectors of scales and bias.
    """
    return min(c.tile[0], 128) * 32 * size_of(c.out) * 4 + 8 * c.tile[1] + 1024


def _k_major(c: KernelConfig) -> bool:
    return (c.a_major, c.b_major) == ("row", "column")


_PLAIN: Final = (
    *shared.PLAIN,
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
"""Preconditions of the other rules."""

_BOTH: Final = (
    *shared.BOTH,
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

_CUTLASS_2: Final = (
    *shared.CUTLASS_2,
    registers(_sums),
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

_CUTLASS_3: Final = (
    *shared.CUTLASS_3,
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
        lambda c: _sums(c) > 128,
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
    shared_memory(_epilogue_bytes),
)

TABLES: Final = (_PLAIN, _BOTH, _CUTLASS_2, _CUTLASS_3)


def broken(config: KernelConfig) -> list[ConfigRule]:
    """Return the rules that a GEMM's configuration breaks.

    If it breaks plain rules, only these are returned.
    """
    plain = [rule for rule in _PLAIN if rule.broken(config)]
    return plain or [
        rule
        for rule in (*_BOTH, *(_CUTLASS_3 if gemm_on_hopper(config) else _CUTLASS_2))
        if rule.broken(config)
    ]
