"""Problems: the product to compute, as formats, layouts and sizes.

`problem` defines `GemmProblem` and `ConvProblem`, and derives them from tensors; start reading
there. `padding` lists equivalent problems with padded sizes or other layouts. `reference_result`
computes a problem with torch; its CPU results define the semantics.
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
