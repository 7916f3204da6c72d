"""Generation of kernel sources: translation units for the templates in cpp/cutlass.

A CUTLASS source is a `Config` structure and one macro; quantizers, copies and conversions are plain
CUDA. Invariant: a source is a function of its configuration alone, and includes only CUTLASS and
the headers in cpp/cutlass.
"""

from __future__ import annotations

import functools
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

X_TYPES: Final = {"fp32": 0, "fp16": 1, "bf16": 2}
"""`x_type` of a quantizer's arguments, by the format's name in `qsync_fx.formats`."""

QUANTIZER_FORMATS: Final = {"int8": 0, "fp8": 1, "fp8_e5m2": 2}
"""`format` of a quantizer's arguments, by the name of the format's `encoding`."""

ROUNDINGS: Final = {"nearest": 0, "stochastic": 1, "floor": 2}
"""`rounding` of a quantizer's arguments."""

_NAMES: Final = {
    "int8": "INT8", "fp8": "E4M3", "fp8_e5m2": "E5M2", "fp16": "FLOAT16", "bf16": "BFLOAT16",
    "fp32": "FLOAT32",
}  # fmt: skip


def written(row: Precision) -> str | None:
    """Return the name of a format's values in quantizers; None if no quantizer writes them."""
    name = encoding(row).name
    return name if name in QUANTIZER_FORMATS else None


@functools.lru_cache(maxsize=64)
def quantizer(arch: Arch, x: str, fmt: str) -> TranslationUnit:
    """Return the unit of a quantizer from `x`, in `X_TYPES`, to `fmt`, in `QUANTIZER_FORMATS`."""
    name = f"quantize_{arch}_{x}_{fmt}"
    source = (
        '#include "plain/quantizer_library.cuh"\n\n'
        f'QSYNC_QUANTIZER("{name}", qsync::{_NAMES[x]}, qsync::{_NAMES[fmt]})\n'
    )
    return TranslationUnit(name=name, arch=arch, source=source, interface="quantize")


@functools.lru_cache(maxsize=64)
def copier(arch: Arch) -> TranslationUnit:
    """Return the unit that copies matrices without conversion."""
    return _convert(f"copy_{arch}", arch, "qsync::Bits")


@functools.lru_cache(maxsize=64)
def converter(arch: Arch, x: str) -> TranslationUnit:
    """Return the unit that converts numbers in the format `x` to floats."""
    return _convert(f"convert_{arch}_{x}", arch, f"qsync::FloatsOf<qsync::Element::{_NAMES[x]}>")


def converters(arch: Arch) -> list[TranslationUnit]:
    """Return all units that convert numbers on an architecture."""
    return [converter(arch, x) for x in NUMBERS]


def _convert(name: str, arch: Arch, library: str) -> TranslationUnit:
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

LARGEST_K: Final = {"int8": (1 << 17) - 1}
"""Longest sum of INT8 products that fits 32 bits: `(2**17 - 1) * 2**14 < 2**31`."""

_UNBOUNDED: Final = (1 << 31) - 1
_LAYOUTS: Final = {"row": "cutlass::layout::RowMajor", "column": "cutlass::layout::ColumnMajor"}
_UNITS: Final = {"simt": "OpClassSimt", "tensor": "OpClassTensorOp"}
_OPERATIONS: Final = {"fprop": "kFprop", "dgrad": "kDgrad", "wgrad": "kWgrad"}


def on_hopper(config: KernelConfig) -> bool:
    """Return whether the kernel is of CUTLASS 3.x, for wgmma and TMA; others are of 2.x."""
    return config.schedule.startswith(("cooperative", "pingpong", "warp_specialized"))


@functools.lru_cache(maxsize=1024)
def unit_of(config: KernelConfig) -> TranslationUnit:
    """Return the unit of a valid configuration."""
    return gemm_source(config) if config.operation == "gemm" else conv_source(config)


def gemm_source(config: KernelConfig) -> TranslationUnit:
    """Return the unit of a valid GEMM."""
    types = {"LayoutA": _LAYOUTS[config.a_major], "LayoutB": _LAYOUTS[config.b_major]}
    if on_hopper(config):
        header, types = "gemm/gemm_sm90.cuh", {**types, **_gemm_fields_3x(config)}
    else:
        header, types = "gemm/gemm_sm75_sm89.cuh", {**types, **_fields_2x(config)}
    constants = {
        "swizzle": config.swizzle,
        "largest_k": LARGEST_K.get(config.a, _UNBOUNDED),
        "stream_k": config.order == "stream_k",
    }
    return _unit(config, "gemm", header, types, constants)


def conv_source(config: KernelConfig) -> TranslationUnit:
    """Return the unit of a valid convolution."""
    if on_hopper(config):
        header, types = "conv/conv_sm90.cuh", _conv_fields_3x(config)
    else:
        header, types = "conv/conv_sm75_sm89.cuh", _fields_2x(config)
    constants: dict[str, int | str] = {
        "strided": config.strided,
        "splits": config.order == "split_k",
        "operation": f"cutlass::conv::Operator::{_OPERATIONS[config.operation]}",
    }
    return _unit(config, "conv", header, types, constants)


