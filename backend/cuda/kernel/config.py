"""A kernel as data.

Invariant: a KernelConfig is frozen, and the source of its kernel is a function of it alone, so equal configurations are one library.
`rules.py` says which are valid, `serving.py` which problems they serve; `candidates.py` lists those that are tried; users add their own
with `qsync_fx.backend.cuda.choose.candidates.add`.

Two levels, as in LP-PyTorch (section VI): the hardware configuration (arch, tile, warp, instruction, stages, swizzle, split, schedule) and
the kernel abstraction (which product, in which formats and layouts, with which epilogue).
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any, Literal

from qsync_fx.backend.cuda.problem import Major, Scale

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
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits of everything."""
        return hashlib.sha256(repr(sorted(self.as_json().items())).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """What people read, and file names: operation, arch, formats, tile and schedule, then the digest."""
        tile = "x".join(map(str, self.tile))
        return f"{self.operation}_{self.arch}_{self.a}_{self.b}_{self.out}_{tile}_{self.schedule}_{self.order}_{self.digest}"
