"""The source of a GEMM kernel: what `cutlass_source` writes, with the layouts, the order of the tiles and the schedule of a product.

Invariant: as of `cutlass_source`.
"""

from __future__ import annotations

from typing import Final

from qsync_fx.backend.cuda.kernel.config import KernelConfig
from qsync_fx.backend.cuda.source import cutlass_source
from qsync_fx.backend.cuda.source.unit import Unit

LARGEST_K: Final = {"int8": (1 << 17) - 1}
"""Sums of products of two INT8 numbers longer than this may leave 32 bits: `(2**17 - 1) * 2**14 < 2**31`."""

_UNBOUNDED: Final = (1 << 31) - 1
_LAYOUTS: Final = {"row": "cutlass::layout::RowMajor", "column": "cutlass::layout::ColumnMajor"}
_FP8: Final = ("fp8", "fp8_e5m2")
_OPCODES: Final = {"int8": "IMMA", "fp16": "HMMA", "bf16": "HMMA", "tf32": "HMMA", "fp8": "QMMA", "fp8_e5m2": "QMMA"}
_WGMMA_OPCODES: Final = {name: f"{opcode[0]}GMMA" for name, opcode in _OPCODES.items()}


def hopper(config: KernelConfig) -> bool:
    """Whether the kernel is one of CUTLASS 3.x for wgmma; all others are of CUTLASS 2.x."""
    return config.schedule.split("_")[0] in ("cooperative", "pingpong")


def opcode(config: KernelConfig) -> str:
    """Returns the instruction that the machine code of a valid configuration holds."""
    if config.unit == "simt":
        return "IDP.4A" if config.a == "int8" else "FFMA"
    if config.arch == "sm_70":
        return "HMMA.884"
    return (_WGMMA_OPCODES if hopper(config) else _OPCODES)[config.a]


def source(config: KernelConfig) -> Unit:
    """Returns what is to be compiled for `config`, a GEMM that `rules.problems` finds nothing wrong with."""
    if hopper(config):
        header, fields = "gemm/gemm_sm90.cuh", _fields_3x(config)
    else:
        header, fields = (
            "gemm/gemm_sm70.cuh" if config.arch == "sm_70" else "gemm/gemm_sm75_sm89.cuh",
            _fields_2x(config),
        )
    types = {"LayoutA": _LAYOUTS[config.a_major], "LayoutB": _LAYOUTS[config.b_major], **fields}
    constants = {
        "swizzle": config.swizzle,
        "largest_k": LARGEST_K.get(config.a, _UNBOUNDED),
        "stream_k": config.order == "stream_k",
    }
    return cutlass_source.unit(config, "gemm", header, types, constants, opcode(config), hopper(config))


def _fields_2x(config: KernelConfig) -> dict[str, str]:
    if config.order == "stream_k":
        swizzle = "gemm::threadblock::ThreadblockSwizzleStreamK"
    else:
        swizzle = f"gemm::threadblock::GemmIdentityThreadblockSwizzle<{config.swizzle}>"
    return cutlass_source.fields_2x(config, _instruction_set(config), _operator(config), swizzle)


def _instruction_set(config: KernelConfig) -> str:
    """The oldest architecture that has the instructions: CUTLASS knows its kernels by that."""
    if config.arch in ("sm_70", "sm_75"):
        return config.arch.replace("sm_", "Sm")
    return "Sm89" if config.a in _FP8 else "Sm80"


def _operator(config: KernelConfig) -> str:
    if config.a == "int8":
        return "OpMultiplyAdd" if config.unit == "simt" else "OpMultiplyAddSaturate"
    return "OpMultiplyAddFastAccum" if config.schedule.endswith("_fast") else "OpMultiplyAdd"


def _fields_3x(config: KernelConfig) -> dict[str, str]:
    name, _, fast = config.schedule.partition("_")
    kind = name.capitalize()
    return {
        "Tile": cutlass_source.shape_3x(config.tile),
        "Cluster": cutlass_source.shape_3x(config.cluster or (1, 1, 1)),
        "Schedule": f"cutlass::gemm::KernelTmaWarpSpecialized{kind}{'FP8FastAccum' if fast else ''}",
        "EpilogueSchedule": f"cutlass::epilogue::TmaWarpSpecialized{'Cooperative' if name == 'cooperative' else ''}",
        "Scheduler": f"cutlass::gemm::{'StreamKScheduler' if config.order == 'stream_k' else 'PersistentScheduler'}",
    }
