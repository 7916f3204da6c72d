"""Products large enough for a kernel, for tests of selection and launching."""

from __future__ import annotations

from dataclasses import replace

from qsync_fx.backend.cuda.problem import GemmProblem

INT8 = GemmProblem(4096, 4096, 4096, "int8", "int8", "bf16", a_scale="tensor", b_scale="tensor")
BF16 = replace(INT8, a="bf16", b="bf16", a_scale="none", b_scale="none")
