"""A kernel as data.

Invariant: a KernelConfig is frozen, and the source of its kernel is a function of it alone, so equal configurations are one library.
`rules.py` says which are valid, `serving.py` which problems they serve; `candidates.py` lists those that are tried; users add their own
with `qsync_fx.backend.cuda.selection.candidates.add`.

Two levels, as in LP-PyTorch (section VI): the hardware configuration (arch, tile, warp, instruction, stages, swizzle, split, schedule) and
the kernel abstraction (which product, in which formats and layouts, with which epilogue).

A kernel as data: a frozen `KernelConfig`, and what each architecture has.

What each architecture has: formats, instructions, shared memory.

Invariant: numbers of NVIDIA's documents, named beside them; what was measured is elsewhere.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from qsync_fx.backend.cuda.problem.problem import Major, Scale
from qsync_fx.formats import FORMATS

Arch = Literal["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a"]
ARCHITECTURES: tuple[Arch, ...] = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a")

Operation = Literal["gemm", "fprop", "dgrad", "wgrad"]
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class KernelConfig:
    """One kernel.

    Attributes, kernel abstraction:
        operation: "gemm", or one of the three products of a 2-D convolution.
        a, b, out: formats, as in `GemmProblem` and `ConvProblem`.
        a_major, b_major: layouts of a GEMM's operands; convolutions have channels last.
        a_scale, b_scale: of a GEMM: both "none", and it reads no scales, or both "channel", and it serves every kind of scale and none.
            Of a convolution: both "none", or "tensor" and, of an output, "channel", of a gradient "tensor"; it serves every kind then.
        bias: whether the kernel can add one. A kernel that can also serves problems without.

    Attributes, hardware configuration:
        arch: the target of nvcc.
        unit: tensor cores, or the ordinary units ("simt").
        tile: threadblock tile (m, n, k).
        warp: warp tile; None for wgmma, where the schedule says it.
        instruction: of the tensor core; None for wgmma.
        stages: of the pipeline; 0 takes as many as shared memory holds (sm_90a only).
        cluster: threadblocks that share loads (sm_90a only).
        schedule: of CUTLASS 2.x kernels "multistage" (cp.async) or "pipelined" (two stages, sm_70 and sm_75); of wgmma kernels, which
            are sm_90a's own, "cooperative" or "pingpong". "_fast" behind it: FP8 sums in the tensor core's own accuracy. sm_90a runs
            multistage kernels too: FP32, and sizes that TMA does not take. Convolutions by wgmma have "warp_specialized" alone.
        order: how tiles are handed to multiprocessors: "identity" (2.x, swizzled by `swizzle`), "persistent" (wgmma, likewise), or
            "stream_k"; "split_k" of weight gradients, as sums of as many parts as keep the device busy.
        swizzle: width of the swizzle: 1, 2, 4 or 8.
        alignment: of `a` and `b`, in elements; pointers and leading dimensions are multiples of it.
        out_alignment: of `d`, in elements.
        strided: convolutions: whether strides other than 1 are served (dgrad is compiled for one or the other).
    """

    operation: Operation
    arch: Arch
    a: str
    b: str
    out: str
    tile: Shape
    unit: Literal["tensor", "simt"] = "tensor"
    a_major: Major = "row"
    b_major: Major = "column"
    a_scale: Scale = "none"
    b_scale: Scale = "none"
    bias: bool = True
    warp: Shape | None = None
    instruction: Shape | None = None
    stages: int = 0
    cluster: Shape | None = None
    schedule: str = "multistage"
    order: str = "identity"
    swizzle: int = 1
    alignment: int = 16
    out_alignment: int = 4
    strided: bool = True

    def as_json(self) -> dict[str, Any]:
        """Returns the attributes as JSON knows them; `from_json` takes them back."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits of everything."""
        return hashlib.sha256(repr(sorted(self.as_json().items())).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """What people read, and file names: operation, arch, formats, tile and schedule, then the digest."""
        tile = "x".join(map(str, self.tile))
        return f"{self.operation}_{self.arch}_{self.a}_{self.b}_{self.out}_{tile}_{self.schedule}_{self.order}_{self.digest}"


SHARED_MEMORY: Final[dict[Arch, int]] = {
    "sm_70": 96 * 1024,
    "sm_75": 64 * 1024,
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
}
"""Bytes that one threadblock may have (CUDA C++ Programming Guide, table of technical specifications per compute capability)."""

BY_CAPABILITY: Final[dict[tuple[int, int], Arch]] = {
    (7, 0): "sm_70",
    (7, 5): "sm_75",
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    # Orin has what GeForce cards of its generation have.
    (8, 7): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
}
"""The target that code is compiled for, by compute capability. Machine code runs on no later generation, and "90a" on 9.0 alone."""

FORWARD: Final[tuple[Arch, ...]] = ("sm_80", "sm_89")
"""Targets whose libraries hold PTX too, which the driver compiles for devices that came later, whatever nvcc knows of them."""

MULTIPROCESSORS: Final[dict[Arch, int]] = {
    "sm_70": 80,
    "sm_75": 40,
    "sm_80": 108,
    "sm_86": 84,
    "sm_89": 142,
    "sm_90a": 132,
}
"""Of V100, T4, A100, A40, L40 and H100 (NVIDIA's data sheets), where the device itself is not asked."""


def target(capability: tuple[int, int], shared_memory: int | None = None) -> Arch | None:
    """Returns what kernels for a device are compiled for; None where there are none.

    A device that is newer than all of `BY_CAPABILITY` takes the PTX of the one of `FORWARD` whose tiles fit into its shared memory.

    Args:
        shared_memory: bytes that one threadblock may have there; by default what its generation has: data-centre GPUs (10.x, 11.x)
            more than an A100, GeForce and RTX PRO (12.x) as much as an L40.
    """
    if capability in BY_CAPABILITY or capability < max(BY_CAPABILITY):
        return BY_CAPABILITY.get(capability)
    large = (
        capability[0] in (10, 11)
        if shared_memory is None
        else shared_memory >= SHARED_MEMORY["sm_80"]
    )
    return "sm_80" if large else "sm_89"


OPERANDS: Final[dict[tuple[str, str], Arch]] = {
    ("int8", "int8"): "sm_70",
    ("fp16", "fp16"): "sm_70",
    ("bf16", "bf16"): "sm_80",
    ("tf32", "tf32"): "sm_80",
    ("fp8", "fp8"): "sm_89",
    ("fp8_e5m2", "fp8"): "sm_89",
    ("fp32", "fp32"): "sm_70",
}
"""Formats of `a` and `b` that there are kernels for, and the first architecture that has them."""

OUTPUTS: Final = ("fp32", "fp16", "bf16")


def wide(arch: Arch) -> str:
    """Returns the format of 16 bits that products run in which a narrower one does not pay for: BF16 where there is a unit for it."""
    return "bf16" if int(arch[3:5]) >= int(OPERANDS["bf16", "bf16"][3:5]) else "fp16"


INSTRUCTIONS: Final[dict[str, Shape]] = {
    "int8": (16, 8, 32),
    "fp16": (16, 8, 16),
    "bf16": (16, 8, 16),
    "tf32": (16, 8, 8),
    "fp8": (16, 8, 32),
    "fp8_e5m2": (16, 8, 32),
}
"""Shapes of `mma` since sm_80 (PTX ISA, warp-level matrix instructions)."""

_BEFORE: Final[dict[Arch, dict[str, Shape]]] = {
    "sm_70": {"fp16": (8, 8, 4)},
    "sm_75": {"int8": (8, 8, 16), "fp16": (16, 8, 8)},
}

_ORDINARY: Final[dict[str, Shape]] = {"fp32": (1, 1, 1), "int8": (1, 1, 4)}
"""What one instruction of an ordinary unit multiplies: dp4a sums four products of INT8."""


def ordinary(arch: Arch, fmt: str) -> bool:
    """Whether ordinary units multiply a format, not tensor cores: FP32, and INT8 before tensor cores had it."""
    return fmt == "fp32" or (arch, fmt) == ("sm_70", "int8")


def size_of(fmt: str) -> int:
    """Returns the bytes in which an operand's value is kept."""
    return FORMATS[fmt].dtype.itemsize


def instruction_of(config: KernelConfig) -> Shape | None:
    """Returns the only shape of instruction that a 2.x kernel of these formats may name; None where there is none."""
    if config.unit == "simt":
        return _ORDINARY.get(config.a)
    return _BEFORE.get(config.arch, INSTRUCTIONS).get(config.a)
