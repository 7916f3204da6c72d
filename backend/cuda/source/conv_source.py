"""The source of a convolution kernel: what `cutlass_source` writes, with the operation and its dimensions.

Invariant: as of `cutlass_source`.
"""

from __future__ import annotations

from typing import Final

from qsync_fx.backend.cuda.kernel.config import KernelConfig
from qsync_fx.backend.cuda.source import cutlass_source
from qsync_fx.backend.cuda.source.unit import Unit

_OPERATIONS: Final = {"fprop": "kFprop", "dgrad": "kDgrad", "wgrad": "kWgrad"}


def hopper(config: KernelConfig) -> bool:
    """Whether the kernel is one of CUTLASS 3.x, for wgmma and TMA; all others are of CUTLASS 2.x."""
    return config.schedule == "warp_specialized"


def opcode(config: KernelConfig) -> str:
    """Returns the instruction that the machine code of a valid configuration holds."""
    if config.unit == "simt":
        return "FFMA"
    letter = "I" if config.a == "int8" else "H"
    return f"{letter}GMMA" if hopper(config) else f"{letter}MMA"


def source(config: KernelConfig) -> Unit:
    """Returns what is to be compiled for `config`, a convolution that `rules.problems` finds nothing wrong with."""
    header, fields = (
        ("conv/conv_sm90.cuh", _fields_3x(config))
        if hopper(config)
        else ("conv/conv_sm75_sm89.cuh", _fields_2x(config))
    )
    constants: dict[str, bool | str] = {
        "strided": config.strided,
        "splits": config.order == "split_k",
        "operation": f"cutlass::conv::Operator::{_OPERATIONS[config.operation]}",
    }
    return cutlass_source.unit(config, "conv", header, fields, constants, opcode(config), hopper(config))


def _fields_2x(config: KernelConfig) -> dict[str, str]:
    if config.operation == "dgrad" and config.strided:
        # A strided gradient is as many products as a stride has steps, one after the other in the grid.
        swizzle = f"conv::threadblock::StridedDgradIdentityThreadblockSwizzle<{config.swizzle}>"
    else:
        swizzle = f"gemm::threadblock::GemmIdentityThreadblockSwizzle<{config.swizzle}>"
    instructions = "Sm75" if config.arch == "sm_75" else "Sm80"
    operator = "OpMultiplyAddSaturate" if config.a == "int8" else "OpMultiplyAdd"
    return cutlass_source.fields_2x(config, instructions, operator, swizzle)


def _fields_3x(config: KernelConfig) -> dict[str, str]:
    m, n, k = (f"cute::_{size}" for size in config.tile)
    # Dimensions that are several of the tensor's are nested: those that are contracted, and of a weight's gradient the columns.
    columns = f"cute::Shape<{n}>" if config.operation == "wgrad" else n
    return {
        "Tile": f"cute::Shape<{m}, {columns}, cute::Shape<{k}>>",
        "Cluster": cutlass_source.shape_3x(config.cluster or (1, 1, 1)),
        "Schedule": "cutlass::conv::KernelImplicitTmaWarpSpecializedSm90",
        "EpilogueSchedule": "cutlass::epilogue::TmaWarpSpecialized",
    }
