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
        "operation", lambda c: c.operation != "gemm", "the operation is gemm, fprop, dgrad or wgrad"
    ),
    ConfigRule(
        "operands",
        lambda c: (c.a, c.b) not in OPERANDS,
        "there are kernels for " + ", ".join(f"{a} x {b}" for a, b in OPERANDS),
    ),
    ConfigRule(
        "layouts",
        lambda c: not {c.a_major, c.b_major} <= set(get_args(Major)),
        "operands lie by rows or by columns",
    ),
    ConfigRule(
        "scales",
        lambda c: (c.a_scale, c.b_scale) not in (("none", "none"), ("channel", "channel")),
        'a kernel reads no scales, or any kind of scale of both operands ("channel")',
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
        "the schedule is multistage, pipelined, cooperative or pingpong",
    ),
)
"""Preconditions of the other rules."""

_BOTH: Final = (
    *shared.BOTH,
    ConfigRule(
        "K-major",
        lambda c: c.unit == "tensor" and c.a in ("int8", *_FP8) and not _k_major(c),
        "tensor cores take INT8 and FP8 only contiguous along k: a by rows, b by columns",
    ),
    ConfigRule(
        "fast",
        lambda c: c.schedule.endswith("_fast") and c.a not in _FP8,
        "only sums of FP8 products have a fast variant",
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
        "tiles are in the order identity, or stream_k, which has no swizzle",
    ),
    ConfigRule(
        "asynchronous copies",
        lambda c: c.schedule != "pipelined" and c.alignment * size_of(c.a) < 4,
        "asynchronous copies have at least 4 bytes",
    ),
    ConfigRule(
        "aligned bytes",
        lambda c: c.unit == "tensor" and size_of(c.a) == 1 and c.alignment != 16,
        "INT8 and FP8 operands of tensor cores are aligned to 16",
    ),
    ConfigRule(
        "fp8 by wgmma",
        lambda c: c.a in _FP8 and c.arch == "sm_90a",
        "sm_90a multiplies FP8 by wgmma (cooperative or pingpong)",
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
        "a cluster has up to 8 threadblocks, 1, 2 or 4 in m and n",
    ),
    ConfigRule(
        "tile m",
        lambda c: (
            c.tile[0] not in ((128, 256) if c.schedule.startswith("cooperative") else (64, 128))
        ),
        "two groups of warps share a cooperative tile, m 128 or 256; one has a pingpong tile, m 64 or 128",
    ),
    ConfigRule(
        "tile n",
        lambda c: c.tile[1] not in (32, 64, 128, 256),
        "n of the tile is 32, 64, 128 or 256",
    ),
    ConfigRule(
        "registers",
        lambda c: _sums(c) > 128,
        "the sums of a tile, twice for accurate FP8, fit into registers: 128 a thread",
    ),
    ConfigRule(
        "tf32 across k",
        lambda c: c.a == "tf32" and (c.a_major, c.b_major) != ("row", "column"),
        "wgmma takes TF32 only contiguous along k: CUTLASS transposes an a by columns in registers, which spill, and stores the transposed "
        "result for a b by rows: multistage",
    ),
    ConfigRule(
        "order",
        lambda c: (
            c.order not in ("persistent", "stream_k")
            or (c.order == "stream_k" and not c.schedule.startswith("cooperative"))
        ),
        "tiles are in the order persistent, or, cooperative ones, stream_k",
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
