"""Rules of convolution configurations (implicit GEMMs), in addition to `constraints_shared`.

For fprop, rows are pixels, columns are output channels, and sums run over the filter and the input
channels. For dgrad, columns are input channels. For wgrad, rows are output channels, columns are
filter and input channels, and sums run over pixels.

Invariant: as in `constraints_shared`, whose tables come first.
"""

from __future__ import annotations

from typing import Final, get_args

from qsync_fx.backend.cuda.codegen import conv_on_hopper
from qsync_fx.backend.cuda.kernel_config import OPERANDS, KernelConfig, size_of
from qsync_fx.backend.cuda.problem import ConvOperation
from qsync_fx.backend.cuda.selection import constraints_shared as shared
from qsync_fx.backend.cuda.selection.constraints_shared import (
    WARP,
    ConfigRule,
    in_flight,
    registers,
    shared_memory,
)

_EPILOGUE: Final = 32 * 1024  # bytes of shared memory for stores on sm_90a
_BESIDE_PIXELS: Final = 176
"""Registers of 255 that remain next to the addresses and masks of pixels.

Measured: 168 fit on sm_75, 192 spill.
"""

_FEW_SUMS: Final = 64
"""Accumulators per thread if few registers remain for them.

Measured: 64 use up to 224 registers, 128 exceed the limit.
"""


def _sums(c: KernelConfig) -> int:
    """Return the accumulators per thread; on sm_90a one group of four warps has the whole tile."""
    m, n = (c.tile[0], c.tile[1]) if conv_on_hopper(c) or c.warp is None else (c.warp[0], c.warp[1])
    return m * n // (4 * WARP if conv_on_hopper(c) else WARP)


_PLAIN: Final = (
    *shared.PLAIN,
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
"""Preconditions of the other rules."""

_BOTH: Final = (
    *shared.BOTH,
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

_CUTLASS_2: Final = (
    *shared.CUTLASS_2,
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
    registers(_sums),
    ConfigRule(
        "in flight",
        lambda c: (
            c.schedule == "pipelined"
            and c.operation != "wgrad"
            and in_flight(c) + _sums(c) > _BESIDE_PIXELS
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
            c.operation == "dgrad" and c.strided and c.unit == "tensor" and _sums(c) > _FEW_SUMS
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
            and _sums(c) > _FEW_SUMS
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

_CUTLASS_3: Final = (
    *shared.CUTLASS_3,
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
        lambda c: _sums(c) > 128,
        "the accumulators of a tile must fit into registers: 128 per thread",
    ),
    ConfigRule(
        "order",
        lambda c: c.order != "identity" or c.swizzle != 1,
        "the tile order must be identity, with swizzle 1",
    ),
    shared_memory(lambda _: _EPILOGUE),
)

TABLES: Final = (_PLAIN, _BOTH, _CUTLASS_2, _CUTLASS_3)


def broken(config: KernelConfig) -> list[ConfigRule]:
    """Return the rules that a convolution's configuration breaks.

    If it breaks plain rules, only these are returned.
    """
    plain = [rule for rule in _PLAIN if rule.broken(config)]
    return plain or [
        rule
        for rule in (*_BOTH, *(_CUTLASS_3 if conv_on_hopper(config) else _CUTLASS_2))
        if rule.broken(config)
    ]