def _unit(
    config: KernelConfig,
    interface: Literal["gemm", "conv"],
    header: str,
    types: dict[str, str],
    constants: Mapping[str, int | str],
) -> TranslationUnit:
    """Return the unit of a configuration, which instantiates `header` with a structure `Config`."""
    types = {
        "A": CUTLASS_TYPES[config.a],
        "B": CUTLASS_TYPES[config.b],
        "Accumulator": {"int8": "std::int32_t"}.get(config.a, "float"),
        "Output": CUTLASS_TYPES[config.out],
        **types,
    }
    constants = {
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
        *(f"    using {name} = {value};" for name, value in types.items()),
        *(f"    static constexpr {_constant(name, value)};" for name, value in constants.items()),
        "};",
        "",
        f'QSYNC_{interface.upper()}(Config, "{config.name}")',
        "",
    ]
    source, opcode, heavy = "\n".join(lines), _opcode(config), on_hopper(config)
    return TranslationUnit(config.name, config.arch, source, interface, opcode, heavy)


def _constant(name: str, value: int | str) -> str:
    kind = {str: "auto", bool: "bool", int: "int"}[type(value)]
    if isinstance(value, bool):
        value = str(value).lower()
    return f"{kind} {name} = {value}"


def _opcode(config: KernelConfig) -> str:
    """Return the instruction that the machine code of a valid configuration contains."""
    if config.unit == "simt":
        return "FFMA"
    letter = {"int8": "I", "fp8": "Q", "fp8_e5m2": "Q"}.get(config.a, "H")
    return f"{letter}GMMA" if on_hopper(config) else f"{letter}MMA"


def _fields_2x(config: KernelConfig) -> dict[str, str]:
    """Return the types that only CUTLASS 2.x kernels use."""
    assert config.warp is not None and config.instruction is not None
    # The oldest architecture with the instructions, by which CUTLASS names kernels.
    architecture, operator = "Sm80", "OpMultiplyAdd"
    if config.arch == "sm_75":
        architecture = "Sm75"
    elif config.a.startswith("fp8"):
        architecture = "Sm89"
    if config.a == "int8":
        operator = "OpMultiplyAddSaturate"
    elif config.schedule.endswith("_fast"):
        operator = "OpMultiplyAddFastAccum"
    swizzle = f"gemm::threadblock::GemmIdentityThreadblockSwizzle<{config.swizzle}>"
    if config.order == "stream_k":
        swizzle = "gemm::threadblock::ThreadblockSwizzleStreamK"
    elif config.operation == "dgrad" and config.strided:
        # A strided gradient is one product per step of the stride, consecutive in the grid.
        swizzle = f"conv::threadblock::StridedDgradIdentityThreadblockSwizzle<{config.swizzle}>"
    return {
        "Arch": f"cutlass::arch::{architecture}",
        "Unit": f"cutlass::arch::{_UNITS[config.unit]}",
        "Operator": f"cutlass::arch::{operator}",
        "Tile": _shape_2x(config.tile),
        "Warp": _shape_2x(config.warp),
        "Instruction": _shape_2x(config.instruction),
        "Swizzle": f"cutlass::{swizzle}",
    }


def _shape_2x(shape: Shape) -> str:
    return "cutlass::gemm::GemmShape<{}, {}, {}>".format(*shape)


def _shape_3x(shape: Shape) -> str:
    return "cute::Shape<cute::_{}, cute::_{}, cute::_{}>".format(*shape)


def _gemm_fields_3x(config: KernelConfig) -> dict[str, str]:
    name, _, fast = config.schedule.partition("_")
    accumulation = "FP8FastAccum" if fast else ""
    cooperative = "Cooperative" if name == "cooperative" else ""
    scheduler = {"stream_k": "StreamK", "persistent": "Persistent"}[config.order]
    return {
        "Tile": _shape_3x(config.tile),
        "Cluster": _shape_3x(config.cluster or (1, 1, 1)),
        "Schedule": f"cutlass::gemm::KernelTmaWarpSpecialized{name.capitalize()}{accumulation}",
        "EpilogueSchedule": f"cutlass::epilogue::TmaWarpSpecialized{cooperative}",
        "Scheduler": f"cutlass::gemm::{scheduler}Scheduler",
    }


def _conv_fields_3x(config: KernelConfig) -> dict[str, str]:
    m, n, k = (f"cute::_{size}" for size in config.tile)
    # Modes that combine several tensor dimensions are nested: the contracted ones, and the columns
    # of a weight gradient.
    if config.operation == "wgrad":
        n = f"cute::Shape<{n}>"
    return {
        "Tile": f"cute::Shape<{m}, {n}, cute::Shape<{k}>>",
        "Cluster": _shape_3x(config.cluster or (1, 1, 1)),
        "Schedule": "cutlass::conv::KernelImplicitTmaWarpSpecializedSm90",
        "EpilogueSchedule": "cutlass::epilogue::TmaWarpSpecialized",
    }
