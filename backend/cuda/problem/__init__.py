"""What is to be computed: `problem` (formats, layouts, sizes), from tensors by `operands`.

`padding` says how it may be computed as another problem, and `fallback` is what torch computes: on the CPU, what it
means.
"""

from __future__ import annotations

from qsync_fx.backend.cuda.problem.problem import (
    ConvOperation,
    ConvProblem,
    GemmProblem,
    Major,
    Problem,
    Scale,
)

__all__ = ["ConvOperation", "ConvProblem", "GemmProblem", "Major", "Problem", "Scale"]
