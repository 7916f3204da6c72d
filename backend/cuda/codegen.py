"""Generation of kernel sources: translation units for the templates in cpp/cutlass.

A CUTLASS source is a `Config` structure of types and numbers and one macro; all computation is in
the templates. Quantizers, copies and conversions are plain CUDA in cpp/cutlass/plain. A quantizer
library has every rounding, every grouping, with and without the transpose, for one pair of input
type and format. One copy library moves 8, 16 and 32 bits; a conversion library converts one number
type to the three float types; both transpose and pad.

Invariant: a source is a function of its configuration alone, so equal configurations share a
library. Other inputs are only CUTLASS and the headers in cpp/cutlass, whose contents are part
of the library's key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from qsync_fx.backend.cuda.kernel_config import Arch, KernelConfig, Shape
from qsync_fx.formats import Precision, encoding


@dataclass(frozen=True)
class TranslationUnit:
    """Source of one small library, compiled by nvcc.

    Attributes:
        name: for messages and file names: letters, digits, `_`.
        arch: the target of nvcc.
        source: text of the .cu file. It includes headers of cpp/cutlass by their names.
        interface: argument structure of its functions, see `kernel_build.library`.
        opcode: instruction that the machine code must contain, such as "IMMA"; "" for any.
        heavy: whether compilation needs about 4 GB of memory (CUTLASS 3.x) rather than 1 GB.
    """

    name: str
    arch: Arch
    source: str
    interface: Literal["gemm", "conv", "quantize", "convert"]
    opcode: str = ""
    heavy: bool = False

    @property
    def templates(self) -> bool:
        """Whether it uses CUTLASS templates; all other units are plain CUDA."""
        return self.interface in ("gemm", "conv")


CONVERT_TYPES: Final = {
    "bits8": 0, "bits16": 1, "bits32": 2, "int8": 3, "fp8": 4, "fp8_e5m2": 5, "fp16": 6, "bf16": 7,
    "fp32": 8,
}  # fmt: skip
"""`x_type` and `y_type` of the arguments: raw bits, and formats by name in `qsync_fx.formats`."""

NUMBERS: Final = ("int8", "fp8", "fp8_e5m2", "fp16", "bf16", "fp32")
"""Source formats of conversions."""

FLOATS: Final = ("fp16", "bf16", "fp32")
"""Target formats of conversions."""

_NAMES: Final = {
    "int8": "INT8",
    "fp8": "E4M3",
    "fp8_e5m2": "E5M2",
    "fp16": "FLOAT16",
    "bf16": "BFLOAT16",
    "fp32": "FLOAT32",
}


def copier(arch: Arch) -> TranslationUnit:
    """Return the unit that copies matrices without conversion."""
    return _unit(f"copy_{arch}", arch, "qsync::Bits")


def converter(arch: Arch, x: str) -> TranslationUnit:
    """Return the unit that converts numbers in the format `x` to floats."""
    return _unit(f"convert_{arch}_{x}", arch, f"qsync::FloatsOf<qsync::Element::{_NAMES[x]}>")


def _unit(name: str, arch: Arch, library: str) -> TranslationUnit:
    source = f'#include "plain/convert_library.cuh"\n\nQSYNC_CONVERT("{name}", {library})\n'
    return TranslationUnit(name=name, arch=arch, source=source, interface="convert")


CUTLASS_TYPES: Final = {
    "int8": "std::int8_t",
    "fp16": "cutlass::half_t",
    "bf16": "cutlass::bfloat16_t",
    # Operands contain TF32 values already: the tensor core would truncate others without rounding.
    "tf32": "cutlass::tfloat32_t",
    "fp32": "float",
    "fp8": "cutlass::float_e4m3_t",
    "fp8_e5m2": "cutlass::float_e5m2_t",
}
"""CUTLASS types of the formats in `qsync_fx.formats`."""


def unit(
    config: KernelConfig,
    interface: Literal["gemm", "conv"],
    header: str,
    types: Mapping[str, str],
    constants: Mapping[str, int | bool | str],
    opcode: str,
    heavy: bool,
) -> TranslationUnit:
    """Return the unit of a configuration, which instantiates `header` with a structure `Config`.

    Args:
        types: additional type names, besides operands, accumulator and output.
        constants: additional numbers, flags or enumerators, besides the common ones.
        opcode, heavy: as in `TranslationUnit`.
    """
    every_type = {
        "A": CUTLASS_TYPES[config.a],
        "B": CUTLASS_TYPES[config.b],
        "Accumulator": "std::int32_t" if config.a == "int8" else "float",
        "Output": CUTLASS_TYPES[config.out],
        **types,
    }
    every_constant: dict[str, int | bool | str] = {
        "alignment": config.alignment,
        "out_alignment": config.out_alignment,
        "stages": config.stages,
        "scaled": config.a_scale != "none" or config.b_scale != "none",
        "biased": config.bias,
        **constants,
    }
    lines = [
        f'#include "{header}"',
        "",
        "struct Config {",
        *(f"    using {name} = {value};" for name, value in every_type.items()),
        *(
            f"    static constexpr {_declared(name, value)};"
            for name, value in every_constant.items()
        ),
        "};",
        "",
        f'QSYNC_{interface.upper()}(Config, "{config.name}")',
        "",
    ]
    text = "\n".join(lines)
    return TranslationUnit(
        name=config.name,
        arch=config.arch,
        source=text,
        interface=interface,
        opcode=opcode,
        heavy=heavy,
    )


def _declared(name: str, value: int | bool | str) -> str:
    match value:
        case str():
            return f"auto {name} = {value}"
        case bool():
            return f"bool {name} = {str(value).lower()}"
        case _:
            return f"int {name} = {value}"


def fields_2x(
    config: KernelConfig, instructions: str, operator: str, swizzle: str
) -> dict[str, str]:
    """Return the types that only CUTLASS 2.x kernels use.

    Args:
        instructions: the oldest architecture with the instructions, by which CUTLASS names kernels.
        operator: operation of an instruction.
        swizzle: order of the tiles, within cutlass::.
    """
    assert config.warp is not None and config.instruction is not None
    shapes = {"Tile": config.tile, "Warp": config.warp, "Instruction": config.instruction}
    return {
        "Arch": f"cutlass::arch::{instructions}",
        "Unit": "cutlass::arch::OpClassSimt"
        if config.unit == "simt"
        else "cutlass::arch::OpClassTensorOp",
        "Operator": f"cutlass::arch::{operator}",
        **{
            name: "cutlass::gemm::GemmShape<{}, {}, {}>".format(*shape)
            for name, shape in shapes.items()
        },
        "Swizzle": f"cutlass::{swizzle}",
    }


def shape_3x(shape: Shape) -> str:
    """Return a shape in the syntax of CUTLASS 3.x."""
    return "cute::Shape<cute::_{}, cute::_{}, cute::_{}>".format(*shape)


_OPERATIONS: Final = {"fprop": "kFprop", "dgrad": "kDgrad", "wgrad": "kWgrad"}


def conv_on_hopper(config: KernelConfig) -> bool:
    """Return whether the kernel is of CUTLASS 3.x, for wgmma and TMA; others are of 2.x."""
    return config.schedule == "warp_specialized"


def conv_opcode(config: KernelConfig) -> str:
    """Return the instruction that the machine code of a valid configuration contains."""
    if config.unit == "simt":
        return "FFMA"
    letter = "I" if config.a == "int8" else "H"
    return f"{letter}GMMA" if conv_on_hopper(config) else f"{letter}MMA"


def conv_source(config: KernelConfig) -> TranslationUnit:
    """Return the unit of `config`, a valid convolution (`candidates.problems`)."""
    header, fields = "conv/conv_sm75_sm89.cuh", _conv_fields_2x
    if conv_on_hopper(config):
        header, fields = "conv/conv_sm90.cuh", _conv_fields_3x
    constants: dict[str, bool | str] = {
        "strided": config.strided,
        "splits": config.order == "split_k",
        "operation": f"cutlass::conv::Operator::{_OPERATIONS[config.operation]}",
    }
    return unit(
        config,
        "conv",
        header,
        fields(config),
        constants,
        conv_opcode(config),
        conv_on_hopper(config),
    )


def _conv_fields_2x(config: KernelConfig) -> dict[str, str]:
    if config.operation == "dgrad" and config.strided:
        # A strided gradient is one product per step of the stride, consecutive in the grid.
        swizzle = f"conv::threadblock::StridedDgradIdentityThreadblockSwizzle<{config.swizzle}>"
    else:
        swizzle = f"gemm::threadblock::GemmIdentityThreadblockSwizzle<{config.swizzle}>"
    instructions = "Sm75" if config.arch == "sm_75" else "Sm80"
    operator = "OpMultiplyAddSaturate" if config.a == "int8" else "OpMultiplyAdd"
    return fields_2x(config, instructions, operator, swizzle)


def _conv_fields_3x(config: KernelConfig) -> dict[str, str]:
    m, n, k = (f"cute::_{size}" for size in config.tile)
    # Modes that combine several tensor dimensions are nested: the contracted ones, and the columns
    # of a weight gradient.
    columns = f"cute::Shape<{n}>" if config.operation == "wgrad" else n
    return {
        "Tile": f"cute::Shape<{m}, {columns}, cute::Shape<{k}>>",
        "Cluster": shape_3x(config.cluster or (1, 1, 1)),
        "Schedule": "cutlass::conv::KernelImplicitTmaWarpSpecializedSm90",
        "EpilogueSchedule": "cutlass::epilogue::TmaWarpSpecialized",
    }


LARGEST_K: Final = {"int8": (1 << 17) - 1}
"""Longest sum of INT8 products that fits 32 bits: `(2**17 - 1) * 2**14 < 2**31`."""

_UNBOUNDED: Final = (1 << 31) - 1
_LAYOUTS: Final = {"row": "cutlass::layout::RowMajor", "column": "cutlass::layout::ColumnMajor"}
_FP8: Final = ("fp8", "fp8_e5m2")
_OPCODES: Final = {
    "int8": "IMMA",
    "fp16": "HMMA",
    "bf16": "HMMA",
    "tf32": "HMMA",
    "fp8": "QMMA",
    "fp8_e5m2": "QMMA",
}
_WGMMA_OPCODES: Final = {name: f"{opcode[0]}GMMA" for name, opcode in _OPCODES.items()}


def gemm_on_hopper(config: KernelConfig) -> bool:
    """Return whether the kernel is of CUTLASS 3.x, for wgmma; others are of 2.x."""
    return config.schedule.split("_")[0] in ("cooperative", "pingpong")


def gemm_opcode(config: KernelConfig) -> str:
    """Return the instruction that the machine code of a valid configuration contains."""
    if config.unit == "simt":
        return "FFMA"
    return (_WGMMA_OPCODES if gemm_on_hopper(config) else _OPCODES)[config.a]


def gemm_source(config: KernelConfig) -> TranslationUnit:
    """Return the unit of `config`, a valid GEMM (`candidates.problems`)."""
    if gemm_on_hopper(config):
        header, fields = "gemm/gemm_sm90.cuh", _gemm_fields_3x(config)
    else:
        header, fields = "gemm/gemm_sm75_sm89.cuh", _gemm_fields_2x(config)
    types = {"LayoutA": _LAYOUTS[config.a_major], "LayoutB": _LAYOUTS[config.b_major], **fields}
    constants = {
        "swizzle": config.swizzle,
        "largest_k": LARGEST_K.get(config.a, _UNBOUNDED),
        "stream_k": config.order == "stream_k",
    }
    return unit(
        config, "gemm", header, types, constants, gemm_opcode(config), gemm_on_hopper(config)
    )


def _gemm_fields_2x(config: KernelConfig) -> dict[str, str]:
    if config.order == "stream_k":
        swizzle = "gemm::threadblock::ThreadblockSwizzleStreamK"
    else:
        swizzle = f"gemm::threadblock::GemmIdentityThreadblockSwizzle<{config.swizzle}>"
    return fields_2x(config, _instruction_set(config), _operator(config), swizzle)


def _instruction_set(config: KernelConfig) -> str:
    """Return the oldest architecture with the instructions, by which CUTLASS names kernels."""
    if config.arch == "sm_75":
        return "Sm75"
    return "Sm89" if config.a in _FP8 else "Sm80"


def _operator(config: KernelConfig) -> str:
    if config.a == "int8":
        return "OpMultiplyAddSaturate"
    return "OpMultiplyAddFastAccum" if config.schedule.endswith("_fast") else "OpMultiplyAdd"


def _gemm_fields_3x(config: KernelConfig) -> dict[str, str]:
    name, _, fast = config.schedule.partition("_")
    kind = name.capitalize()
    accumulation = "FP8FastAccum" if fast else ""
    cooperative = "Cooperative" if name == "cooperative" else ""
    scheduler = "StreamK" if config.order == "stream_k" else "Persistent"
    return {
        "Tile": shape_3x(config.tile),
        "Cluster": shape_3x(config.cluster or (1, 1, 1)),
        "Schedule": f"cutlass::gemm::KernelTmaWarpSpecialized{kind}{accumulation}",
        "EpilogueSchedule": f"cutlass::epilogue::TmaWarpSpecialized{cooperative}",
        "Scheduler": f"cutlass::gemm::{scheduler}Scheduler",
    }


X_TYPES: Final = {"fp32": 0, "fp16": 1, "bf16": 2}
"""`x_type` of the arguments, by the format's name in `qsync_fx.formats`."""

