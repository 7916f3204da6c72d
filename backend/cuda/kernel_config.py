"""Kernel configurations, and the features of each architecture.

A configuration has two levels, as in LP-PyTorch (section VI): the kernel abstraction and the
hardware configuration. It determines the source of its kernel. Limits of architectures come from
the NVIDIA documents named next to them, not from measurements.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Final, Literal

from qsync_fx.backend.cuda.problem.problem import Major, Scale
from qsync_fx.formats import FORMATS

Arch = Literal["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a"]
ARCHITECTURES: tuple[Arch, ...] = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a")

Operation = Literal["gemm", "fprop", "dgrad", "wgrad"]
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class KernelConfig:
    """Configuration of one kernel.

    Attributes, kernel abstraction:
        operation: "gemm", or one of the three products of a 2-D convolution.
        a, b, out: formats, as in `GemmProblem` and `ConvProblem`.
        a_major, b_major: layouts of a GEMM's operands; convolutions are channels-last.
        a_scale, b_scale: both "none" for a kernel that reads no scales. A kernel for every kind of
            scale, or none, has "channel" for both (GEMM), or "tensor" with "channel" (fprop) or
            with "tensor" (gradients).
        bias: whether the kernel can add a bias; it serves problems without one, too.

    Attributes, hardware configuration:
        arch: the target of nvcc.
        unit: tensor cores, or CUDA cores ("simt").
        tile, warp, instruction: sizes (m, n, k) of the tile of a threadblock and of a warp, and of
            the tensor core instruction; the last two are None for wgmma, whose schedule implies
            them.
        stages: pipeline depth; 0 means as many as fit in shared memory (sm_90a only).
        cluster: threadblocks that share loads (sm_90a only).
        schedule: of CUTLASS 2.x "multistage" (cp.async) or "pipelined" (sm_75); of wgmma, which
            only sm_90a has, "cooperative" or "pingpong", for convolutions "warp_specialized". The
            suffix "_fast" accumulates FP8 in the tensor core's own accuracy.
        order: assignment of tiles to multiprocessors: "identity" (2.x), "persistent" (wgmma),
            "stream_k", or "split_k" for weight gradients.
        swizzle: width of the swizzle of identity and persistent: 1, 2, 4 or 8.
        alignment, out_alignment: of the operands and of `d`, in elements.
        strided: whether a convolution serves strides other than 1; a dgrad serves either.
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

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits of the hash of all attributes."""
        attributes = json.loads(json.dumps(asdict(self)))
        return hashlib.sha256(repr(sorted(attributes.items())).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """Readable name: operation, arch, formats, tile, schedule, order, digest."""
        tile = "x".join(map(str, self.tile))
        formats = f"{self.a}_{self.b}_{self.out}"
        variant = f"{tile}_{self.schedule}_{self.order}"
        return f"{self.operation}_{self.arch}_{formats}_{variant}_{self.digest}"


SHARED_MEMORY: Final[dict[Arch, int]] = {
    "sm_75": 64 * 1024, "sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
}  # fmt: skip
"""Shared memory bytes per threadblock (CUDA C++ Programming Guide, technical specifications)."""

BY_CAPABILITY: Final[dict[tuple[int, int], Arch]] = {
    (7, 5): "sm_75", (8, 0): "sm_80", (8, 6): "sm_86", (8, 7): "sm_86", (8, 9): "sm_89",
    (9, 0): "sm_90a",
}  # fmt: skip
"""Compile target by compute capability; Orin (8.7) has the limits of GeForce cards."""

FORWARD: Final[tuple[Arch, ...]] = ("sm_80", "sm_89")
"""Targets whose libraries also contain PTX, which the driver compiles for later devices."""

MULTIPROCESSORS: Final[dict[Arch, int]] = {
    "sm_75": 40, "sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90a": 132,
}  # fmt: skip
"""Multiprocessors of T4, A100, A40, L40 and H100 (NVIDIA data sheets), for absent devices."""

TYPICAL: Final[dict[Arch, str]] = {
    "sm_75": "t4", "sm_80": "a100", "sm_86": "a40", "sm_89": "l40s", "sm_90a": "h100",
}  # fmt: skip
"""Device of the catalog whose constants apply to devices that the catalog lacks."""


def target(capability: tuple[int, int], shared_memory: int | None = None) -> Arch | None:
    """Return the compile target of kernels for a device; None if there are none.

    A device newer than all of `BY_CAPABILITY` runs the PTX of the target in `FORWARD` whose tiles
    fit in its shared memory, by default the size of its generation: data-centre GPUs (10.x, 11.x)
    have at least as much as an A100, GeForce and RTX PRO (12.x) as much as an L40.
    """
    if capability in BY_CAPABILITY or capability < max(BY_CAPABILITY):
        return BY_CAPABILITY.get(capability)
    large = capability[0] in (10, 11)
    if shared_memory is not None:
        large = shared_memory >= SHARED_MEMORY["sm_80"]
    return "sm_80" if large else "sm_89"


OPERANDS: Final[dict[tuple[str, str], Arch]] = {
    ("int8", "int8"): "sm_75",
    ("fp16", "fp16"): "sm_75",
    ("bf16", "bf16"): "sm_80",
    ("tf32", "tf32"): "sm_80",
    ("fp8", "fp8"): "sm_89",
    ("fp8_e5m2", "fp8"): "sm_89",
    ("fp32", "fp32"): "sm_75",
}
"""Formats of `a` and `b` that have kernels, and the first architecture with support for them."""

OUTPUTS: Final = ("fp32", "fp16", "bf16")


def multiplies(arch: Arch, a: str, b: str) -> bool:
    """Return whether an architecture has kernels for operands in formats `a` and `b`."""
    since = OPERANDS.get((a, b))
    return since is not None and ARCHITECTURES.index(arch) >= ARCHITECTURES.index(since)


def wide(arch: Arch) -> str:
    """Return the 16-bit format of products: BF16 if the architecture has a unit for it, or FP16."""
    return next(fmt for fmt in ("bf16", "fp16") if multiplies(arch, fmt, fmt))


INSTRUCTIONS: Final[dict[str, Shape]] = {
    "int8": (16, 8, 32), "fp16": (16, 8, 16), "bf16": (16, 8, 16), "tf32": (16, 8, 8),
    "fp8": (16, 8, 32), "fp8_e5m2": (16, 8, 32),
}  # fmt: skip
"""Shapes of `mma` since sm_80 (PTX ISA, warp-level matrix instructions)."""

_TURING_INSTRUCTIONS: Final[dict[str, Shape]] = {"int8": (8, 8, 16), "fp16": (16, 8, 8)}


def size_of(fmt: str) -> int:
    """Return the bytes per element of a format."""
    return FORMATS[fmt].dtype.itemsize


def instruction_of(config: KernelConfig) -> Shape | None:
    """Return the instruction shape of a 2.x kernel for its operand format, or None."""
    if config.unit == "simt":
        return (1, 1, 1)
    if config.arch == "sm_75":
        return _TURING_INSTRUCTIONS.get(config.a)
    return INSTRUCTIONS.get(config.a)
