"""What the sources of all CUTLASS kernels have in common: a structure of names and numbers, and one macro.

Invariant: a function of the configuration alone, so equal configurations are one library. Everything that computes is in
cpp/cutlass; what is written here only chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from qsync_fx.backend.cuda.kernel.config import KernelConfig, Shape
from qsync_fx.backend.cuda.source.unit import Unit

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


def unit(
    config: KernelConfig,
    interface: Literal["gemm", "conv"],
    header: str,
    types: Mapping[str, str],
    constants: Mapping[str, int | bool | str],
    opcode: str,
    heavy: bool,
) -> Unit:
    """Returns what is to be compiled for a configuration: what `header` makes of a structure `Config`.

    Args:
        types: names of the structure that stand for types, beside those of operands, sums and output.
        constants: names that stand for numbers, flags or enumerators, beside those that every kernel has.
        opcode, heavy: as in `Unit`.
    """
    every_type = {
        "A": ELEMENTS[config.a],
        "B": ELEMENTS[config.b],
        "Accumulator": "std::int32_t" if config.a == "int8" else "float",
        "Output": ELEMENTS[config.out],
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
        *(f"    static constexpr {_declared(name, value)};" for name, value in every_constant.items()),
        "};",
        "",
        f'QSYNC_{interface.upper()}(Config, "{config.name}")',
        "",
    ]
    text = "\n".join(lines)
    return Unit(name=config.name, arch=config.arch, source=text, interface=interface, opcode=opcode, heavy=heavy)


def _declared(name: str, value: int | bool | str) -> str:
    if isinstance(value, str):
        return f"auto {name} = {value}"
    return f"bool {name} = {str(value).lower()}" if isinstance(value, bool) else f"int {name} = {value}"


def fields_2x(config: KernelConfig, instructions: str, operator: str, swizzle: str) -> dict[str, str]:
    """Returns the types that only kernels of CUTLASS 2.x name.

    Args:
        instructions: the oldest architecture that has them: CUTLASS knows its kernels by that.
        operator: what an instruction does.
        swizzle: the order of the tiles, within cutlass::.
    """
    assert config.warp is not None and config.instruction is not None
    shapes = {"Tile": config.tile, "Warp": config.warp, "Instruction": config.instruction}
    return {
        "Arch": f"cutlass::arch::{instructions}",
        "Unit": "cutlass::arch::OpClassSimt" if config.unit == "simt" else "cutlass::arch::OpClassTensorOp",
        "Operator": f"cutlass::arch::{operator}",
        **{name: "cutlass::gemm::GemmShape<{}, {}, {}>".format(*shape) for name, shape in shapes.items()},
        "Swizzle": f"cutlass::{swizzle}",
    }


def shape_3x(shape: Shape) -> str:
    """Returns three sizes as CUTLASS 3.x names them."""
    return "cute::Shape<cute::_{}, cute::_{}, cute::_{}>".format(*shape)
