"""A translation unit: what nvcc compiles into one small library.

Invariant: `source` is all there is to it but CUTLASS and the headers in cpp/cutlass, whose content is part of the key under which the
library is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qsync_fx.backend.cuda.kernel.config import Arch


@dataclass(frozen=True)
class Unit:
    """
    Attributes:
        name: for messages and file names: letters, digits, `_`.
        arch: the target of nvcc.
        source: the text of the .cu file. It includes headers of cpp/cutlass by their names.
        interface: which argument structure of `abi` its functions take.
        opcode: an instruction that the machine code must hold, such as "IMMA"; "" where any will do.
        heavy: whether compiling it takes some 4 GB of memory (CUTLASS 3.x), not 1.
    """

    name: str
    arch: Arch
    source: str
    interface: Literal["gemm", "conv", "quantize", "convert"]
    opcode: str = ""
    heavy: bool = False

    @property
    def templates(self) -> bool:
        """Whether it is made of CUTLASS's templates; all else is plain CUDA."""
        return self.interface in ("gemm", "conv")
