"""The source of a GEMM kernel: a structure of names and numbers, and one macro.

Invariant: a function of the configuration alone, so equal configurations are one library. Everything that computes is in
cpp/cutlass; what is written here only chooses.
"""

from __future__ import annotations

from typing import Final

from qsync_fx.backend.cuda.config import KernelConfig, Shape
from qsync_fx.backend.cuda.unit import Unit

ELEMENTS: Final = {
    "int8": "std::int8_t",
    "fp16": "cutlass::half_t",
    "bf16": "cutlass::bfloat16_t",
    # Operands that hold TF32 values already, as all of qsync's do: the tensor core would drop the lower bits of others unrounded.
    "tf32": "cutlass::tfloat32_t",
    "fp32": "float",
    "fp8": "cutlass::float_e4m3_t",
    "fp8_e5m2": "cutlass::float_e5m2_t",
}
"""What CUTLASS calls the formats of `qsync_fx.precision`."""

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
        return "FFMA"
    return (_WGMMA_OPCODES if hopper(config) else _OPCODES)[config.a]


def source(config: KernelConfig) -> Unit:
    """Returns what is to be compiled for `config`, a GEMM that `rules.problems` finds nothing wrong with."""
    header, fields = (
        ("gemm_sm90.cuh", _fields_3x(config)) if hopper(config) else ("gemm_sm75_sm89.cuh", _fields_2x(config))
    )
    types = {
        "A": ELEMENTS[config.a],
        "B": ELEMENTS[config.b],
        "Accumulator": "std::int32_t" if config.a == "int8" else "float",
        "Output": ELEMENTS[config.out],
        "LayoutA": _LAYOUTS[config.a_major],
        "LayoutB": _LAYOUTS[config.b_major],
        **fields,
    }
    numbers = {
        "alignment": config.alignment,
        "out_alignment": config.out_alignment,
        "stages": config.stages,
        "swizzle": config.swizzle,
        "largest_k": LARGEST_K.get(config.a, _UNBOUNDED),
    }
    flags = {
        "stream_k": config.order == "stream_k",
        "scaled": config.a_scale != "none" or config.b_scale != "none",
        "biased": config.bias,
    }
    lines = [
        f'#include "{header}"',
        "",
        "struct Config {",
        *(f"    using {name} = {value};" for name, value in types.items()),
        *(f"    static constexpr int {name} = {value};" for name, value in numbers.items()),
        *(f"    static constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()),
        f"    static constexpr qsync::Activation activation = qsync::Activation::{config.activation};",
        "};",
        "",
        f'QSYNC_GEMM(Config, "{config.name}")',
        "",
    ]
    return Unit(
        name=config.name,
        arch=config.arch,
        source="\n".join(lines),
        interface="gemm",
        opcode=opcode(config),
        heavy=hopper(config),
    )


def _fields_2x(config: KernelConfig) -> dict[str, str]:
    assert config.warp is not None and config.instruction is not None
    if config.order == "stream_k":
        swizzle = "cutlass::gemm::threadblock::ThreadblockSwizzleStreamK"
    else:
        swizzle = f"cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<{config.swizzle}>"
    return {
        "Arch": f"cutlass::arch::{_instruction_set(config)}",
        "Unit": "cutlass::arch::OpClassSimt" if config.unit == "simt" else "cutlass::arch::OpClassTensorOp",
        "Operator": f"cutlass::arch::{_operator(config)}",
        "Tile": _shape("cutlass::gemm::GemmShape<{}, {}, {}>", config.tile),
        "Warp": _shape("cutlass::gemm::GemmShape<{}, {}, {}>", config.warp),
        "Instruction": _shape("cutlass::gemm::GemmShape<{}, {}, {}>", config.instruction),
        "Swizzle": swizzle,
    }


def _instruction_set(config: KernelConfig) -> str:
    """The oldest architecture that has the instructions: CUTLASS knows its kernels by that."""
    if config.arch == "sm_75":
        return "Sm75"
    return "Sm89" if config.a in _FP8 else "Sm80"


def _operator(config: KernelConfig) -> str:
    if config.a == "int8":
        return "OpMultiplyAddSaturate"
    return "OpMultiplyAddFastAccum" if config.schedule.endswith("_fast") else "OpMultiplyAdd"


def _fields_3x(config: KernelConfig) -> dict[str, str]:
    name, _, fast = config.schedule.partition("_")
    kind = name.capitalize()
    return {
        "Tile": _shape("cute::Shape<cute::_{}, cute::_{}, cute::_{}>", config.tile),
        "Cluster": _shape("cute::Shape<cute::_{}, cute::_{}, cute::_{}>", config.cluster or (1, 1, 1)),
        "Schedule": f"cutlass::gemm::KernelTmaWarpSpecialized{kind}{'FP8FastAccum' if fast else ''}",
        "EpilogueSchedule": f"cutlass::epilogue::TmaWarpSpecialized{'Cooperative' if name == 'cooperative' else ''}",
        "Scheduler": f"cutlass::gemm::{'StreamKScheduler' if config.order == 'stream_k' else 'PersistentScheduler'}",
    }


def _shape(pattern: str, shape: Shape) -> str:
    return pattern.format(*shape)
