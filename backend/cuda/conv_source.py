"""The source of a convolution kernel: a structure of names and numbers, and one macro. See `gemm_source`.

Invariant: a function of the configuration alone, so equal configurations are one library.
"""

from __future__ import annotations

from typing import Final

from qsync_fx.backend.cuda.config import KernelConfig
from qsync_fx.backend.cuda.gemm_source import ELEMENTS
from qsync_fx.backend.cuda.unit import Unit

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
    """Returns what is to be compiled for `config`, a convolution that `rules_conv.problems` finds nothing wrong with."""
    header, fields = (
        ("conv_sm90.cuh", _fields_3x(config)) if hopper(config) else ("conv_sm75_sm89.cuh", _fields_2x(config))
    )
    types = {
        "A": ELEMENTS[config.a],
        "B": ELEMENTS[config.b],
        "Accumulator": "std::int32_t" if config.a == "int8" else "float",
        "Output": ELEMENTS[config.out],
        **fields,
    }
    numbers = {"alignment": config.alignment, "out_alignment": config.out_alignment, "stages": config.stages}
    flags = {
        "strided": config.strided,
        "splits": config.order == "split_k",
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
        f"    static constexpr auto operation = cutlass::conv::Operator::{_OPERATIONS[config.operation]};",
        f"    static constexpr auto activation = qsync::Activation::{config.activation};",
        "};",
        "",
        f'QSYNC_CONV(Config, "{config.name}")',
        "",
    ]
    return Unit(
        name=config.name,
        arch=config.arch,
        source="\n".join(lines),
        interface="conv",
        opcode=opcode(config),
        heavy=hopper(config),
    )


def _fields_2x(config: KernelConfig) -> dict[str, str]:
    assert config.warp is not None and config.instruction is not None
    if config.operation == "dgrad" and config.strided:
        # A strided gradient is as many products as a stride has steps, one after the other in the grid.
        swizzle = f"cutlass::conv::threadblock::StridedDgradIdentityThreadblockSwizzle<{config.swizzle}>"
    else:
        swizzle = f"cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<{config.swizzle}>"
    shapes = {"Tile": config.tile, "Warp": config.warp, "Instruction": config.instruction}
    return {
        "Arch": f"cutlass::arch::{'Sm75' if config.arch == 'sm_75' else 'Sm80'}",
        "Unit": "cutlass::arch::OpClassSimt" if config.unit == "simt" else "cutlass::arch::OpClassTensorOp",
        "Operator": f"cutlass::arch::{'OpMultiplyAddSaturate' if config.a == 'int8' else 'OpMultiplyAdd'}",
        **{name: "cutlass::gemm::GemmShape<{}, {}, {}>".format(*shape) for name, shape in shapes.items()},
        "Swizzle": swizzle,
    }


def _fields_3x(config: KernelConfig) -> dict[str, str]:
    m, n, k = (f"cute::_{size}" for size in config.tile)
    # Dimensions that are several of the tensor's are nested: those that are contracted, and of a weight's gradient the columns.
    columns = f"cute::Shape<{n}>" if config.operation == "wgrad" else n
    return {
        "Tile": f"cute::Shape<{m}, {columns}, cute::Shape<{k}>>",
        "Cluster": "cute::Shape<cute::_{}, cute::_{}, cute::_{}>".format(*(config.cluster or (1, 1, 1))),
        "Schedule": "cutlass::conv::KernelImplicitTmaWarpSpecializedSm90",
        "EpilogueSchedule": "cutlass::epilogue::TmaWarpSpecialized",
    }