QUANTIZER_FORMATS: Final = {"int8": 0, "fp8": 1, "fp8_e5m2": 2}
"""`format` of the arguments, by the name of the format's `encoding`."""

ROUNDINGS: Final = {"nearest": 0, "stochastic": 1, "floor": 2}
"""`rounding` of the arguments."""

_X_NAMES: Final = {"fp32": "FLOAT32", "fp16": "FLOAT16", "bf16": "BFLOAT16"}
_FORMAT_NAMES: Final = {"int8": "INT8", "fp8": "E4M3", "fp8_e5m2": "E5M2"}


def written(row: Precision) -> str | None:
    """Return the name of a format's values in quantizers; None if no quantizer writes them."""
    name = encoding(row).name
    return name if name in QUANTIZER_FORMATS else None


def quantizer(arch: Arch, x: str, fmt: str) -> TranslationUnit:
    """Return the unit of a quantizer.

    Args:
        arch: the target; FP8 requires no unit for it.
        x: input format: "fp32", "fp16" or "bf16".
        fmt: output format, a key of `QUANTIZER_FORMATS`.
    """
    name = f"quantize_{arch}_{x}_{fmt}"
    source = (
        '#include "plain/quantizer_library.cuh"\n\n'
        f'QSYNC_QUANTIZER("{name}", qsync::{_X_NAMES[x]}, qsync::{_FORMAT_NAMES[fmt]})\n'
    )
    return TranslationUnit(name=name, arch=arch, source=source, interface="quantize")
